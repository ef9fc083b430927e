"""SVG by hand: shapes, text, arrows and axes into one string. The same calls give the same bytes.

Colours are of medium brightness and nothing is painted behind them, so that a drawing is read on white and on black.
Everything that is written is escaped: names that clients chose cannot become markup. Knows nothing of what is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

TEXT, GREY, FAINT = "#7d8590", "#8b949e", "#8b949e40"
BLUE, GREEN, AMBER, RED, VIOLET, TEAL = "#3d84e6", "#2f9e58", "#c98a1b", "#e0524c", "#8f65dd", "#1f97a8"

_FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
_HEAD = 7.0
"""Length of an arrow's head, in pixels."""


class Svg:
    """One drawing. Positions are pixels from its upper left corner."""

    def __init__(self, width: float, height: float, title: str) -> None:
        """`title`: what a screen reader says of the whole drawing."""
        self.width, self.height = width, height
        self._title = title
        self._parts: list[str] = []

    def __str__(self) -> str:
        """The whole document, as text."""
        size = f'width="{_at(self.width)}" height="{_at(self.height)}"'
        box = f'viewBox="0 0 {_at(self.width)} {_at(self.height)}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {box} role="img" font-family="{_FONT}">'
        return "\n".join((head, f"<title>{escape(self._title)}</title>", *self._parts, "</svg>\n"))

    def box(
        self, x: float, y: float, width: float, height: float, fill: str, *, border: str = "none", round_: float = 0,
        dashes: str = "", tip: str = "",
    ) -> None:  # fmt: skip
        """A rectangle. `tip`: what is shown where the pointer rests on it; `dashes`: of its border."""
        more = f' rx="{_at(round_)}"' if round_ else ""
        more += f' stroke-dasharray="{dashes}"' if dashes else ""
        self._add(
            f'<rect x="{_at(x)}" y="{_at(y)}" width="{_at(max(width, 0))}" height="{_at(height)}"'
            f"{_paint('fill', fill)}{_paint('stroke', border)}{more}", "rect", tip,
        )  # fmt: skip

    def dot(self, x: float, y: float, radius: float, fill: str, *, tip: str = "") -> None:
        """A filled circle around (x, y)."""
        self._add(f'<circle cx="{_at(x)}" cy="{_at(y)}" r="{_at(radius)}"{_paint("fill", fill)}', "circle", tip)

    def line(
        self, points: Sequence[tuple[float, float]], colour: str, *, width: float = 1.5, dashes: str = "",
        arrow: bool = False, fill: str = "none", tip: str = "",
    ) -> None:  # fmt: skip
        """A line through the points. `arrow`: with a head at its end; `fill`: colour of the area that it encloses."""
        more = f' stroke-dasharray="{dashes}"' if dashes else ""
        path = " ".join(f"{_at(x)},{_at(y)}" for x, y in points)
        self._add(
            f'<polyline points="{path}"{_paint("fill", fill)}{_paint("stroke", colour)} stroke-width="{_at(width)}"'
            f' stroke-linejoin="round"{more}', "polyline", tip,
        )  # fmt: skip
        if arrow:
            self._head(points[-2], points[-1], colour)

    def text(
        self, x: float, y: float, words: str, *, colour: str = TEXT, size: float = 12, anchor: str = "start",
        bold: bool = False, mono: bool = False,
    ) -> None:  # fmt: skip
        """A line of text on the base line `y`. `anchor`: which point of it is at `x`: start, middle, end."""
        more = ' font-weight="600"' if bold else ""
        more += ' font-family="ui-monospace, Menlo, Consolas, monospace"' if mono else ""
        more += f' text-anchor="{anchor}"' if anchor != "start" else ""
        self._parts.append(
            f'<text x="{_at(x)}" y="{_at(y)}" fill="{colour}" font-size="{_at(size)}"{more}>{escape(words)}</text>'
        )

    def _add(self, opening: str, name: str, tip: str) -> None:
        self._parts.append(f"{opening}><title>{escape(tip)}</title></{name}>" if tip else f"{opening}/>")

    def _head(self, before: tuple[float, float], end: tuple[float, float], colour: str) -> None:
        across, down = end[0] - before[0], end[1] - before[1]
        length = max((across**2 + down**2) ** 0.5, 1e-9)
        across, down = across / length * _HEAD, down / length * _HEAD
        sides = [(end[0] - across + sign * down * 0.5, end[1] - down - sign * across * 0.5) for sign in (1, -1)]
        self.line([end, *sides, end], colour, width=1, fill=colour)


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """A panel of a chart, both axes of which begin at zero."""

    svg: Svg
    left: float
    top: float
    width: float
    height: float
    x_max: float
    """Value at its right border..."""
    y_max: float
    """...and at its upper border."""

    def x(self, value: float) -> float:
        """The pixel of a value of the horizontal axis."""
        return self.left + self.width * min(value, self.x_max) / self.x_max

    def y(self, value: float) -> float:
        """The pixel of a value of the vertical axis."""
        return self.top + self.height * (1 - min(value, self.y_max) / self.y_max)

    def draw(self, title: str, across: str, up: str) -> None:
        """Title, grid and numbers. `across`, `up`: what the axes count, with the unit."""
        svg, bottom = self.svg, self.top + self.height
        svg.text(self.left, self.top - 22, title, size=14, bold=True)
        svg.text(self.left, self.top - 7, up, size=11)
        svg.text(self.left + self.width, bottom + 32, across, size=11, anchor="end")
        for value in ticks(self.y_max):
            svg.line([(self.left, self.y(value)), (self.left + self.width, self.y(value))], FAINT, width=1)
            svg.text(self.left - 6, self.y(value) + 4, number(value), size=11, anchor="end")
        for value in ticks(self.x_max):
            svg.line([(self.x(value), bottom), (self.x(value), bottom + 4)], GREY, width=1)
            svg.text(self.x(value), bottom + 17, number(value), size=11, anchor="middle")


def ticks(most: float) -> list[float]:
    """Round values from 0 to `most`, about five of them."""
    rough = most / 5
    unit = 10.0 ** floor(log10(rough))
    step = next(unit * each for each in (1, 2, 5, 10) if rough <= unit * each * 1.0001)
    return [step * index for index in range(ceil(most / step + 1e-9)) if step * index <= most * 1.0001]


def number(value: float) -> str:
    """A value of an axis: 0.25, 3, 12,000."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _paint(attribute: str, colour: str) -> str:
    """Attributes of a colour; #rrggbbaa in the form that every reader of SVG knows."""
    if len(colour) != len("#rrggbbaa"):
        return f' {attribute}="{colour}"'
    return f' {attribute}="{colour[:7]}" {attribute}-opacity="{int(colour[7:], 16) / 255:.2g}"'


def _at(value: float) -> str:
    """A position to a tenth of a pixel, without trailing zeros."""
    return f"{value:.1f}".rstrip("0").rstrip(".") if value else "0"
