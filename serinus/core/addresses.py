"""Addresses as URLs and log lines write them."""

from __future__ import annotations

__all__ = ["http_url"]


def http_url(host: str, port: int) -> str:
    """`http://host:port`, with an IPv6 address in brackets: http://[::1]:30000."""
    return f"http://[{host}]:{port}" if ":" in host and not host.startswith("[") else f"http://{host}:{port}"
