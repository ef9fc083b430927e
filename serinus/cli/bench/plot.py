"""`serinus bench serve --plot FILE`: a run as four panels of one SVG. Throughput and first tokens over time, and how
first tokens and the gaps between tokens are spread."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from serinus.cli.bench.answer import BenchAnswer
from serinus.cli.bench.report import Report, percentile
from serinus.cli.svg import AMBER, BLUE, GREEN, GREY, RED, Axes, Svg

_WIDTH, _HEIGHT = 1000.0, 640.0
_BUCKETS = 60
_RANKS = (50, 90, 99)
_TAIL, _MEDIANS = 1.3, 8.0
"""The axis of a spread ends at so many times its 99th percentile, or its median where the 90th is not beyond it: a few
outliers would press all others to its left. Where it does, it says how long the longest was."""


def plot_run(answers: Sequence[BenchAnswer], report: Report) -> str:
    """The SVG of one run."""
    about = report.about
    svg = Svg(_WIDTH, _HEIGHT, f"serinus bench serve: {about.get('model', '')}")
    rate, most = about.get("request_rate", "inf"), about.get("max_concurrency")
    svg.text(60, 30, f"{about.get('model', '')}", size=16, bold=True)
    svg.text(
        60, 50,
        f"{report.completed:,} answers in {report.seconds:.1f} s ({report.failed:,} failed); request rate {rate}"
        + (f", at most {most} at once" if most else "")
        + f"; {report.input_tokens:,} prompt tokens, {report.output_tokens:,} answered:"
        f" {report.output_tokens / report.seconds:,.1f} tokens/s; asked as {about.get('backend', '')}",
    )  # fmt: skip
    done = [answer for answer in answers if not answer.error]
    start = min((answer.sent for answer in answers), default=0.0)
    _throughput(svg, done, start, report.seconds)
    _first_tokens(svg, answers, start, report.seconds)
    gaps = [gap for answer in done for gap in answer.gaps]
    _spread(svg, 60, "How first tokens are spread", "time to first token", [a.first for a in done], BLUE)
    _spread(svg, 560, "How the gaps between tokens are spread", "inter-token latency", gaps, GREEN)
    return str(svg)


def _throughput(svg: Svg, done: Sequence[BenchAnswer], start: float, seconds: float) -> None:
    """Tokens a second, in buckets of equal width that the run is a whole number of."""
    width = seconds / _BUCKETS
    tokens = [0.0] * _BUCKETS
    for answer in done:
        for time in accumulate(answer.gaps, initial=answer.sent + answer.first - start):
            tokens[min(int(time / width), _BUCKETS - 1)] += 1 / width
    axes = _axes(svg, 60, 110, seconds, max(tokens, default=0.0))
    steps = [
        (axes.x(edge * width), axes.y(rate)) for at, rate in enumerate(tokens) for edge in (at, at + 1)
    ]  # fmt: skip
    bottom = axes.top + axes.height
    svg.line([(axes.left, bottom), *steps, (axes.left + axes.width, bottom)], BLUE, fill=BLUE + "38")
    axes.draw("Output tokens a second", "seconds since the first request", f"tokens/s, mean of {width:.2g} s")


def _first_tokens(svg: Svg, answers: Sequence[BenchAnswer], start: float, seconds: float) -> None:
    """A dot for each request, where it was asked: blue to its first token, amber to its last; red at the bottom: it
    failed."""
    axes = _axes(svg, 560, 110, seconds, max((answer.latency for answer in answers), default=0.0))
    axes.draw("Latency by the time of the question", "seconds since the first request", "seconds")
    for answer in answers:
        x = axes.x(answer.sent - start)
        if answer.error:
            svg.dot(x, axes.y(0), 3, RED, tip=answer.error[:200])
            continue
        svg.dot(x, axes.y(answer.latency), 2.2, AMBER, tip=f"whole answer after {answer.latency:.3f} s")
        svg.dot(x, axes.y(answer.first), 2.2, BLUE, tip=f"first token after {answer.first:.3f} s")
    at = axes.left + axes.width
    for words, colour, room in (("failed", RED, 0), ("whole answer", AMBER, 58), ("first token", BLUE, 152)):
        svg.text(at - room, axes.top - 7, words, colour=colour, size=11, anchor="end")


def _spread(svg: Svg, left: float, title: str, name: str, seconds: Sequence[float], colour: str) -> None:
    """Which share of the values is at most so long, with the ranks that are usually asked for."""
    ms = sorted(value * 1000 for value in seconds)
    high = min(percentile(ms, 99) * _TAIL, max(percentile(ms, 50) * _MEDIANS, percentile(ms, 90) * _TAIL))
    axes = _axes(svg, left, 400, min(high, ms[-1]) if ms else 1.0, 100.0)
    beyond = f"; longest {ms[-1]:,.1f} ms" if ms and ms[-1] > axes.x_max else ""
    axes.draw(title, f"{name}, ms{beyond}", "% at most so long")
    if not ms:
        svg.text(axes.left + axes.width / 2, axes.top + axes.height / 2, "no values", anchor="middle")
        return
    shown = range(0, len(ms), max(1, len(ms) // 400))
    curve = [(axes.x(ms[at]), axes.y(100 * (at + 1) / len(ms))) for at in shown if ms[at] <= axes.x_max]
    curve += [(axes.left + axes.width, curve[-1][1])] if ms[-1] > axes.x_max else [(axes.x(ms[-1]), axes.y(100))]
    svg.line([(axes.x(ms[0]), axes.y(0)), *curve], colour, width=2)
    for line, rank in enumerate(_RANKS):
        value, y = percentile(ms, rank), axes.top + axes.height - 48 + 17 * line
        if value <= axes.x_max:
            svg.line([(axes.left, axes.y(rank)), (axes.x(value), axes.y(rank))], GREY, width=1, dashes="3 3")
            svg.dot(axes.x(value), axes.y(rank), 3.5, colour)
        svg.text(axes.left + axes.width - 80, y, f"p{rank}", colour=colour, size=12, anchor="end")
        svg.text(axes.left + axes.width - 4, y, f"{value:,.1f} ms", size=12, anchor="end")


def _axes(svg: Svg, left: float, top: float, x_max: float, y_max: float) -> Axes:
    """One of the four panels; an axis without values ends at 1."""
    return Axes(svg=svg, left=left, top=top, width=400, height=190, x_max=x_max or 1.0, y_max=(y_max or 1.0) * 1.04)
