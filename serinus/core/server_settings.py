"""Settings of an HTTP server and of what its process says of itself: address, keys, limits, the log. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

from serinus.core.addresses import check_host
from serinus.core.errors import ConfigError
from serinus.core.log import LOG_FORMATS
from serinus.core.setting import check_fields, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Address, keys and limits of the HTTP server."""

    host: str = setting("127.0.0.1", "address to listen on; 0.0.0.0 or :: = every interface")
    port: int = setting(30000, "port to listen on; 0 = a free one", low=0, high=65535)
    name: str = setting(
        "", "name of this engine in metrics and meta_info; default: its role and 0", flag="--engine-name"
    )
    api_key: str = setting("", "clients must send it as `Authorization: Bearer KEY`; default: open")
    admin_api_key: str = setting("", "asked for flush and abort; default: the api key")
    api_keys_file: str = setting(
        "", "file with a JSON object a line: API keys with names, weights and limits (docs/KEYS.md); read anew when it"
        " changes, and at SIGHUP", metavar="FILE",
    )  # fmt: skip
    ssl_certfile: str = setting(
        "", "PEM file of the server's certificate and its chain: https instead of http; read anew when it changes",
        metavar="FILE",
    )  # fmt: skip
    ssl_keyfile: str = setting("", "PEM file of the key to it; default: in the same file", metavar="FILE")
    ssl_ca_certs: str = setting(
        "", "PEM file of certificates by which a router trusts engines at https, besides the system's", metavar="FILE"
    )
    allowed_origins: tuple[str, ...] = setting(
        (),
        "web pages of these origins may ask this server (CORS), as in https://chat.example.com; * = any; default: none",
        metavar="ORIGIN",
    )
    no_dashboard: bool = setting(False, "no live page at /dashboard (docs/DASHBOARD.md)")
    log_level: str = setting(
        "info", "least important line that is logged", choices=("debug", "info", "warning", "error")
    )
    log_format: str = setting(
        "text", "text = lines for people; json = one object a line: ts, level, logger, message, and fields such as rid",
        choices=LOG_FORMATS,
    )  # fmt: skip
    otlp_traces_endpoint: str = setting(
        "", "send OpenTelemetry traces there (pip install -e '.[otel]'): http://HOST:4318/v1/traces, or grpc://HOST:4317",
        metavar="URL",
    )  # fmt: skip
    body_bytes_max: int = setting(
        32 << 20, "larger request bodies are refused with 413", flag="--max-body-bytes", low=1024
    )
    drain_s_max: float = setting(
        60.0, "seconds that running requests get after SIGTERM before they are cut off", flag="--drain-timeout", low=0
    )
    watchdog_s_max: float = setting(
        300.0, "a step that takes longer ends the engine, with the stacks of its threads in the log; from a fifth of it"
        " on /health is 503; 0 = wait for ever", flag="--watchdog-timeout", low=0,
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_fields(self)
        check_host(self.host, "config: --host")
        if self.ssl_keyfile and not self.ssl_certfile:
            raise ConfigError(f"config: --ssl-keyfile is {self.ssl_keyfile!r}, expected --ssl-certfile as well")
        scheme, _, place = self.otlp_traces_endpoint.partition("://")
        if self.otlp_traces_endpoint and (scheme not in ("http", "https", "grpc", "grpcs") or not place):
            raise ConfigError(
                f"config: --otlp-traces-endpoint is {self.otlp_traces_endpoint!r}, expected http(s)://host:port/path or"
                " grpc(s)://host:port"
            )
        for origin in self.allowed_origins:
            scheme, _, rest = origin.partition("://")
            if origin != "*" and not (scheme in ("http", "https") and rest and not set(rest) & set("/*?# ")):
                raise ConfigError(f"config: --allowed-origins has {origin!r}, expected * or https://host[:port]")
