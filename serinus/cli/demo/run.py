"""`serinus demo`: from nothing to a disaggregated chat whose KV goes wrong, three times, in one terminal.

A small model of the package tells codes that stand in its chat (chats.py). `serinus up` serves it with one prefill and
one decode engine; the official `openai` client asks. Then the same fault is planted under three canaries: one that only
writes a line, as if there were none; one that raises; one that heals. Exit code 0 only if all went as it says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serinus.cli.demo.chats import Fact, draw_facts, question, told
from serinus.cli.demo.group import DemoFailed, Group
from serinus.cli.parser import Command, make_parser
from serinus.cli.show import console
from serinus.core.clock import WallClock
from serinus.core.errors import ConfigError
from serinus.core.rng import Rng

if TYPE_CHECKING:
    from openai import OpenAI
    from rich.console import Console

MODEL = Path(__file__).parent / "model"
"""The checkpoint: scripts/train_demo_model.py made it."""
_PAGE_SIZE = 64
_FACTS = 9
"""Of one chat: more tokens than a page, fewer than two."""
_COUNT_S_MAX = 10.0
"""For the engines' counts of sent and received pages to agree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Act:
    """One canary, and the answer to the fault that is expected under it."""

    mode: str
    """The value of --kv-canary."""
    about: str
    """What this canary does with what it finds."""
    status: int
    """HTTP status of the answer."""
    whose: str
    """Of which customer's chat the code in the answer is: 'own', 'foreign', or empty where there is no answer."""
    meaning: str
    """What happened, for the reader."""


ACTS = (
    Act(
        mode="log",
        about="writes a line into the log; the answers are those of an engine without one",
        status=200,
        whose="foreign",
        meaning="HTTP 200, fluent, and the other customer's code. Only a line in the log tells.",
    ),
    Act(
        mode="raise",
        about="ends what read wrong KV",
        status=500,
        whose="",
        meaning="an error that names the slot and the check: nothing wrong has left.",
    ),
    Act(
        mode="heal",
        about="computes it again from sound KV (the default)",
        status=200,
        whose="own",
        meaning="the right code: the customer noticed nothing, and the receipt tells what happened.",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoAnswer:
    """What the client got."""

    status: int
    text: str
    """The answer, or the error's message."""
    receipt: Mapping[str, Any] | None = None
    """What usage.kv_integrity says of it."""


def run(command: Command, words: Sequence[str]) -> int:
    """Run the demo. Exit code 0 if all went as it says, else 1. Raises ConfigError without the openai client."""
    parser = make_parser(command, settings=False)
    parser.add_argument("--backend", default="auto", choices=("auto", "shm", "tcp"), help="how KV travels")
    parser.add_argument(
        "--model-path", action="store_true", help="print the folder of the demo's model, to serve it yourself, and end"
    )
    parser.add_argument(
        "--stay", action="store_true", help="serve on after the last answer, until Ctrl-C, so that its page can be seen"
    )
    arguments = parser.arguments(words)
    if arguments.model_path:
        print(MODEL)
        return 0
    try:
        from openai import OpenAIError  # said before anything is started
    except ImportError as error:
        raise ConfigError(f"demo: {error}, expected the extra of the demo: pip install -e '.[demo]'") from None
    out = console()
    try:
        _demo(out, arguments.backend, stay=arguments.stay)
    except (DemoFailed, OpenAIError) as error:
        out.print(f"[red]the demo failed:[/] {error}", highlight=False)
        return 1
    out.print(
        "[green]All went as it should.[/] Next: `serinus demo --stay`, to see the fault on the page of its KV;"
        ' `serinus serve ./your-model`; this model: `serinus serve "$(serinus demo --model-path)"`.',
        highlight=False,
    )
    return 0


def _demo(out: Console, backend: str, *, stay: bool) -> None:
    out.rule("[bold]a model that answers from its chat")
    out.print(
        f"{MODEL.name}/ of the package: Qwen3 in small, 2 M weights, trained to tell codes that stand in the chat:"
        " wrong KV is a wrong code",
        highlight=False,
    )
    for number, act in enumerate(ACTS):
        out.rule(f"[bold]{number + 1} of {len(ACTS)}  --kv-canary {act.mode}[/]: {act.about}")
        group = Group(
            MODEL, "--disaggregation-transfer-backend", backend, "--page-size", str(_PAGE_SIZE),
            "--disaggregation-min-tokens", "1", "--kv-canary", act.mode, "--kv-canary-perturb-api",
        )  # fmt: skip
        try:
            report = group.wait_ready()
            if not number:
                _show_start(out, report)
            _play(out, report["url"], act, greet=not number)
            if number + 1 == len(ACTS):
                _show_engines(out, report["url"])
                if stay:
                    out.print(f"serving on, until Ctrl-C: {report['url']}/dashboard", highlight=False, soft_wrap=True)
                    group.wait_interrupted()
        finally:
            code = group.stop()
        if code != 0:
            raise DemoFailed(f"serinus up ended with exit code {code}, expected 0:\n{group.tail()}")


def _play(out: Console, url: str, act: Act, *, greet: bool) -> None:
    """Two customers with the same things and other codes; then a fault. Raises DemoFailed where it goes otherwise."""
    client = _client(url)
    if greet:
        _ask(out, client, "hello", "Who are you?")
    foreign, own = _customers()
    first = _ask(out, client, "customer A", foreign.text)
    if first.text != foreign.fact.answer:
        raise DemoFailed(f"customer A got {first}, expected {foreign.fact.answer!r}")
    _plant(out, url)
    found = _ask(out, client, "customer B", own.text)
    whose = {own.fact.answer: "own", foreign.fact.answer: "foreign"}.get(found.text, "")
    if (found.status, whose) != (act.status, act.whose):
        raise DemoFailed(f"customer B got {found}, expected status {act.status} and {act.whose or 'no'} code")
    color = "green" if whose == "own" else "yellow" if not whose else "red"
    out.print(f"  [{color}]{act.meaning}[/]", highlight=False)
    if found.receipt and whose == "own":
        out.print(f"  [dim]receipt: {_told(found.receipt)}[/]", highlight=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Customer:
    """A chat that tells codes and asks for the first of them."""

    text: str
    fact: Fact
    """The one that is asked for. It stands in the first page."""


def _customers() -> tuple[Customer, Customer]:
    """Two with the same words and other codes."""
    rng, found = Rng(11), []
    names = [fact.name for fact in draw_facts(rng, _FACTS)]
    for _ in range(2):
        facts = [Fact(name, f"{rng.randrange(10000):04d}") for name in names]
        words = Rng(5)
        text = told(words, facts, 0)
        first = min(facts, key=lambda fact: text.index(fact.name))
        found.append(Customer(text=f"{text} {question(words, first)}", fact=first))
    return found[0], found[1]


def _plant(out: Console, url: str) -> None:
    """From the next step on: one page of a request that decodes is exchanged for a cached page of another prompt."""
    import httpx

    order = {"perturb": {"foreign_page": 1.0}, "role": "decode", "target": "full", "count": 1}
    answer = httpx.post(f"{url}/canary/perturb", json=order, timeout=60)
    if answer.status_code != 200:
        raise DemoFailed(f"/canary/perturb answered {answer.status_code}: {answer.text[:300]}")
    out.print("  [bold]fault[/]: one page of the next request will be the page of customer A, as after a double free")


def _ask(out: Console, client: OpenAI, who: str, text: str) -> DemoAnswer:
    """One chat; question and answer are shown."""
    from openai import APIStatusError

    shown = text if len(text) < 100 else f"{text[:60]}... {text[-40:]}"
    out.print(f"  [bold cyan]{who}[/]: {shown}", highlight=False)
    try:
        done = client.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": text}], temperature=0, max_tokens=48
        )
    except APIStatusError as error:
        answer = DemoAnswer(status=error.status_code, text=error.message)
    else:
        receipt = (done.usage.model_extra or {}).get("kv_integrity") if done.usage is not None else None
        answer = DemoAnswer(status=200, text=done.choices[0].message.content or "", receipt=receipt)
    out.print(f"  [dim]HTTP {answer.status}[/] {answer.text}", highlight=False, markup=True)
    return answer


def _told(receipt: Mapping[str, Any]) -> str:
    """A receipt in a line."""
    return ", ".join(f"{name} {value}" for name, value in receipt.items())


def _client(url: str) -> OpenAI:
    from openai import OpenAI

    return OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def _show_start(out: Console, report: dict[str, Any]) -> None:
    out.print(f"ready in {report['seconds']:.1f} s on {report['url']}", highlight=False)
    for name, engine in report["engines"].items():
        phases = ", ".join(f"{phase} {spent:.1f} s" for phase, spent in engine["phases"].items())
        out.print(f"  {name:<10} {engine['url']}  [dim]{phases}[/]", highlight=False)


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
