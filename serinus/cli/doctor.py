"""`serinus doctor`: what this machine is, whether it can serve, and whether a checkpoint is whole and fits."""

from __future__ import annotations

import os
import platform
import shutil
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from serinus.cli.http_doc import http_markdown
from serinus.cli.metrics_doc import metrics_markdown
from serinus.cli.parser import Command, add_settings, make_parser, read_config
from serinus.cli.settings_doc import settings_markdown
from serinus.core.config import ServeConfig, environment
from serinus.core.cores import cores, engine_threads
from serinus.core.errors import ConfigError
from serinus.core.version import package_version

if TYPE_CHECKING:
    from rich.table import Table

_PACKAGES = ("torch", "transformers", "numba", "numpy", "safetensors", "msgspec", "pyzmq", "starlette", "uvicorn")
_PORTS = {30000: "serinus serve", 8000: "serinus up and router"}
_SHM_BYTES_MIN = 256 << 20
_MEMORY_BYTES_MIN = 2 << 30
_EXTRAS = {
    "demo": ("openai", "for serinus demo", ""),
    "otel": ("opentelemetry.sdk", "for --otlp-traces-endpoint", ""),
    "ray": ("ray", "for serinus up --ray", ""),
    "nixl": ("nixl._api", "for --disaggregation-transfer-backend nixl", ""),
    "mooncake": (
        "mooncake.engine", "for --disaggregation-transfer-backend mooncake",
        ", and libibverbs (apt-get install libibverbs1)",
    ),
}  # fmt: skip
"""Optional: what must load, what it is for, and what else it needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineCheck:
    """One line of the report."""

    what: str
    """Name of the check."""
    seen: str
    """The result of the check."""
    advice: str = ""
    """What to do about a limitation or a fault; empty = there is none."""
    bad: bool = False
    """It does not work."""
    absent: bool = False
    """It is optional, and not there."""

    @property
    def grade(self) -> str:
        """ok, note (works with a limitation), - (optional, not there) or bad."""
        return "bad" if self.bad else "-" if self.absent else "note" if self.advice else "ok"


def run(command: Command, words: Sequence[str]) -> int:
    """Look and report. Exit code 1 when something is bad."""
    parser = make_parser(command)
    parser.add_argument("--settings-doc", action="store_true", help="print docs/settings.md and nothing else")
    parser.add_argument("--http-doc", action="store_true", help="print docs/HTTP.md and nothing else")
    parser.add_argument("--metrics-doc", action="store_true", help="print docs/METRICS.md and nothing else")
    add_settings(parser, ServeConfig, positional_model=True)
    config, arguments = read_config(ServeConfig, parser, words)
    if arguments.settings_doc:
        print(settings_markdown(), end="")
        return 0
    if arguments.http_doc:
        print(http_markdown(), end="")
        return 0
    if arguments.metrics_doc:
        print(metrics_markdown(), end="")
        return 0
    from serinus.cli.show import console

    looks: list[Callable[[], Iterator[MachineCheck]]] = [
        machine,
        packages,
        extras,
        lambda: threads(config),
        kernels,
        ports,
        shared_memory,
    ]
    findings = [finding for look in looks for finding in look()]
    if config.parallel.size > 1:
        findings += ranks(config)
    if config.model.model_path:
        findings += checkpoint(config)
    console().print(findings_table(findings, f"serinus {package_version()} on {platform.node()}"))
    return 1 if any(finding.bad for finding in findings) else 0


def _gb(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


def _memory() -> dict[str, int]:
    """Bytes by name from /proc/meminfo; empty where there is none."""
    path = Path("/proc/meminfo")
    if not path.exists():
        return {}
    rows = (line.split() for line in path.read_text().splitlines())
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if len(row) == 3}


def machine() -> Iterator[MachineCheck]:
    """Check the processor, its cores and the memory."""
    names = [
        line.split(":", 1)[1].strip()
        for line in (Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else [])
        if line.startswith("model name")
    ]
    yield MachineCheck(what="machine", seen=f"{platform.system()} {platform.machine()}, {names[0] if names else 'CPU'}")
    yield MachineCheck(what="cores", seen=f"{cores()} usable of {os.cpu_count()}")
    memory = _memory()
    if memory:
        free = memory["MemAvailable"]
        small = free < _MEMORY_BYTES_MIN
        yield MachineCheck(
            what="memory",
            seen=f"{_gb(free)} free of {_gb(memory['MemTotal'])}",
            advice="small models only; see --max-total-tokens" if small else "",
        )


def packages() -> Iterator[MachineCheck]:
    """Python and what Serinus stands on."""
    yield MachineCheck(what="python", seen=platform.python_version())
    seen: list[str] = []
    for name in _PACKAGES:
        try:
            seen.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            yield MachineCheck(what=name, seen="not installed", bad=True, advice="pip install serinus")
    yield MachineCheck(what="packages", seen=", ".join(seen))


def extras() -> Iterator[MachineCheck]:
    """What Serinus may use, and does without."""
    for name, (module, purpose, further) in _EXTRAS.items():
        try:
            import_module(module)
        except ImportError:
            how = f"pip install -e '.[{name}]'{further}"
            yield MachineCheck(what=f"extra {name}", seen=f"not installed, {purpose}: {how}", absent=True)
        else:
            yield MachineCheck(what=f"extra {name}", seen=f"installed, {purpose}")


def threads(config: ServeConfig) -> Iterator[MachineCheck]:
    """Thread counts that an engine would have, and those that the environment asks for."""
    asked = {name: environment()[name] for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if name in environment()}
    shown = ", ".join(f"{name}={value}" for name, value in asked.items())
    here = len(config.parallel.local_ranks)
    yield MachineCheck(
        what="threads",
        seen=f"serve uses {engine_threads(config.kernels.threads, here)}"
        + (" in each rank" if config.parallel.size > 1 else "")
        + ", up shares them between its engines"
        + (f" ({shown} is overruled)" if shown else ""),
    )


def ranks(config: ServeConfig) -> Iterator[MachineCheck]:
    """Whether this machine has room for the ranks it was given."""
    from serinus.ranks.devices import comm_device
    from serinus.ranks.rank_processes import mesh_of

    parallel, mesh = config.parallel, mesh_of(config)
    here = [mesh.name(rank) for rank in parallel.local_ranks]
    stages = f", layers by stage {parallel.pp_layer_partition}" if parallel.pp_layer_partition else ""
    crowded = len(here) > cores()
    yield MachineCheck(
        what="ranks",
        seen=f"{mesh.size} (TP {mesh.tp} x PP {mesh.pp}{stages}), on this machine {', '.join(here)}",
        advice=f"{len(here)} ranks share {cores()} cores" if crowded else "",
    )
    try:
        devices = [comm_device(config, rank) for rank in parallel.local_ranks]
    except ConfigError as error:
        yield MachineCheck(what="devices", seen=str(error), bad=True, advice="fewer ranks, or --device cpu")
    else:
        how = "gloo" if devices[0] == "cpu" else "NCCL"
        yield MachineCheck(what="devices", seen=f"{', '.join(dict.fromkeys(devices))}, joined by {how}")


def kernels() -> Iterator[MachineCheck]:
    """Which column of kernels serves which op here, in which types."""
    import torch

    from serinus.kernels import load

    cuda = torch.cuda.is_available()
    try:
        loaded = [load(device) for device in ("cpu", *(["cuda"] if cuda else []))]
    except (ConfigError, ImportError) as error:
        yield MachineCheck(what="kernels", seen=str(error), bad=True, advice="serinus serve --attention-backend ref")
        return
    bf16 = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    yield MachineCheck(
        what="kernels",
        seen=f"bfloat16 {'yes' if bf16 else 'no'}; CUDA {'yes' if cuda else 'no'}",
        advice="" if bf16 else "float32 is used: twice the memory, half the speed",
    )
    for each in loaded:
        yield MachineCheck(what=f"kernels on {each.device}", seen=each.summary())
    if cuda:
        from serinus.kernels.triton.flash_attention import flash_attention

        found = flash_attention(torch.device("cuda", torch.cuda.current_device())) is not None
        yield MachineCheck(
            what="prompts on cuda", seen="FlashAttention 3 (fa3-fwd)" if found else "own attention",
            advice="" if found else "on a Hopper, with CUDA 13: pip install -e '.[flash]'",
        )  # fmt: skip


def ports() -> Iterator[MachineCheck]:
    """Whether the default ports are free."""
    for port, owner in _PORTS.items():
        with socket.socket() as sock:
            sock.settimeout(0.2)
            busy = sock.connect_ex(("127.0.0.1", port)) == 0
        yield MachineCheck(
            what=f"port {port}",
            seen="in use" if busy else "free",
            advice=f"default of {owner}; choose another with --port" if busy else "",
        )


def shared_memory() -> Iterator[MachineCheck]:
    """Room for KV on its way between engines."""
    place = Path("/dev/shm")
    if not place.is_dir():
        yield MachineCheck(
            what="shared memory",
            seen="no /dev/shm",
            advice="use --disaggregation-transfer-backend tcp",
        )
        return
    free = shutil.disk_usage(place).free
    small = free < _SHM_BYTES_MIN
    yield MachineCheck(
        what="shared memory",
        seen=f"{_gb(free)} free in /dev/shm",
        advice="docker run --shm-size=1g, or --disaggregation-transfer-backend tcp" if small else "",
    )


def checkpoint(config: ServeConfig) -> list[MachineCheck]:
    """Config, weights, tokenizer, and the room for KV under these settings."""
    findings: list[MachineCheck] = []
    try:
        for finding in _model(config):
            findings.append(finding)  # one by one: what was found before an error stays
    except ConfigError as error:
        findings.append(MachineCheck(what="checkpoint", seen=str(error), bad=True, advice="see the message"))
    return findings


def _model(config: ServeConfig) -> Iterator[MachineCheck]:
    from serinus.models import check_weights, file_bytes, spec_of
    from serinus.ranks.build import choose_device
    from serinus.ranks.memory import available_bytes
    from serinus.ranks.rank_processes import mesh_of
    from serinus.text import load_generation_config, load_tokenizer

    spec = spec_of(config.model)
    window = "" if spec.window is None else f", window {spec.window}"
    signature = f", signature {spec.signature[:12]}" if spec.signature else ""  # else it is of weights, not loaded here
    yield MachineCheck(
        what="model",
        seen=f"{spec.architecture}, {spec.layer_count} layers, {spec.kv_head_count} KV heads of {spec.head_size},"
        f" context {spec.context_length}{window}{signature}",
    )
    if spec.quantization is not None:
        yield MachineCheck(what="quantization", seen=spec.quantization.text)
    if config.parallel.size > 1:
        shards = spec.shards(mesh_of(config), config.parallel.partition)
        each = ", ".join(
            f"{shard.name}: {len(shard.layers)} layers, {len(shard.kv_heads)} KV heads" for shard in shards
        )
        yield MachineCheck(what="shards", seen=each)
    load_generation_config(spec.path, config.model.generation_config)
    tokenizer = load_tokenizer(spec.path)
    chat = "with" if tokenizer.template is not None else "without"
    yield MachineCheck(what="tokenizer", seen=f"{tokenizer.vocab_size} tokens, {chat} chat template")
    check_weights(spec, Path(spec.path), config.model.load_format)
    weights, device = file_bytes(Path(spec.path)), choose_device(config.model.device)
    free = available_bytes(device)
    fits = weights < free
    yield MachineCheck(
        what="weights",
        seen=f"{_gb(weights)}; {_gb(free)} of memory free" + ("" if device == "cpu" else f" on {device}"),
        bad=not fits,
        advice="" if fits else "a machine with more memory, or a smaller model",
    )
    if fits:
        yield from _kv(config, weights)


def _kv(config: ServeConfig, weights: int) -> Iterator[MachineCheck]:
    """Room for KV by part and tier, as an engine that starts now would take it."""
    from serinus.engine import kv_sizes

    sizes = kv_sizes(config, weights)
    for part, pool in sizes.pools.items():
        room = _room(pool.page_count, pool.page_size, pool.page_bytes)
        kind = str(pool.dtype).removeprefix("torch.")
        most = "" if pool.device == "cpu" else ", less what the largest step takes, which is run at start"
        yield MachineCheck(what=f"KV {part.name.lower()}", seen=f"{room} of {kind} on {pool.device}{most}")
    for part, count in sizes.host.items():
        pool = sizes.pools[part]
        yield MachineCheck(what=f"host {part.name.lower()}", seen=_room(count, pool.page_size, pool.page_bytes))
    if not sizes.host:
        yield MachineCheck(what="host tier", seen="off (--enable-hierarchical-cache)")
    settings = config.cache
    if settings.hicache_storage_backend == "file":
        bound = f"at most {settings.hicache_storage_size:g} GB" if settings.hicache_storage_size else "no bound"
        yield MachineCheck(what="storage", seen=f"{settings.hicache_storage_dir}, {bound}")


def _room(page_count: int, page_size: int, page_bytes: int) -> str:
    tokens = (page_count - 1) * page_size
    return (
        f"{tokens:,} tokens, {page_count * page_bytes / 1e9:.2f} GB ({page_bytes / page_size / 1e3:.1f} KB per token)"
    )


_GRADES = {"ok": "[green]ok[/]", "-": "[dim]-[/]", "note": "[yellow]note[/]", "bad": "[red]bad[/]"}


def findings_table(findings: Sequence[MachineCheck], title: str) -> Table:
    """What `serinus doctor` saw."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=title, title_justify="left", show_header=False)
    for finding in findings:
        advice = f"\n[dim]-> {escape(finding.advice)}[/]" if finding.advice else ""
        table.add_row(_GRADES[finding.grade], finding.what, escape(finding.seen) + advice)
    return table
