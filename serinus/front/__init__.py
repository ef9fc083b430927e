"""front: the HTTP apps of one engine and of the router.

Meets the engine only through `wire`. Torch-free, and cheap to import: names are loaded when first used.
"""

from typing import TYPE_CHECKING

from serinus.core.lazy import lazy_names

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

__getattr__ = lazy_names(
    __name__,
    app="create_app",
    client="EngineClient EngineDown",
    fleet="Fleet",
    key_file="KeyFile",
    router="create_router_app",
    server="HttpServer bind router_limits",
    settings="FrontSettings RouterSettings",
    tls="ServerTls client_tls server_tls",
    tracing="check_endpoint",
    upstream="Upstream UpstreamBroken fetch",
)
