"""`serinus router`: one address before engines that run elsewhere."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from serinus.cli.parser import Command, UsageProblem, add_settings, make_parser, read_config
from serinus.cli.processes import obeyed
from serinus.core.addresses import http_url
from serinus.core.config import RouterConfig
from serinus.core.fleet_settings import RouteSettings
from serinus.core.heap import settle_heap
from serinus.core.log import get_logger, setup_logging
from serinus.core.settings import ServerSettings
from serinus.core.user_secret import user_secret

if TYPE_CHECKING:
    from serinus.front import HttpServer, RouterSettings


def router_settings(server: ServerSettings, route: RouteSettings) -> RouterSettings:
    """What the router app is told."""
    from serinus.front import RouterSettings

    return RouterSettings(
        decode_urls=route.decode_urls,
        prefill_urls=route.prefill_urls,
        api_key=server.api_key,
        admin_api_key=server.admin_api_key,
        api_keys_file=server.api_keys_file,
        allowed_origins=server.allowed_origins,
        otlp_traces_endpoint=server.otlp_traces_endpoint,
        dashboard=not server.no_dashboard,
        router_secrets=(route.cluster_secret, user_secret()),
        name=server.name or "router",
        body_bytes_max=server.body_bytes_max,
        poll_s=route.poll_s,
        policy=route.policy,
        retry_max_retries=route.retry_max_retries,
        retry_most_s=1e-3 * route.retry_most_ms,
        cb_failure_threshold=route.cb_failure_threshold,
        ssl_ca_certs=server.ssl_ca_certs,
    )


def run(command: Command, words: Sequence[str]) -> int:
    """Route until told to stop. Raises UsageProblem where no engine is named."""
    parser = make_parser(command)
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)  # as of `serinus serve`
    add_settings(parser, RouterConfig)
    config, arguments = read_config(RouterConfig, parser, words)
    if arguments.child is not None:
        config = obeyed(RouterConfig)
    if not config.route.decode_urls and not (config.server.admin_api_key or config.server.api_key):
        raise UsageProblem(
            "no engine is named, expected at least one, --decode http://HOST:PORT, or a key (--admin-api-key) with"
            " which they can be added at /workers"
        )
    setup_logging(config.server.log_level, "router", config.server.log_format)
    from serinus.front import HttpServer, bind, create_router_app, router_limits, server_tls

    app, tls = create_router_app(router_settings(config.server, config.route)), server_tls(config.server)

    def drain() -> None:
        app.state.router.dashboard.drain()
        drain_within(server, config.server.drain_s_max)

    with bind(config.server.host, config.server.port) as sock:
        server: HttpServer = HttpServer(
            app,
            sock,
            on_drain=drain,
            limits=router_limits(),
            metrics=app.state.router.metrics,
            tls=tls,
            keys=app.state.router.keys,
        )
        url = http_url(config.server.host, server.port, tls=tls is not None)
        get_logger("cli").info("serinus: router on %s", url)
        if arguments.child is not None:
            os.write(arguments.child, json.dumps({"url": url, "port": server.port}).encode() + b"\n")
            os.close(arguments.child)
        settle_heap()
        server.run_here()
    return 0


def drain_within(server: HttpServer, s_max: float) -> None:
    """For `on_drain`: say it, and cut off what still runs after `s_max` seconds."""
    get_logger("cli").info("serinus: draining, at most %g s; a second signal stops now", s_max)
    asyncio.get_running_loop().call_later(s_max, server.stop)
