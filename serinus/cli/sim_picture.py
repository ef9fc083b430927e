"""`serinus sim --timeline FILE`: one run of the simulated cluster as an SVG. Each engine is a lane; in it the requests
that it has, its forward passes, and when it was down or stood still; between lanes every frame, lost ones included.

Virtual time runs to the right. Where nothing happens for long, the axis has a break that says how long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from serinus.cli.svg import AMBER, BLUE, FAINT, GREEN, GREY, RED, TEAL, VIOLET, Svg, number

if TYPE_CHECKING:
    from serinus.sim import Moment, Run, Scenario

_LEFT, _RIGHT, _TOP = 110.0, 30.0, 92.0
_ROW, _BAR = 19.0, 13.0
_BREAK = 1 / 16
"""A silence that would be a larger share than this of the width is a break of the axis..."""
_BREAK_PX = 34.0
"""...that is so many pixels wide."""
_WIDTH, _LABEL_PX = 1500.0, 74.0
_ENDS = {"stop": GREEN, "length": GREEN, "abort": GREY}
_PHASES = {
    "asked": (GREY, "waits for pages"),
    "granted": (AMBER, "waits for KV of the prefill engine"),
    "landed": (GREEN, "decodes, its prompt was handed over"),
    "recomputed": (TEAL, "computes its prompt here"),
    "handoff": (VIOLET, "prompt computed for a decode engine, and sent"),
}
"""How a request looks from each of these moments on."""


@dataclass(slots=True)
class _Bar:
    """What one engine has of one request, from the moment it came until it ended."""

    rid: str
    start: float
    end: float = 0.0
    words: str = ""
    phases: list[Moment] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    row: int = 0


class _Time:
    """Pixels of virtual time: even, with breaks where nothing happens."""

    def __init__(self, times: Sequence[float]) -> None:
        """`times`: when something happens, the first and the last moment shown among them."""
        ranked = sorted(set(times))
        pairs = list(pairwise(ranked))
        self.breaks: list[tuple[float, float]] = []
        shown = span = ranked[-1] - ranked[0]
        while shown:  # without the longest silences others may be long
            self.breaks = [(before, after) for before, after in pairs if after - before > span * _BREAK]
            shown = ranked[-1] - ranked[0] - sum(after - before for before, after in self.breaks)
            if shown >= span * 0.999:
                break
            span = shown
        self._scale = _WIDTH / max(span, 1e-6)
        self._first = ranked[0]
        self.width = _WIDTH + _BREAK_PX * len(self.breaks)

    def labels(self) -> list[float]:
        """Times to be written at the axis: round ones, as close as there is room."""
        step = next(s * 10.0**e for e in range(-5, 3) for s in (1, 2, 5) if s * 10.0**e * self._scale >= _LABEL_PX)
        last = self._first + (self.width - _BREAK_PX * len(self.breaks)) / self._scale
        last += sum(after - before for before, after in self.breaks)
        times = (step * index for index in range(int(last / step) + 1))
        return [time for time in times if not any(before < time < after for before, after in self.breaks)]

    def __call__(self, time: float) -> float:
        x, last = _LEFT, self._first
        for before, after in self.breaks:
            if time <= before:
                break
            x += (before - last) * self._scale
            if time < after:
                return x + _BREAK_PX * (time - before) / (after - before)
            x, last = x + _BREAK_PX, after
        return x + (time - last) * self._scale


def draw_timeline(scenario: Scenario, result: Run, moments: Sequence[Moment]) -> str:
    """The SVG of a run: what `serinus.sim.run` gave, and the moments that it noted."""
    last = max([moment.at for moment in moments if moment.kind in ("end", "fault", "sent")], default=0.0) + 0.004
    moments = [moment for moment in moments if moment.at <= last]
    lasting = [min(moment.until, last) for moment in moments if moment.kind in ("frame", "step")]
    time = _Time([0.0, last, *(moment.at for moment in moments), *lasting])
    bars = {engine.name: _bars(engine.name, moments, last) for engine in scenario.shape.engines}
    tops, y = dict[str, tuple[float, float]](), _TOP
    for name, own in bars.items():
        height = 22 + _ROW * max(1, 1 + max((bar.row for bar in own), default=0))
        tops[name] = (y, height)
        y += height + 46
    faults = [moment for moment in moments if moment.kind == "fault"]
    svg = Svg(_LEFT + time.width + _RIGHT, y + 42 + 15 * len(faults), f"serinus sim --seed {scenario.seed}")
    _head(svg, scenario, result)
    _axis(svg, time, y - 24)
    for engine in scenario.shape.engines:
        _lane(svg, time, engine.name, engine.role, tops[engine.name])
    _frames(svg, time, moments, tops, last)
    for name, own in bars.items():
        for bar in own:
            _draw_bar(svg, time, bar, tops[name][0] + 15 + _ROW * bar.row)
    for moment in moments:
        _trouble(svg, time, moment, moments, tops, last)
    for row, fault in enumerate(faults):
        x = time(fault.at)
        svg.line([(x, _TOP - 8), (x, y - 24)], RED, width=1, dashes="2 4", tip=fault.words)
        svg.text(x + 4, y + 12 + 15 * row, f"{fault.at:.3f} s: {fault.words}", colour=RED, size=11)
        svg.line([(x, y - 24), (x, y + 12 + 15 * row)], RED, width=0.6, dashes="2 4")
    return str(svg)


def _bars(engine: str, moments: Sequence[Moment], last: float) -> list[_Bar]:
    """The requests of one engine, each in a row that is free for as long as it is there."""
    under_way, found = dict[str, _Bar](), list[_Bar]()
    for moment in (each for each in moments if each.engine == engine):
        if moment.kind in ("asked", "handoff"):
            bar = under_way[moment.rid] = _Bar(rid=moment.rid, start=moment.at, end=last, words="is there at the end")
            found.append(bar)
        elif moment.kind == "down":
            for bar in under_way.values():
                bar.end, bar.words = moment.at, "lost: the engine was killed"
            under_way = {}
        if moment.rid not in under_way:
            continue
        bar = under_way[moment.rid]
        if moment.kind in _PHASES:
            bar.phases.append(moment)
        elif moment.kind == "token":
            bar.tokens.append(moment.at)
        elif moment.kind in ("end", "sent"):
            bar.end, bar.words = moment.at, moment.words or "sent, or given up"
            del under_way[moment.rid]
    free: list[float] = []
    for bar in found:
        bar.row = next((row for row, until in enumerate(free) if until < bar.start), len(free))
        free[bar.row : bar.row + 1] = [bar.end + 0.002]
    return found


def _head(svg: Svg, scenario: Scenario, result: Run) -> None:
    ends = ", ".join(f"{count} {end}" for end, count in sorted(result.ends.items()))
    found = "nothing was found" if result.finding is None else f"FOUND {result.finding.kind}: {result.finding.text}"
    where = f"pages travel by {scenario.shape.backend}; ends of requests: {ends}; {found[:120]}"
    svg.text(_LEFT, 28, f"serinus sim --seed {scenario.seed}", size=16, bold=True, mono=True)
    svg.text(_LEFT, 48, f"{where}; grey columns: silence that is left out")
    x = _LEFT
    for colour, words in _PHASES.values():
        svg.box(x, 58, 12, 10, colour + "90", round_=2)
        svg.text(x + 16, 67, words, size=11)
        x += 34 + 5.9 * len(words)


def _axis(svg: Svg, time: _Time, bottom: float) -> None:
    for before, after in time.breaks:
        left, right, tip = time(before), time(after), f"{after - before:.3f} s of silence"
        svg.box(left + 4, _TOP - 8, right - left - 8, bottom - _TOP + 8, FAINT, tip=tip)
        svg.text((left + right) / 2, bottom - 4, f"{after - before:.2g} s", size=10, anchor="middle")
    free = 0.0
    for at in time.labels():
        x = time(at)
        svg.line([(x, bottom - 2), (x, bottom + 4)], GREY, width=1)
        if x >= free:
            svg.text(x, bottom + 17, f"{number(at)} s", size=11, anchor="middle")
            free = x + _LABEL_PX / 2


def _lane(svg: Svg, time: _Time, name: str, role: str, place: tuple[float, float]) -> None:
    top, height = place
    svg.box(_LEFT - 6, top, time.width + 12, height, FAINT, round_=5)
    svg.text(_LEFT - 16, top + 20, name, size=14, bold=True, anchor="end")
    svg.text(_LEFT - 16, top + 35, role, size=11, anchor="end")


def _frames(
    svg: Svg, time: _Time, moments: Sequence[Moment], tops: dict[str, tuple[float, float]], last: float
) -> None:
    """Frames between engines; one that was lost ends halfway, with a dot."""
    for moment in moments:
        if moment.kind not in ("frame", "lost") or moment.words not in tops:
            continue
        (top, height), (other, other_height) = tops[moment.engine], tops[moment.words]
        begin, end = (top + height, other) if other > top else (top, other + other_height)
        x, ends = time(moment.at), time(min(moment.until, last))
        way = f"{moment.engine} to {moment.words}"
        if moment.kind == "frame":
            svg.line([(x, begin), (ends, end)], BLUE + "70", width=0.9, tip=f"frame {way}, {moment.at:.4f} s")
        else:
            halfway = (x + 8, begin + (end - begin) * 0.45)
            svg.line([(x, begin), halfway], RED, width=0.9, tip=f"frame lost: {way}, {moment.at:.4f} s")
            svg.dot(*halfway, 2.4, RED)


def _draw_bar(svg: Svg, time: _Time, bar: _Bar, y: float) -> None:
    edges = [*(time(phase.at) for phase in bar.phases), time(bar.end)]
    for phase, left, right in zip(bar.phases, edges, edges[1:], strict=False):
        colour, words = _PHASES[phase.kind]
        tip = f"{bar.rid} {words}{f' ({phase.words})' if phase.words else ''}, from {phase.at:.4f} s"
        svg.box(left, y, max(right - left, 1.5), _BAR, colour + "90", round_=3, tip=tip)
    for at in bar.tokens:
        svg.line([(time(at), y + 2), (time(at), y + _BAR - 2)], GREEN, width=1.6)
    colour = _ENDS.get(bar.words, GREY if bar.words.startswith("sent") else RED)
    svg.dot(time(bar.end), y + _BAR / 2, 3.6, colour, tip=f"{bar.rid}: {bar.words}, {bar.end:.4f} s")
    svg.text(time(bar.start) + 4, y + _BAR - 3, bar.rid, size=10, bold=True)


def _trouble(
    svg: Svg, time: _Time, moment: Moment, moments: Sequence[Moment], tops: dict[str, tuple[float, float]], last: float
) -> None:
    """Forward passes along the lower edge of a lane, and over it when its engine was down or stood still."""
    if moment.kind not in ("step", "down", "paused"):
        return
    top, height = tops[moment.engine]
    x = time(moment.at)
    if moment.kind == "step":
        right = time(min(moment.until, last))
        svg.box(x, top + height - 5, max(right - x, 1.5), 4, BLUE, tip=f"forward pass, {moment.at:.4f} s")
        return
    ups = (each.at for each in moments if each.kind == "up" and each.engine == moment.engine and each.at > moment.at)
    end = min(next(ups, last) if moment.kind == "down" else moment.until, last)
    colour, words = (RED, "killed") if moment.kind == "down" else (AMBER, "stands still")
    svg.box(
        x, top, time(end) - x, height, colour + "30", border=colour, dashes="4 3",
        tip=f"{moment.engine} {words} from {moment.at:.3f} s to {end:.3f} s",
    )  # fmt: skip
    svg.text(x + 4, top + height - 7, words, colour=colour, size=11, bold=True)
