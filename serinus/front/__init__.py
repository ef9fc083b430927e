"""front: the HTTP apps of one engine and of the router.

Meets the engine only through `wire`. Torch-free, and cheap to import: names are loaded when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from serinus.front.app import create_app
    from serinus.front.client import EngineClient, EngineDown
    from serinus.front.fleet import Fleet
    from serinus.front.key_file import KeyFile
    from serinus.front.router import create_router_app
    from serinus.front.server import HttpServer, bind, router_limits
    from serinus.front.settings import FrontSettings, RouterSettings
    from serinus.front.tls import ServerTls, client_tls, server_tls
    from serinus.front.tracing import check_endpoint
    from serinus.front.upstream import Upstream, UpstreamBroken, fetch

__all__ = [
    "EngineClient",
    "EngineDown",
    "Fleet",
    "FrontSettings",
    "HttpServer",
    "KeyFile",
    "RouterSettings",
    "ServerTls",
    "Upstream",
    "UpstreamBroken",
    "bind",
    "check_endpoint",
    "client_tls",
    "create_app",
    "create_router_app",
    "fetch",
    "router_limits",
    "server_tls",
]

_HOMES = {
    "create_app": "app",
    "EngineClient": "client",
    "EngineDown": "client",
    "Fleet": "fleet",
    "KeyFile": "key_file",
    "create_router_app": "router",
    "HttpServer": "server",
    "bind": "server",
    "router_limits": "server",
    "FrontSettings": "settings",
    "RouterSettings": "settings",
    "ServerTls": "tls",
    "client_tls": "tls",
    "server_tls": "tls",
    "check_endpoint": "tracing",
    "Upstream": "upstream",
    "UpstreamBroken": "upstream",
    "fetch": "upstream",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'serinus.front' has no attribute {name!r}")
    return getattr(import_module(f"serinus.front.{home}"), name)
