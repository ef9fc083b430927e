"""The settings people can turn, group by group: name, default, range, flag, help. Plain data, checked at birth.

One field is one setting: its flag, its environment variable (`SERINUS_...`), its key in a settings file and its row
in docs/settings.md are all made from the field. SGLang's names come first, vLLM's are aliases. Knows neither where
values come from (`core/config.py`) nor what they do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any

from serinus.core.errors import ConfigError

__all__ = [
    "KINDS",
    "CacheSettings",
    "KernelSettings",
    "MemorySettings",
    "ModelSettings",
    "PdSettings",
    "RouteSettings",
    "ScheduleSettings",
    "ServerSettings",
    "Setting",
    "UpSettings",
    "check_fields",
    "settings_of",
]

KINDS: dict[str, tuple[type, bool]] = {
    "str": (str, False),
    "str | None": (str, True),
    "int": (int, False),
    "int | None": (int, True),
    "float": (float, False),
    "float | None": (float, True),
    "bool": (bool, False),
    "tuple[str, ...]": (tuple, False),
}
"""Annotation of a field -> (type, whether None is allowed). Other annotations are no settings."""

_EXPECTED = {int: "an integer", float: "a number", str: "a text", bool: "true or false", tuple: "a list of texts"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting as the command line, the environment and the docs see it."""

    name: str
    """Name of the dataclass field."""
    kind: str
    """Its annotation, a key of KINDS."""
    default: Any
    """What holds when nobody says anything."""
    flag: str
    """SGLang's name where it has one."""
    aliases: tuple[str, ...]
    """Other names of the flag, vLLM's among them."""
    inverse: tuple[str, ...]
    """Flags that switch a bool setting off."""
    choices: tuple[str, ...]
    """Allowed texts; empty = any."""
    low: float | None
    """Smallest allowed number."""
    high: float | None
    """Largest allowed number."""
    metavar: str
    """What the help calls the value."""
    help: str
    """One sentence for people."""

    @property
    def env(self) -> str:
        """Name of the environment variable."""
        return "SERINUS_" + self.flag.removeprefix("--").replace("-", "_").upper()

    @property
    def key(self) -> str:
        """Key in a settings file."""
        return self.flag.removeprefix("--")


def _of(
    default: Any,
    help: str,
    *aliases: str,
    flag: str = "",
    inverse: tuple[str, ...] = (),
    choices: tuple[str, ...] = (),
    low: float | None = None,
    high: float | None = None,
    metavar: str = "",
) -> Any:
    """A dataclass field that is a setting; `flag` is only given where it is not the field's own name."""
    metadata = {
        "flag": flag,
        "aliases": aliases,
        "inverse": inverse,
        "choices": choices,
        "low": low,
        "high": high,
        "metavar": metavar,
        "help": help,
    }
    return field(default=default, metadata=metadata)


def _setting(item: Field[Any]) -> Setting:
    meta = dict(item.metadata)
    flag = meta.pop("flag") or "--" + item.name.replace("_", "-")
    assert item.default is not MISSING, f"core: setting {item.name} has no default, expected one"
    return Setting(name=item.name, kind=str(item.type), default=item.default, flag=flag, **meta)


def settings_of(group: type) -> Iterator[Setting]:
    """The settings of one group (a dataclass of this file), in order."""
    for item in fields(group):
        yield _setting(item)


def check_value(setting: Setting, value: Any) -> None:
    """Raise ConfigError unless `value` has the setting's type and lies in its range."""
    kind, optional = KINDS[setting.kind]
    if value is None and optional:
        return
    right = isinstance(value, (int, float)) if kind is float else isinstance(value, kind)
    if not right or (isinstance(value, bool) and kind is not bool):
        raise ConfigError(f"config: {setting.flag} is {value!r}, expected {_EXPECTED[kind]}")
    if setting.choices and value not in setting.choices:
        raise ConfigError(f"config: {setting.flag} is {value!r}, expected one of {', '.join(setting.choices)}")
    if setting.low is not None and not value >= setting.low:
        raise ConfigError(f"config: {setting.flag} is {value}, expected at least {setting.low}")
    if setting.high is not None and not value <= setting.high:
        raise ConfigError(f"config: {setting.flag} is {value}, expected at most {setting.high}")


def check_fields(group: Any) -> None:
    """Check every field of a group; the `__post_init__` of all of them."""
    for setting in settings_of(type(group)):
        check_value(setting, getattr(group, setting.name))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """Which model, and how it is read."""

    model_path: str = _of(
        "", "directory with config.json and safetensors, or a Hugging Face hub id", "--model", metavar="MODEL"
    )
    tokenizer_path: str = _of("", "tokenizer's directory or hub id; default: the model's", "--tokenizer")
    served_model_name: str = _of("", "name that requests use; default: the model path")
    dtype: str = _of(
        "auto",
        "type of weights and activations; auto = bfloat16 where the CPU has it",
        choices=("auto", "bfloat16", "float32"),
    )
    load_format: str = _of(
        "auto",
        "auto = safetensors; dummy = random weights, only config.json is read",
        choices=("auto", "safetensors", "dummy"),
    )
    revision: str | None = _of(None, "branch, tag or commit of a hub id")
    context_length: int | None = _of(
        None, "tokens of one sequence at most; default: the model's own", "--max-model-len", low=2
    )
    random_seed: int | None = _of(
        None, "seed for requests that bring none (and for dummy weights)", "--seed", low=0, high=(1 << 63) - 1
    )
    device: str = _of("auto", "where the model runs", choices=("auto", "cpu", "cuda"))
    chat_template: str = _of("", "a Jinja file (or text) in place of the tokenizer's own template")
    skip_tokenizer_init: bool = _of(False, "no tokenizer: token ids in, token ids out")
    json_model_override_args: str = _of("{}", "JSON object laid over config.json", "--hf-overrides", metavar="JSON")

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Where it listens, who may ask, what it says."""

    host: str = _of("127.0.0.1", "address to listen on; 0.0.0.0 = every interface")
    port: int = _of(30000, "port to listen on; 0 = a free one", low=0, high=65535)
    name: str = _of("", "name of this engine in metrics and meta_info; default: its role and 0", flag="--engine-name")
    api_key: str = _of("", "clients must send it as `Authorization: Bearer KEY`; default: open")
    admin_api_key: str = _of("", "asked for flush and abort; default: the api key")
    log_level: str = _of("info", "least important line that is logged", choices=("debug", "info", "warning", "error"))
    body_bytes_max: int = _of(32 << 20, "larger request bodies are refused with 413", flag="--max-body-bytes", low=1024)
    drain_s_max: float = _of(
        60.0, "seconds that running requests get after SIGTERM before they are cut off", flag="--drain-timeout", low=0
    )

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySettings:
    """How much KV is kept."""

    mem_fraction_static: float | None = _of(
        None,
        "part of the memory that is free once the weights are loaded, for KV; default: 0.2 of a host, 0.85 of a GPU",
        "--gpu-memory-utilization",
        low=0.01,
        high=0.98,
    )
    max_total_tokens: int | None = _of(None, "tokens of KV in the pool; default: from --mem-fraction-static", low=16)
    page_size: int = _of(16, "tokens of one KV page; a power of two", "--block-size", low=1, high=128)
    swa_full_tokens_ratio: float = _of(
        0.8,
        "models with sliding layers: their tokens of KV, as a part of those of the other layers",
        low=0.01,
        high=1.0,
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if self.page_size & (self.page_size - 1):
            raise ConfigError(f"config: --page-size is {self.page_size}, expected a power of two from 1 to 128")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleSettings:
    """Who runs, in which order, how much in one step."""

    max_running_requests: int = _of(64, "requests in one batch at most", "--max-num-seqs", low=1, high=4096)
    max_queued_requests: int = _of(
        4096, "requests that wait at most; one more gets 503", "--max-num-queued-reqs", low=1
    )
    chunked_prefill_size: int = _of(
        2048, "prompt tokens of one step at most; -1 = whole prompts", "--max-num-batched-tokens", low=-1
    )
    schedule_policy: str = _of(
        "fcfs",
        "who comes first: fcfs = first come, lpm = longest cached prefix",
        "--scheduling-policy",
        choices=("fcfs", "lpm"),
    )
    disable_radix_cache: bool = _of(
        False, "share no prefixes", "--no-enable-prefix-caching", inverse=("--enable-prefix-caching",)
    )
    radix_eviction_policy: str = _of(
        "lru", "which cached prefix goes first when room is needed", choices=("lru", "lfu", "fifo", "priority")
    )
    stream_interval: int = _of(1, "tokens per streamed event at most", low=1)
    decode_log_interval: int = _of(40, "decode steps between two log lines; 0 = none", low=0)

    def __post_init__(self) -> None:
        check_fields(self)


_NEEDS_TIERS = "hicache_"


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSettings:
    """The tiers below the device, and what is told and checked of the cache."""

    enable_hierarchical_cache: bool = _of(
        False, "keep KV that leaves the device in host memory (and in storage)", "--enable-hicache"
    )
    hicache_ratio: float = _of(2.0, "host tier: its size, as a multiple of the device's", low=0.1)
    hicache_size: float = _of(0.0, "host tier: its size in GB; 0 = by --hicache-ratio", low=0)
    hicache_write_policy: str = _of(
        "write_through",
        "when KV goes to the host: at once, at its second use, or only when it must leave the device",
        choices=("write_through", "write_through_selective", "write_back"),
    )
    hicache_storage_backend: str = _of(
        "none", "where KV is kept beyond the host; survives a restart", choices=("none", "file")
    )
    hicache_storage_dir: str = _of("", "folder of the storage backend `file`", metavar="DIR")
    hicache_storage_size: float = _of(0.0, "storage: GB at most, the oldest go first; 0 = no bound", low=0)
    hicache_storage_prefetch_policy: str = _of(
        "timeout",
        "how long a request waits for storage: not at all, up to --hicache-prefetch-timeout, or to the end",
        choices=("best_effort", "timeout", "wait_complete"),
    )
    hicache_prefetch_s_max: float = _of(
        1.0, "seconds a request may wait for storage", flag="--hicache-prefetch-timeout", low=0
    )
    kv_events_config: str = _of(
        "", 'publish KV events, in vLLM\'s form: {"publisher": "zmq", "endpoint": ...}', metavar="JSON"
    )
    enable_sanity_check: bool = _of(
        False, "check the cache's invariants while serving: some nodes every step, everything when idle"
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if self.enable_hierarchical_cache:
            self._check_storage()
            return
        for setting in settings_of(type(self)):
            value = getattr(self, setting.name)
            if setting.name.startswith(_NEEDS_TIERS) and value != setting.default:
                raise ConfigError(
                    f"config: {setting.flag} is {value!r} without --enable-hierarchical-cache, expected both or neither"
                )

    def _check_storage(self) -> None:
        if (self.hicache_storage_backend == "file") != bool(self.hicache_storage_dir):
            raise ConfigError(
                f"config: --hicache-storage-backend is {self.hicache_storage_backend!r} with --hicache-storage-dir"
                f" {self.hicache_storage_dir!r}, expected a folder exactly where it is 'file'"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PdSettings:
    """Prefill and decode apart: this engine's part in it."""

    mode: str = _of(
        "null",
        "null = this engine does both",
        flag="--disaggregation-mode",
        choices=("null", "prefill", "decode"),
    )
    transfer_backend: str = _of(
        "auto",
        "how KV travels; auto = shm on one machine, else tcp",
        flag="--disaggregation-transfer-backend",
        choices=("auto", "shm", "tcp", "local"),
    )
    bootstrap_host: str = _of(
        "127.0.0.1", "address of the control port for other engines", flag="--disaggregation-bootstrap-host"
    )
    bootstrap_port: int = _of(
        0,
        "control port for other engines; 0 = a free one (the router asks for it)",
        flag="--disaggregation-bootstrap-port",
        low=0,
        high=65535,
    )
    prefill_addresses: tuple[str, ...] = _of(
        (),
        "control addresses of prefill engines, for decode engines without a router",
        flag="--disaggregation-prefill-addresses",
        metavar="TCP_ADDRESS",
    )
    min_remote_tokens: int = _of(
        32, "prompts that lack fewer tokens are prefilled by decode itself", flag="--disaggregation-min-tokens", low=0
    )
    on_failure: str = _of(
        "recompute",
        "when a handoff fails: recompute the prompt here, or answer an error",
        flag="--disaggregation-on-failure",
        choices=("recompute", "error"),
    )
    handoff_s_max: float = _of(300.0, "seconds one handoff may take", flag="--disaggregation-handoff-timeout", low=0.1)
    keepalive_s: float = _of(
        1.0, "seconds between two signs of life to a peer", flag="--disaggregation-heartbeat-interval", low=0.05
    )
    peer_s_max: float = _of(
        60.0,
        "a peer that is silent for so many seconds, or for 4 of its longest steps, is gone (a killed one: at once)",
        flag="--disaggregation-peer-timeout",
        low=0.1,
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if self.peer_s_max <= self.keepalive_s:
            raise ConfigError(
                f"config: --disaggregation-peer-timeout is {self.peer_s_max},"
                f" expected more than --disaggregation-heartbeat-interval = {self.keepalive_s}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSettings:
    """What computes."""

    attention_backend: str = _of(
        "auto", "column of kernels; ref = the specification, slow", choices=("auto", "ref", "cpu")
    )
    threads: int | None = _of(None, "threads of one engine; default: cores / engines on this machine", low=1, high=1024)

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpSettings:
    """How many engines of which kind on this machine."""

    prefill: int = _of(1, "prefill engines; 0 = every engine does both", low=0, high=64, metavar="P")
    decode: int = _of(1, "decode engines", low=1, high=64, metavar="D")
    no_restart: bool = _of(False, "do not restart an engine that died")
    ready_s_max: float = _of(300.0, "seconds all engines may take to be ready", flag="--ready-timeout", low=1)

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteSettings:
    """Which engines stand behind a router."""

    decode_urls: tuple[str, ...] = _of(
        (), "decode (or unified) engines; they own requests", flag="--decode", metavar="URL"
    )
    prefill_urls: tuple[str, ...] = _of((), "prefill engines", flag="--prefill", metavar="URL")
    poll_s: float = _of(1.0, "seconds between two looks at an engine", flag="--poll-interval", low=0.05)

    def __post_init__(self) -> None:
        check_fields(self)
