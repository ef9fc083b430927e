"""`serinus demo`: from nothing to a disaggregated chat, in one terminal, with everything stopped at the end.

Makes a small checkpoint if none is there, runs `serinus up` with one prefill and one decode engine, talks to it through
the official `openai` client, and shows which engine did what. Exit code 0 only if all of it went right.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serinus.cli.parser import Command, UsageProblem, make_parser
from serinus.cli.show import console
from serinus.core.clock import WallClock
from serinus.core.errors import ConfigError, SerinusError
from serinus.core.free_ports import free_ports

if TYPE_CHECKING:
    from openai import OpenAI
    from rich.console import Console

__all__ = ["run"]

_READY_S_MAX = 180.0
_STOP_S_MAX = 60.0
_COUNT_S_MAX = 10.0
"""For the engines' counts of sent and received pages to agree."""
_SYSTEM = (
    "You are a canary. You sing while the air is good, and you fall silent before the miners notice. "
    "A cache of keys and values remembers every token of the prompt, so that nothing is computed twice. "
    "Prefill reads the whole question at once; decode writes the answer, one token after the other. "
    "Every page of the cache has exactly one owner, and every page that travels is granted, counted and checked. "
) * 3
_STORY = "Once upon a time there was a small yellow bird who lived in a cage by the window of a printing house. " * 3


class DemoFailed(SerinusError):
    """The demo did not do what it promises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """One streamed answer as the client saw it."""

    what: str
    prompt_tokens: int
    output_tokens: int
    first_ms: float
    """Milliseconds from the call to the first piece of text."""
    per_second: float
    """Tokens per second after it."""


def run(command: Command, words: Sequence[str]) -> int:
    """Run the demo. Exit code 0 if all went right, else 1. Raises ConfigError without the openai client."""
    parser = make_parser(command, settings=False)
    parser.add_argument("--checkpoint", default="demo-checkpoint", metavar="DIR", help="made if it is not there")
    parser.add_argument("--backend", default="auto", choices=("auto", "shm", "tcp"), help="how KV travels")
    parser.add_argument("--max-tokens", type=int, default=48, metavar="N", help="length of the answers (default: 48)")
    arguments = parser.arguments(words)
    if arguments.max_tokens < 2:
        raise UsageProblem(f"--max-tokens is {arguments.max_tokens}, expected at least 2")
    try:
        from openai import OpenAIError  # said before anything is made or started
    except ImportError as error:
        raise ConfigError(f"demo: {error}, expected the extra of the demo: pip install -e '.[demo]'") from None
    out = console()
    try:
        _demo(out, Path(arguments.checkpoint), arguments.backend, arguments.max_tokens)
    except (DemoFailed, OpenAIError) as error:
        out.print(f"[red]the demo failed:[/] {error}", highlight=False)
        return 1
    out.print("[green]All went right.[/] Next: `serinus up ./your-model`, or `serinus serve --help`.", highlight=False)
    return 0


def _demo(out: Console, folder: Path, backend: str, max_tokens: int) -> None:
    out.rule("[bold]1  a model")
    _make(out, folder)
    out.rule("[bold]2  serinus up: 1 prefill engine + 1 decode engine + router")
    group = _Group(folder, backend)
    try:
        report = group.wait_ready()
        _show_start(out, report)
        client = _client(report["url"])
        out.rule("[bold]3  the official openai client talks to it")
        told = [_chat(out, client, max_tokens), _complete(out, client, max_tokens)]
        out.rule("[bold]4  who did what")
        _show_told(out, told)
        _native(out, report["url"], max_tokens)
        _show_engines(out, report["url"])
    finally:
        code = group.stop()
    if code != 0:
        raise DemoFailed(f"serinus up ended with exit code {code}, expected 0:\n{group.tail()}")


def _make(out: Console, folder: Path) -> None:
    """The demo checkpoint: Qwen3 in small, random weights, a real tokenizer."""
    if (folder / "config.json").exists():
        out.print(f"{folder}/ is there already", highlight=False)
        return
    from serinus.models import make_checkpoint

    clock = WallClock()
    began = clock.now()
    make_checkpoint(
        folder,
        "qwen3",
        hidden=512,
        layers=8,
        heads=8,
        kv_heads=2,
        head_size=64,
        vocab=768,  # all of them words of the demo's tokenizer
        context=4096,
        dtype="bfloat16",
        tied=True,
    )
    out.print(
        f"made {folder}/ in {clock.now() - began:.1f} s: Qwen3 in small, 8 layers of 512, bfloat16, random weights"
        " (its answers make no sense, but they take the whole way)",
        highlight=False,
    )


class _Group:
    """`serinus up` as a child."""

    def __init__(self, folder: Path, backend: str) -> None:
        read_end, write_end = os.pipe()
        self._read_end = read_end
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # lives as long as the group
        words = ("-m", "serinus", "up", str(folder), "--prefill", "1", "--decode", "1")
        flags = ("--port", str(free_ports(1)[0]), "--ready-fd", str(write_end), "--served-model-name", "demo")
        transfer = ("--disaggregation-transfer-backend", backend)
        self._process = subprocess.Popen(
            (sys.executable, *words, *flags, *transfer),
            stdout=self._log,
            stderr=subprocess.STDOUT,
            pass_fds=(write_end,),
        )
        os.close(write_end)

    def wait_ready(self) -> dict[str, Any]:
        """What it says when all engines are ready. Raises DemoFailed where it ends, or is silent for too long."""
        import select

        ready, _, _ = select.select([self._read_end], [], [], _READY_S_MAX)
        with os.fdopen(self._read_end) as pipe:
            line = pipe.readline() if ready else ""
        if not line:
            raise DemoFailed(f"serinus up is not ready, expected it within {_READY_S_MAX:g} s:\n{self.tail()}")
        report: dict[str, Any] = json.loads(line)
        return report

    def stop(self) -> int:
        """SIGTERM, and the exit code."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(_STOP_S_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise DemoFailed(f"serinus up did not stop within {_STOP_S_MAX:g} s:\n{self.tail()}") from None

    def tail(self) -> str:
        """The last lines it wrote."""
        self._log.seek(0)
        return "\n".join(self._log.read().decode(errors="replace").splitlines()[-30:])


def _client(url: str) -> OpenAI:
    from openai import OpenAI

    return OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def _chat(out: Console, client: OpenAI, max_tokens: int) -> Told:
    """One chat, streamed to the terminal."""
    question = "What do you sing about today?"
    out.print(f"[bold cyan]chat[/] [dim]system: {len(_SYSTEM)} characters about canaries[/] user: {question}")
    messages = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": question}]
    ask = partial(client.chat.completions.create, messages=messages, temperature=0.7, seed=1)
    return _stream(out, "chat", ask, lambda choice: choice.delta.content, max_tokens)


def _complete(out: Console, client: OpenAI, max_tokens: int) -> Told:
    """One completion, streamed to the terminal."""
    out.print(f"[bold cyan]completion[/] {_STORY[:102].strip()}...")
    ask = partial(client.completions.create, prompt=_STORY, temperature=0.0)
    return _stream(out, "completion", ask, lambda choice: choice.text, max_tokens)


def _stream(
    out: Console, what: str, ask: Callable[..., Any], text_of: Callable[[Any], str | None], max_tokens: int
) -> Told:
    """Ask for a stream and print it as it comes; what was seen. Raises DemoFailed where nothing comes."""
    clock = WallClock()
    began, first = clock.now(), 0.0
    usage: Any = None
    for part in ask(
        model="demo",
        stream=True,
        stream_options={"include_usage": True},
        max_tokens=max_tokens,
        extra_body={"ignore_eos": True},
    ):
        usage = part.usage or usage
        if part.choices and (text := text_of(part.choices[0])):
            first = first or clock.now()
            out.print(text, end="", style="green", markup=False, highlight=False, soft_wrap=True)
    out.print()
    if not first or usage is None or usage.completion_tokens < 2:
        raise DemoFailed(f"{what}: usage {usage}, expected a streamed answer with its usage")
    after = max(1e-9, clock.now() - first)
    return Told(
        what=what,
        prompt_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        first_ms=(first - began) * 1000,
        per_second=(usage.completion_tokens - 1) / after,
    )


def _native(out: Console, url: str, max_tokens: int) -> None:
    """Send one native request and show the way of its KV. Raises DemoFailed where no page was handed over."""
    import httpx

    body = {"text": _SYSTEM + _STORY, "sampling_params": {"max_new_tokens": max_tokens, "temperature": 0}}
    answer = httpx.post(f"{url}/generate", json=body, timeout=60)
    if answer.status_code != 200:
        raise DemoFailed(f"/generate answered {answer.status_code}: {answer.text[:300]}")
    meta = answer.json()["meta_info"]
    if not meta["prefill_engine"] or not meta["handoff_pages"]:
        raise DemoFailed(f"/generate was not handed over ({meta['local_reason'] or 'no reason'}): {meta}")
    seconds = max(meta["handoff_seconds"], 1e-9)
    out.print(
        f"POST /generate: {meta['prompt_tokens']} prompt tokens, {meta['cached_tokens']} of them cached by"
        f" {meta['decode_engine']}; {meta['handoff_tokens']} prefilled by {meta['prefill_engine']} and handed over in"
        f" {meta['handoff_pages']} pages ({meta['handoff_bytes'] / 1e6:.1f} MB);"
        f" {meta['completion_tokens']} tokens decoded by {meta['decode_engine']};"
        f" first token after {meta['first_token_seconds'] * 1000:.0f} ms,"
        f" of which taking the pages in {seconds * 1000:.1f} ms ({meta['handoff_bytes'] / seconds / 1e9:.1f} GB/s)",
        highlight=False,
    )


def _show_start(out: Console, report: dict[str, Any]) -> None:
    out.print(f"ready in {report['seconds']:.1f} s on {report['url']}", highlight=False)
    for name, engine in report["engines"].items():
        phases = ", ".join(f"{phase} {spent:.1f} s" for phase, spent in engine["phases"].items())
        out.print(f"  {name:<10} {engine['url']}  [dim]{phases}[/]", highlight=False)


def _show_told(out: Console, told: Sequence[Told]) -> None:
    from rich.table import Table

    table = Table(title="as the client saw it", title_justify="left")
    for column in ("request", "prompt tokens", "output tokens", "first token", "then"):
        table.add_column(column, justify="left" if column == "request" else "right")
    for one in told:
        table.add_row(
            one.what,
            str(one.prompt_tokens),
            str(one.output_tokens),
            f"{one.first_ms:.0f} ms",
            f"{one.per_second:.0f} tokens/s",
        )
    out.print(table)


def _pages(counts: Mapping[tuple[str, str, str], float], direction: str) -> float:
    """Pages that went in a direction, over all engines."""
    return sum(v for (_, name, how), v in counts.items() if (name, how) == ("kv_transfer_pages_total", direction))


def _show_engines(out: Console, url: str) -> None:
    """The engines' own counts, from the router's /metrics. Raises DemoFailed where the work is not where it belongs."""
    import httpx
    from prometheus_client.parser import text_string_to_metric_families
    from rich.table import Table

    counts: dict[tuple[str, str, str], float] = {}
    clock = WallClock()
    end, sent, taken = clock.now() + _COUNT_S_MAX, 0.0, 0.0
    while (not sent or sent != taken) and clock.now() < end:  # the prefill engine hears last that all has arrived
        text = httpx.get(f"{url}/metrics", timeout=30).text
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = sample.labels
                extra = labels.get("direction", "")
                counts[labels.get("engine", ""), sample.name.removeprefix("serinus:"), extra] = sample.value
        sent, taken = (_pages(counts, direction) for direction in ("sent", "received"))
    engines = sorted({engine for engine, name, _ in counts if name == "computed_tokens_total"}, reverse=True)
    table = Table(title="as the engines counted it (/metrics)", title_justify="left")
    for column in ("engine", "tokens computed", "tokens generated", "pages sent", "pages taken in", "transfer"):
        table.add_column(column, justify="left" if column == "engine" else "right")
    for engine in engines:

        def count(name: str, direction: str = "", engine: str = engine) -> float:
            return counts.get((engine, name, direction), 0.0)

        moves = count("kv_transfer_speed_gb_s_count")
        speed = f"{count('kv_transfer_speed_gb_s_sum') / moves:.2f} GB/s" if moves else "-"
        table.add_row(
            engine,
            f"{count('computed_tokens_total'):.0f}",
            f"{count('generation_tokens_total'):.0f}",
            f"{count('kv_transfer_pages_total', 'sent'):.0f}",
            f"{count('kv_transfer_pages_total', 'received'):.0f}",
            speed,
        )
    out.print(table)
    if not sent or sent != taken:
        raise DemoFailed(f"{sent:.0f} pages were sent and {taken:.0f} taken in, expected as many, and some")
