"""Settings of the front and of the router, as plain data that the command line fills in."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import urlsplit

from serinus.core.errors import ConfigError
from serinus.core.settings import ModelSettings, ServerSettings
from serinus.front.key_file import KeyFile
from serinus.front.tls import client_tls
from serinus.front.tracing import check_endpoint
from serinus.text import answer_style

_BODY_BYTES_MAX = 32 << 20


def _check_positive(room_setting: str, value: float) -> None:
    if not value > 0:
        raise ConfigError(f"front: {room_setting} is {value}, expected more than 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontSettings:
    """One front before one engine. Raises ConfigError."""

    model: ModelSettings = field(default_factory=ModelSettings)
    """The model, its tokenizer and how its answers are read."""
    server: ServerSettings = field(default_factory=ServerSettings)
    """Keys and limits of the HTTP server."""
    engine: str = "engine-0"
    """Name of the engine behind this front, in metrics and meta_info."""
    role: str = "unified"
    """Its role: unified, prefill or decode."""
    router_secrets: tuple[str, ...] = ()
    """A router that knows one of these, or the key that opens operations, may say the share of a request
    and name prefill engines (proofs.py)."""
    prefill_addresses: tuple[str, ...] = ()
    """Prefill engines that any request may name."""
    n_max: int = 128
    """Sequences one HTTP request may ask for (n times prompts)."""
    health_generate_s_max: float = 30.0
    """Seconds /health_generate waits for its one token."""
    call_s_max: float = 60.0
    """Seconds a call to the engine (flush, metrics) may take."""
    keep_alive_s: float = 5.0
    """A stream without its first token gets a comment every so many seconds."""

    def __post_init__(self) -> None:
        for name in ("n_max", "health_generate_s_max", "call_s_max", "keep_alive_s"):
            _check_positive(name, getattr(self, name))
        if self.server.api_keys_file:
            KeyFile(self.server.api_keys_file)
        if self.server.otlp_traces_endpoint:
            check_endpoint(self.server.otlp_traces_endpoint)
        model = self.model
        answer_style("", tool_call_parser=model.tool_call_parser, reasoning_parser=model.reasoning_parser)
        if self.role not in ("unified", "prefill", "decode"):
            raise ConfigError(f"front: role is {self.role!r}, expected unified, prefill or decode")

    @property
    def model_name(self) -> str:
        """The name this server answers to."""
        return self.model.served_model_name or self.model.model_path or "serinus"

    @property
    def lazy_tokenizer(self) -> bool:
        """Whether the tokenizer is loaded when a request first needs it: of prefill engines hardly any does."""
        return self.role == "prefill"


def split_alias(where: str) -> tuple[str, str]:
    """Name of the model (empty = the engine's own) and URL of NAME=http://host:port. Raises ConfigError."""
    head, found, tail = where.partition("=")
    name, url = (head.strip(), tail.strip()) if found and "://" not in head else ("", where)
    try:
        place = urlsplit(url)
        is_url = place.scheme in ("http", "https") and bool(place.port or place.hostname)
        (place.hostname or "").encode("idna")
    except ValueError:  # a port that is none, or a host
        is_url = False
    if not is_url or (found and "://" not in head and not name):
        raise ConfigError(f"front: engine address {where!r}, expected http(s)://host:port or MODEL=http(s)://host:port")
    return name, url.rstrip("/")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    """One router before decode (or unified) engines and, if any, prefill engines. Raises ConfigError."""

    decode_urls: tuple[str, ...]
    """http(s)://host:port of the engines that own requests from end to end (decode or unified); at least one where no
    key lets them come later; or MODEL=http(s)://host:port, where requests call its model otherwise than the
    engine does."""
    prefill_urls: tuple[str, ...] = ()
    """Those of the prefill engines."""
    ssl_ca_certs: str = ""
    """File of certificates by which engines at https are trusted, besides the system's."""
    api_key: str = ""
    """Asked of clients, and shown to the engines."""
    admin_api_key: str = ""
    """Asked for flush and abort, and shown to the engines for them; empty = api_key."""
    api_keys_file: str = ""
    """More keys of clients, each with a name, a weight and limits (key_file.py); empty = none."""
    allowed_origins: tuple[str, ...] = ()
    """Web pages of these origins may ask (CORS); `*` = of any."""
    dashboard: bool = True
    """Whether there is a live page at /dashboard, of all engines."""
    router_secrets: tuple[str, ...] = ()
    """What proves to engines that a prefill engine was named here: those of FrontSettings."""
    otlp_traces_endpoint: str = ""
    """Where traces are sent (tracing.py); empty = nowhere."""
    name: str = "router"
    """Name of the router in its metrics."""
    poll_s: float = 1.0
    """Seconds between two looks at an engine's /server_info."""
    poll_s_max: float = 3.0
    """An engine that does not answer a look within this is dead until it answers one."""
    hang_s_max: float = 20.0
    """Requests sent to an engine that has not answered a look for this long are taken back from it."""
    connect_s_max: float = 5.0
    """Seconds a connection to an engine may take."""
    body_bytes_max: int = _BODY_BYTES_MAX
    """A larger request body is refused with 413."""
    policy: str = "cache_aware"
    """Which decode engine gets a request: one of POLICIES."""
    retry_max_retries: int = 5
    """Further engines that a request may be sent to where one has no room, or cannot be reached."""
    retry_first_s: float = 0.05
    """Seconds before it may go to all of them again, the first time; then twice as long..."""
    retry_most_s: float = 2.0
    """...up to so many seconds."""
    cb_failure_threshold: int = 5
    """Failures in a row after which an engine gets no requests for a while; 0 = never."""
    cb_open_s: float = 30.0
    """How long that while is."""

    def __post_init__(self) -> None:
        if not (self.decode_urls or self.admin_api_key or self.api_key):
            raise ConfigError(
                "front: decode_urls is empty, expected the address of at least one decode engine, or a key with which"
                " engines can be added"
            )
        for where in (*self.decode_urls, *self.prefill_urls):
            split_alias(where)
        if self.api_keys_file:
            KeyFile(self.api_keys_file)
        if self.otlp_traces_endpoint:
            check_endpoint(self.otlp_traces_endpoint)
        if self.ssl_ca_certs:
            client_tls(self.ssl_ca_certs)
        for name in ("poll_s", "poll_s_max", "hang_s_max", "connect_s_max", "body_bytes_max", "retry_first_s",
                     "retry_most_s"):  # fmt: skip
            _check_positive(name, getattr(self, name))
