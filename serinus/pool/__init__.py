"""Holds the bytes: the KV of every slot, and the table that says which slot a request's position has.

`cache` decides which page belongs to whom; this room only keeps and moves what it is told to.
"""

from serinus.pool.device import DevicePool, PoolSpec
from serinus.pool.request_table import RequestTable

__all__ = ["DevicePool", "PoolSpec", "RequestTable"]
