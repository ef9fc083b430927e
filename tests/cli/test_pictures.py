"""What commands draw: a benchmark, a simulated run, findings of the canary. Well-formed, escaped, and true."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from serinus.cli.bench import BenchAnswer, make_report
from serinus.cli.bench.plot import plot_run
from serinus.cli.canary_page import canary_page
from serinus.cli.main import main
from serinus.cli.svg import Axes, Svg, ticks
from serinus.sim import Moment, calm_scenario, draw, run
from serinus.sim.options import Cancel, Crash
from tests.cli.stub import plain, stub_server

INCIDENT = {
    "reasons": ["verify_real_kv_hash"], "tags": ["TAIL_K_FULL"], "slot": 17, "page": 4, "rank": "", "position": 13,
    "rid": "x.0", "client": "<script>r0</script>", "owner": "REQUEST(r0)", "users": ["r0"], "history": "#1 allocate",
    "part": "FULL", "first_step": 5, "last_step": 7, "first_time": 1.7e9, "count": 3, "stored_token": 4,
    "expected_token": 4, "stored_hash": "0x1", "expected_hash": "0x1", "stored_digest": "0x2", "found_digest": "0x3",
    "handoff": {"from": "prefill-0", "xid": "x.0", "rid": "<script>r0</script>", "pieces": "piece 0"},
}  # fmt: skip
VIEW = {
    "engine": "decode-0", "mode": "heal", "real_data": "all", "stride": 16, "steps": 9, "sweep_passes": 1,
    "slots_due": 90, "slots_checked": 90, "violations": 3, "incidents_total": 1, "incidents": [INCIDENT], "told": [],
    "counts": [{"reason": "verify_real_kv_hash", "tag": "TAIL_K_FULL", "count": 3}], "injected_total": 0,
    "injected": [],
}  # fmt: skip


def texts(svg: str) -> list[str]:
    """All that is written in a drawing; fails where it is not well-formed."""
    return [text for node in ElementTree.fromstring(svg).iter() if (text := (node.text or "").strip())]


def answer(sent: float, *, gaps: int = 9, error: str = "") -> BenchAnswer:
    return BenchAnswer(
        prompt_tokens=8, output_tokens=gaps + 1, sent=sent, first=0.5, latency=0.5 + 0.02 * gaps,
        gaps=[0.02] * gaps, error=error,
    )  # fmt: skip


# ---- the drawing itself -----------------------------------------------------------------------------------------


def test_what_is_written_cannot_become_markup() -> None:
    svg = Svg(10, 10, "<b>")
    svg.text(1, 2, "</text><script>")
    svg.box(0, 0, 1, 1, "#fff", tip='"><script>')
    assert "<script>" not in str(svg)
    assert texts(str(svg))[0] == "<b>"


def test_axes_begin_at_zero_and_end_at_their_borders() -> None:
    axes = Axes(svg=Svg(1, 1, "t"), left=10, top=20, width=100, height=50, x_max=4, y_max=8)
    assert (axes.x(0), axes.x(4), axes.x(9)) == (10, 110, 110)
    assert (axes.y(0), axes.y(8), axes.y(4)) == (70, 20, 45)
    assert ticks(4.0) == [0, 1, 2, 3, 4]
    assert ticks(0.07)[1] == pytest.approx(0.02)


def test_a_colour_with_opacity_is_written_as_every_reader_knows_it() -> None:
    svg = Svg(1, 1, "t")
    svg.box(0, 0, 1, 1, "#11223380")
    assert 'fill="#112233" fill-opacity="0.5"' in str(svg)


# ---- serinus bench serve --plot ---------------------------------------------------------------------------------


def test_a_run_is_drawn_with_its_conditions_and_its_failures() -> None:
    answers = [*(answer(100 + 0.1 * n) for n in range(20)), answer(101.0, error="HTTP 503 <no room>")]
    report = make_report(answers, 3.0, {"model": "a & b", "backend": "serinus", "request_rate": 10.0})
    drawn = plot_run(answers, report)
    assert drawn == plot_run(answers, report)
    written = texts(drawn)
    assert "a & b" in written
    (conditions,) = [text for text in written if "answers in" in text]
    assert conditions.startswith("20 answers in 3.0 s (1 failed); request rate 10.0; 160 prompt tokens, 200 answered:")
    assert "HTTP 503 <no room>" in written
    assert {"500.0 ms", "20.0 ms"} <= set(written)  # every percentile of first tokens; of gaps


@pytest.mark.parametrize("answers", [[], [answer(1.0, error="x")], [answer(1.0, gaps=0)]])
def test_a_run_without_values_is_drawn_too(answers: list[BenchAnswer]) -> None:
    assert "no values" in texts(plot_run(answers, make_report(answers, 1.0, {})))


# ---- serinus sim --timeline -------------------------------------------------------------------------------------


def test_a_run_with_moments_is_the_run_without_them() -> None:
    moments: list[Moment] = []
    assert run(draw(42), moments) == run(draw(42))
    assert {"asked", "granted", "landed", "recomputed", "handoff", "sent", "frame", "lost", "step", "token", "end",
            "fault", "up", "down"} <= {moment.kind for moment in moments}  # fmt: skip
    assert sum(moment.kind == "lost" for moment in moments) > 5


def test_the_timeline_has_every_engine_request_and_fault(tmp_path: Path) -> None:
    file, scenario = tmp_path / "schedule.json", draw(42)
    file.write_text(scenario.to_json())
    picture = tmp_path / "run.svg"
    assert main(["sim", "--scenario", str(file), "--timeline", str(picture)]) == 0
    written = texts(picture.read_text())
    assert {engine.name for engine in scenario.shape.engines} <= set(written)
    for fault in scenario.faults:
        if isinstance(fault, Cancel):
            assert any(f"the client of {fault.rid} leaves" in text for text in written)
        elif isinstance(fault, Crash):
            assert any(text.startswith(f"{fault.engine} killed from") for text in written)
    assert sum(text.startswith("frame lost: ") for text in written) > 5
    assert sum("handed over, from" in text for text in written) == 2
    assert sum("computes its prompt here (" in text for text in written) == 2


def test_a_calm_run_has_no_trouble_in_its_picture(tmp_path: Path) -> None:
    file = tmp_path / "schedule.json"
    file.write_text(calm_scenario(draw(3, backend="local"), works=2).to_json())
    assert main(["sim", "--scenario", str(file), "--timeline", str(tmp_path / "run.svg")]) == 0
    written = texts((tmp_path / "run.svg").read_text())
    assert not [text for text in written if re.search("lost|killed|leaves|stands still", text)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["sim", "--seeds", "1..3", "--timeline", "x.svg"], "--timeline draws one run, expected --seed N"),
        (["sim", "--seed", "1", "--timeline", "/nowhere/x.svg"], "--timeline is '/nowhere/x.svg', expected a file in"),
        (["bench", "serve", "--plot", "/nowhere/x.svg"], "--plot is '/nowhere/x.svg', expected a file in a folder"),
        (["canary", "show", "--html", "/nowhere/x.html"], "--html is '/nowhere/x.html', expected a file in a folder"),
    ],
)
def test_where_nothing_could_be_drawn_it_is_said_before(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert said in capsys.readouterr().err


# ---- serinus canary show --html ---------------------------------------------------------------------------------


def test_a_fault_is_one_story_across_the_engines() -> None:
    planted = {"rid": "x.0", "mode": "real_kv_post_forward", "slot": 17, "rank": "", "position": 13, "step": 1}
    told = {"by": "decode-0", "xid": "x.0", "rid": "<script>r0</script>", "part": "FULL", "position": 13, "reason": "r"}
    other = {**VIEW, "engine": "prefill-0", "incidents": [], "violations": 0, "injected": [planted], "told": [told]}
    members = [{"url": f"http://{n}", "canary": view} for n, view in enumerate((other, VIEW))]
    page = canary_page("http://router", members, limit=5, unix=1.7e9)
    assert "<script>" not in page
    assert page.count("<h2>") == 1
    picture = page[page.index("<svg") : page.index("</svg>") + 6]
    shown = [text for text in texts(picture) if text.startswith(("planted on", "found", "told by"))]
    assert shown == ["planted on purpose, step 1", "found, step 5", "told by another engine"]
    assert "22:13:20" in page
    assert "3 violations" in page
    assert not re.search(r"https?://(?!router|0|1)|src=|url\(", page.replace("http://www.w3.org/2000/svg", ""))


def test_silent_engines_and_engines_without_a_canary_are_said() -> None:
    members = [
        {"url": "http://a", "canary": {"engine": "one", "mode": "none"}},
        {"url": "http://b", "canary": None, "error": "<refused>"},
    ]
    page = canary_page("http://router", members, limit=5, unix=0.0)
    assert "1 of 2 engines did not answer" in page
    assert "no canary" in page
    assert "&lt;refused&gt;" in page


def test_the_command_writes_the_page_of_a_running_server(tmp_path: Path) -> None:
    page = tmp_path / "page.html"

    async def ask() -> int:
        async with stub_server(lambda path, body: plain(VIEW)) as (port, _):
            return await asyncio.to_thread(main, ["canary", "show", f"http://127.0.0.1:{port}", "--html", str(page)])

    assert asyncio.run(ask()) == 1
    assert "3 violations" in page.read_text()
