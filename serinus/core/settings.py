"""The settings people can turn, group by group: name, default, range, flag, help. Plain data, checked at birth.

One field is one setting: its flag, its environment variable (`SERINUS_...`), its key in a settings file and its row
in docs/settings.md are all made from the field (`core/setting.py`). SGLang's names come first, vLLM's are aliases.
Knows neither where values come from (`core/config.py`) nor what they do.
"""

from __future__ import annotations

from dataclasses import dataclass

from serinus.core.addresses import PEERS_MAX, check_host, check_tcp_url, is_wildcard, split_host_port
from serinus.core.canary_settings import CanarySettings, coverage_stride
from serinus.core.errors import ConfigError
from serinus.core.eviction import EVICTION_POLICIES
from serinus.core.queue_bounds import bounds_by_priority
from serinus.core.server_settings import ServerSettings
from serinus.core.setting import check_fields, setting, settings_of

__all__ = [
    "CacheSettings",
    "CanarySettings",
    "KernelSettings",
    "MemorySettings",
    "ModelSettings",
    "ParallelSettings",
    "PdSettings",
    "ScheduleSettings",
    "ServerSettings",
    "coverage_stride",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """Which model, and how it is read."""

    model_path: str = setting(
        "",
        "directory with config.json and safetensors, a file *.gguf, or a Hugging Face hub id",
        "--model",
        metavar="MODEL",
    )
    tokenizer_path: str = setting("", "tokenizer's directory or hub id; default: the model's", "--tokenizer")
    served_model_name: str = setting("", "name that requests use; default: the model path")
    dtype: str = setting(
        "auto",
        "type of weights and activations; auto = bfloat16 where the device has it, else float16 on a GPU (float32 for"
        " Gemma) and float32 on a CPU; bfloat16 on a CPU that has none: KV and activations are, weights are widened",
        choices=("auto", "bfloat16", "float16", "float32"),
    )
    load_format: str = setting(
        "auto",
        "auto = safetensors or GGUF; dummy = random weights, only config.json is read",
        choices=("auto", "safetensors", "dummy"),
    )
    quantization: str = setting(
        "auto",
        "weights of linears and experts: auto = as the checkpoint has them; int8 = a scale for each"
        " output, int4 = a scale for 128 inputs (its output head: int8), made of a bf16, fp16 or fp32 checkpoint as it"
        " is loaded; fp8 = FP8 (e4m3), a scale for each output, as floats in the memory of a CPU; no head",
        choices=("auto", "int8", "int4", "fp8"),
    )
    model_impl: str = setting(
        "auto",
        "code that computes the model: serinus = a family of docs/MODELS.md; transformers = that package, over our KV,"
        " slower, one rank; auto = the first if it can",
        choices=("auto", "serinus", "transformers"),
    )
    revision: str | None = setting(None, "branch, tag or commit of a hub id")
    context_length: int | None = setting(
        None, "tokens of one sequence at most; default: the model's own", "--max-model-len", low=2
    )
    random_seed: int | None = setting(
        None, "seed for requests that bring none (and for dummy weights)", "--seed", low=0, high=(1 << 63) - 1
    )
    device: str = setting("auto", "where the model runs", choices=("auto", "cpu", "cuda"))
    chat_template: str = setting("", "a Jinja file (or text) in place of the tokenizer's own template")
    tool_call_parser: str = setting(
        "auto",
        "how the model writes tool calls: hermes, llama3_json, ... (docs/TOOLS.md); auto = as its template shows",
    )
    reasoning_parser: str = setting(
        "auto",
        "how the model marks its thoughts: qwen3, deepseek_r1, ... (docs/TOOLS.md); auto = as its template shows",
    )
    grammar_backend: str = setting(
        "auto",
        "what holds answers to a grammar (docs/STRUCTURED.md); none: such requests are refused, which saves its memory",
        choices=("auto", "llguidance", "none"),
    )
    skip_tokenizer_init: bool = setting(False, "no tokenizer: token ids in, token ids out")
    generation_config: str = setting(
        "auto",
        "sampling defaults and stop tokens: auto = the checkpoint's generation_config.json; none; or a folder with one",
    )
    json_model_override_args: str = setting("{}", "JSON object laid over config.json", "--hf-overrides", metavar="JSON")

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySettings:
    """How much KV is kept."""

    mem_fraction_static: float | None = setting(
        None,
        "a GPU: part of its memory for weights and KV, default: what the largest step leaves; a CPU: part of the memory"
        " that is free once the weights are loaded, for KV, default: 0.2",
        "--gpu-memory-utilization",
        low=0.01,
        high=0.98,
    )
    max_total_tokens: int | None = setting(
        None, "tokens of KV in the pool; default: from --mem-fraction-static", low=16
    )
    page_size: int = setting(16, "tokens of one KV page; a power of two", "--block-size", low=1, high=128)
    kv_cache_dtype: str = setting(
        "auto",
        "type of keys and values in the pools and tiers: auto = that of the model; fp8_e4m3 (fp8) and fp8_e5m2 = a byte"
        " each: twice the tokens of bfloat16 in the same memory, less exact",
        choices=("auto", "fp8", "fp8_e4m3", "fp8_e5m2"),
    )
    swa_full_tokens_ratio: float = setting(
        0.8,
        "models with sliding layers: their tokens of KV, as a part of those of the other layers",
        low=0.01,
        high=1.0,
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if self.page_size & (self.page_size - 1):
            raise ConfigError(f"config: --page-size is {self.page_size}, expected a power of two from 1 to 128")


_OF_PRIORITY = ("max_queued_by_priority", "priority_ageing_s")
"""Settings that the policy `priority` alone obeys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleSettings:
    """Which requests run, in which order, and how much in one step."""

    max_running_requests: int = setting(64, "requests in one batch at most", "--max-num-seqs", low=1, high=4096)
    max_queued_requests: int = setting(
        4096,
        "requests that wait at most; one more gets 503; under the policy priority, as many of its own priority or a"
        " more important one",
        "--max-num-queued-reqs",
        low=1,
    )
    max_queued_by_priority: tuple[str, ...] = setting(
        (),
        "under the policy priority, how many requests of a priority may wait, as in 0=32 5=8; one more gets 503",
        metavar="PRIORITY=COUNT",
    )
    chunked_prefill_size: int | None = setting(
        None,
        "prompt tokens of one step at most; -1 = whole prompts; default: 2048, on the stages of a CPU 256",
        "--max-num-batched-tokens",
        low=-1,
    )
    max_step_ms: float | None = setting(
        None, "milliseconds of a step at most: prompts are cut to that at the measured rate; 0 = no bound; default: 300"
        " on a CPU, 0 on a GPU and where --chunked-prefill-size is -1", low=0,
    )  # fmt: skip
    schedule_policy: str = setting(
        "fcfs",
        "order of waiting requests of one API key: fcfs = first come, lpm = longest cached prefix (of all keys alike),"
        " priority = smallest `priority` of a request first, to which others give way, then the earliest deadline",
        "--scheduling-policy",
        choices=("fcfs", "lpm", "priority"),
    )
    priority_ageing_s: float = setting(
        60.0,
        "under the policy priority, a request goes before those of one step more importance that came so many seconds"
        " later, so that none waits for ever; 0 = strictly by priority",
        flag="--priority-ageing",
        low=0,
    )
    disable_radix_cache: bool = setting(
        False, "share no prefixes", "--no-enable-prefix-caching", inverse=("--enable-prefix-caching",)
    )
    radix_eviction_policy: str = setting(
        "lru", "which cached prefix goes first when room is needed", choices=tuple(EVICTION_POLICIES)
    )
    request_s_max: float = setting(
        0.0, "seconds until a request ends with 504, queued or running; 0 = never", flag="--request-timeout", low=0
    )
    stream_interval: int = setting(1, "tokens per streamed event at most", low=1)
    decode_log_interval: int = setting(40, "decode steps between two log lines; 0 = none", low=0)

    def __post_init__(self) -> None:
        check_fields(self)
        bounds_by_priority(self.max_queued_by_priority)
        for item in settings_of(type(self)) if self.schedule_policy != "priority" else ():
            value = getattr(self, item.name)
            if item.name in _OF_PRIORITY and value != item.default:
                raise ConfigError(
                    f"config: {item.flag} is {value} with --schedule-policy {self.schedule_policy}, expected"
                    f" --schedule-policy priority"
                )


_OF_TIERS = ("hicache_",)
_OF_STORAGE = ("hicache_storage_", "hicache_prefetch_")
_OF_TIMEOUT = ("hicache_prefetch_",)
_SIZE_MAX = 1_000_000_000
"""Of tiers, in GB or as a multiple: more than any machine has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSettings:
    """The tiers below the device, and what is told and checked of the cache."""

    enable_hierarchical_cache: bool = setting(
        False, "keep KV that leaves the device in host memory (and in storage)", "--enable-hicache"
    )
    hicache_ratio: float = setting(2.0, "host tier: its size, as a multiple of the device's", low=0.1, high=_SIZE_MAX)
    hicache_size: float = setting(
        0.0, "host tier: its size in GB, of each rank; 0 = by --hicache-ratio", low=0, high=_SIZE_MAX
    )
    hicache_write_policy: str = setting(
        "write_through",
        "when KV goes to the host: at once, at its second use, or only when it must leave the device",
        choices=("write_through", "write_through_selective", "write_back"),
    )
    hicache_storage_backend: str = setting(
        "none", "where KV is kept beyond the host; survives a restart", choices=("none", "file")
    )
    hicache_storage_dir: str = setting("", "folder of the storage backend `file`", metavar="DIR")
    hicache_storage_size: float = setting(
        0.0, "storage: GB at most, of all ranks together, the oldest go first; 0 = no bound", low=0, high=_SIZE_MAX
    )
    hicache_storage_prefetch_policy: str = setting(
        "timeout",
        "how long a request waits for storage: not at all, up to --hicache-prefetch-timeout, or to the end",
        choices=("best_effort", "timeout", "wait_complete"),
    )
    hicache_prefetch_s_max: float = setting(
        1.0, "seconds a request may wait for storage", flag="--hicache-prefetch-timeout", low=0
    )
    kv_events_config: str = setting(
        "", 'publish KV events, in vLLM\'s form: {"publisher": "zmq", "endpoint": ...}', metavar="JSON"
    )
    enable_sanity_check: bool = setting(
        False, "check the cache's invariants while serving: some nodes every step, everything when idle"
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.enable_hierarchical_cache:
            self._refuse(_OF_TIERS, "--enable-hierarchical-cache")
        if (self.hicache_storage_backend == "file") != bool(self.hicache_storage_dir):
            raise ConfigError(
                f"config: --hicache-storage-backend is {self.hicache_storage_backend!r} and --hicache-storage-dir"
                f" {self.hicache_storage_dir!r}, expected 'file' and a folder, or neither flag"
            )
        if not self.hicache_storage_dir:
            self._refuse(_OF_STORAGE, "--hicache-storage-backend")
        if self.hicache_storage_prefetch_policy != "timeout":
            self._refuse(_OF_TIMEOUT, "--hicache-storage-prefetch-policy timeout")

    def _refuse(self, names: tuple[str, ...], without: str) -> None:
        """Settings whose names begin so have their defaults, as nothing obeys them without that flag."""
        for item in settings_of(type(self)):
            value = getattr(self, item.name)
            if item.name.startswith(names) and value != item.default:
                raise ConfigError(f"config: {item.flag} is {value!r} without {without}, expected both or neither")


@dataclass(frozen=True, slots=True, kw_only=True)
class PdSettings:
    """Prefill and decode apart: this engine's part in it."""

    mode: str = setting(
        "null",
        "null = this engine does both",
        flag="--disaggregation-mode",
        choices=("null", "prefill", "decode"),
    )
    transfer_backend: str = setting(
        "auto",
        "how KV travels; auto = cuda_ipc between engines on GPUs of one machine, of whatever ranks, with pages of"
        " equal size, else shm, else tcp; mooncake moves memory of the host alone",
        flag="--disaggregation-transfer-backend",
        choices=("auto", "cuda_ipc", "shm", "tcp", "nixl", "mooncake"),
    )
    bootstrap_host: str = setting(
        "127.0.0.1",
        "address of the control port for other engines; 0.0.0.0 or :: = every interface",
        flag="--disaggregation-bootstrap-host",
    )
    bootstrap_port: int = setting(
        0,
        "control port for other engines; 0 = a free one (the router asks for it)",
        flag="--disaggregation-bootstrap-port",
        low=0,
        high=65535,
    )
    prefill_addresses: tuple[str, ...] = setting(
        (),
        "control addresses of prefill engines (tcp://host:port), for decode engines without a router",
        flag="--disaggregation-prefill-addresses",
        metavar="TCP_ADDRESS",
    )
    min_remote_tokens: int = setting(
        32,
        "prompts that lack fewer tokens are prefilled by decode itself; 0, 1 = none is",
        flag="--disaggregation-min-tokens",
        low=0,
    )
    local_gain: float = setting(
        0.0,
        "longer ones too where that brings the first token so many times sooner (1.5, say), by what both engines"
        " measured; 0 = never for that (`up`: 1.5 where it is not given)",
        flag="--disaggregation-local-gain",
        low=0,
    )
    on_failure: str = setting(
        "recompute",
        "when a handoff fails: recompute the prompt here, or answer an error",
        flag="--disaggregation-on-failure",
        choices=("recompute", "error"),
    )
    handoff_s_max: float = setting(
        300.0, "seconds one handoff may take", flag="--disaggregation-handoff-timeout", low=0.1
    )
    keepalive_s: float = setting(
        1.0, "seconds between two signs of life to a peer", flag="--disaggregation-heartbeat-interval", low=0.05
    )
    peer_s_max: float = setting(
        60.0,
        "a peer that is silent for so many seconds, or for 4 of its longest steps, is gone (a killed one: at once)",
        flag="--disaggregation-peer-timeout",
        low=0.1,
    )

    optimistic_prefill: bool = setting(
        False,
        "ask for prompts before decode has pages for them; prefill then computes while decode waits",
        flag="--disaggregation-optimistic-prefill",
    )
    park_tokens: int = setting(
        65536,
        "prefill: finished prompts that wait for decode may keep pages for so many tokens; beyond it, the cache only",
        flag="--disaggregation-park-tokens",
        low=0,
    )
    cluster_secret: str = setting(
        "", "engines hand over only to those that know it too; better SERINUS_CLUSTER_SECRET than a flag that ps shows"
    )

    def __post_init__(self) -> None:
        check_fields(self)
        check_host(self.bootstrap_host, "config: --disaggregation-bootstrap-host")
        if self.transfer_backend == "mooncake" and is_wildcard(self.bootstrap_host):
            raise ConfigError(
                f"config: --disaggregation-bootstrap-host is {self.bootstrap_host!r} with mooncake, expected an address"
                f" of this machine: peers write to it"
            )
        if len(self.prefill_addresses) > PEERS_MAX:
            count = len(self.prefill_addresses)
            raise ConfigError(f"config: --disaggregation-prefill-addresses are {count}, expected at most {PEERS_MAX}")
        for address in self.prefill_addresses:
            check_tcp_url(address, "config: --disaggregation-prefill-addresses")
        if self.peer_s_max <= self.keepalive_s:
            raise ConfigError(
                f"config: --disaggregation-peer-timeout is {self.peer_s_max},"
                f" expected more than --disaggregation-heartbeat-interval = {self.keepalive_s}"
            )

    @property
    def is_one_sided(self) -> bool:
        """Whether peers read or write pools by themselves."""
        return self.transfer_backend in ("cuda_ipc", "nixl", "mooncake")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSettings:
    """Device, threads and kernels."""

    attention_backend: str = setting(
        "auto", "column of kernels; ref = the specification, slow", choices=("auto", "ref", "cpu")
    )
    sampling_backend: str = setting(
        "auto",
        "token_oracle = tokens are a hash of request and position, so that the canary can tell whose they are",
        choices=("auto", "token_oracle"),
    )
    threads: int | None = setting(
        None, "threads of one engine, or of each of its ranks; default: cores / ranks on this machine", low=1, high=1024
    )
    disable_cuda_graph: bool = setting(
        False, "on a GPU: queue each kernel of a decode step by itself", "--enforce-eager"
    )
    disable_overlap_schedule: bool = setting(
        False, "on a GPU: begin each step after the one before it was read and planned on", "--no-async-scheduling"
    )
    cuda_graph_max_bs: int | None = setting(
        None, "on a GPU: largest decode batch that is recorded and replayed as a CUDA graph; default: 256", low=1,
        high=256,
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_fields(self)


_RANKS_MAX = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSettings:
    """How many ranks share one engine, and where they are."""

    tp_size: int = setting(
        1, "ranks that share each layer: heads, MLP and vocabulary", "--tensor-parallel-size", low=1, high=_RANKS_MAX
    )
    pp_size: int = setting(
        1, "stages that share the layers, one after the other", "--pipeline-parallel-size", low=1, high=_RANKS_MAX
    )
    ep_size: int = setting(
        1, "1 = each rank of a layer has a part of every expert; --tp-size = it has some experts whole",
        "--expert-parallel-size", low=1, high=_RANKS_MAX,
    )  # fmt: skip
    pp_layer_partition: str = setting(
        "", "layers of each stage, e.g. 10,12; default: even, the first stages have one more", metavar="N,N,..."
    )
    nnodes: int = setting(1, "machines whose ranks are one engine", low=1, high=_RANKS_MAX)
    node_rank: int = setting(0, "number of this machine; 0 has the leader and answers HTTP", low=0, high=_RANKS_MAX - 1)
    dist_init_addr: str = setting(
        "",
        "host:port of machine 0 where ranks of other machines report; IPv6 as [::1]:5000",
        "--master-addr",
        metavar="HOST:PORT",
    )
    dist_s_max: float = setting(
        600.0, "seconds all ranks may take to report, and one exchange between them", flag="--dist-timeout", low=1
    )
    silence_s_max: float = setting(
        5.0, "a rank whose process gives no sign of life for so many seconds ends the engine", flag="--rank-timeout",
        low=1,
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_fields(self)
        if self.size > _RANKS_MAX:
            raise ConfigError(
                f"config: --tp-size {self.tp_size} times --pp-size {self.pp_size} is {self.size} ranks,"
                f" expected at most {_RANKS_MAX}"
            )
        if self.ep_size not in (1, self.tp_size):
            raise ConfigError(f"config: --ep-size is {self.ep_size}, expected 1 or --tp-size = {self.tp_size}")
        if self.size % self.nnodes:
            raise ConfigError(
                f"config: --nnodes is {self.nnodes}, expected a divisor of the {self.size} ranks: each machine has as"
                f" many as every other"
            )
        if self.node_rank >= self.nnodes:
            raise ConfigError(f"config: --node-rank is {self.node_rank}, expected less than --nnodes = {self.nnodes}")
        self._check_address()
        stages = self.partition
        if stages and len(stages) != self.pp_size:
            raise ConfigError(
                f"config: --pp-layer-partition is {self.pp_layer_partition!r}, {len(stages)} stages, expected"
                f" --pp-size = {self.pp_size} of them"
            )

    def _check_address(self) -> None:
        if (self.nnodes > 1) != bool(self.dist_init_addr):
            expected = "HOST:PORT of machine 0" if self.nnodes > 1 else "none: there is one machine"
            raise ConfigError(
                f"config: --dist-init-addr is {self.dist_init_addr!r} with --nnodes {self.nnodes}, expected {expected}"
            )
        if self.dist_init_addr and not split_host_port(self.dist_init_addr, "config: --dist-init-addr")[1]:
            raise ConfigError(f"config: --dist-init-addr is {self.dist_init_addr!r}, expected a port above 0")

    @property
    def size(self) -> int:
        """Ranks of the engine."""
        return self.tp_size * self.pp_size

    @property
    def local_ranks(self) -> range:
        """Those of this machine."""
        each = self.size // self.nnodes
        return range(self.node_rank * each, (self.node_rank + 1) * each)

    @property
    def partition(self) -> tuple[int, ...]:
        """Layers of each stage; empty = not set. Raises ConfigError."""
        words = [word.strip() for word in self.pp_layer_partition.split(",")] if self.pp_layer_partition else []
        if not all(word.isdecimal() and int(word) for word in words):
            raise ConfigError(
                f"config: --pp-layer-partition is {self.pp_layer_partition!r}, expected layer counts such as 10,12"
            )
        return tuple(map(int, words))
