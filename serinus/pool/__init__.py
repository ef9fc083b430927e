"""Holds the bytes: the KV of every slot on the device, the host tier, the storage tier; and req_to_token.

`cache` decides which page belongs to which owner and lies where; this room only keeps and moves what it is told to.
"""

from serinus.pool.device import DevicePool, PoolRegion, PoolSpec
from serinus.pool.device_mover import DeviceMover
from serinus.pool.host import HostPool, host_page_counts, map_ahead
from serinus.pool.layer_gate import LayerGate
from serinus.pool.mover import Mover
from serinus.pool.request_table import RequestTable
from serinus.pool.workers import Task, ThreadWorkers, Workers

__all__ = [
    "DeviceMover",
    "DevicePool",
    "HostPool",
    "LayerGate",
    "Mover",
    "PoolRegion",
    "PoolSpec",
    "RequestTable",
    "Task",
    "ThreadWorkers",
    "Workers",
    "host_page_counts",
    "map_ahead",
]
