"""`serinus canary show --html FILE`: the same findings as one self-contained page, each request as a picture of its way
across the engines, from the fault to the report. No script, nothing from elsewhere; everything is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any

from serinus.cli.canary_stories import FOUND, PLANTED, TOLD, CanaryEvent, stories
from serinus.cli.svg import AMBER, BLUE, FAINT, RED, VIOLET, Svg

_LEFT, _LANE, _COLUMN, _BOX, _HIGH = 130.0, 96.0, 268.0, 236.0, 68.0
_DRAWN_MAX = 8
"""Events of one request that its picture has; the table below it has all."""
_LOOKS = {PLANTED: (VIOLET, "planted on purpose"), FOUND: (RED, "found"), TOLD: (BLUE, "told by another engine")}
_STYLE = """
:root { color-scheme: light dark; --line: #8b949e55; --soft: #8b949e; }
body { font: 15px/1.5 system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif; margin: 2rem auto;
  max-width: 75rem; padding: 0 1rem; }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2.5rem } p.soft, td.soft { color: var(--soft) }
.ok { color: #2f9e58 } .bad { color: #e0524c } figure { margin: 0; overflow-x: auto }
table { border-collapse: collapse; width: 100%; font-size: .85rem } div.wide { overflow-x: auto }
th, td { text-align: left; vertical-align: top; padding: .3rem .6rem; border-bottom: 1px solid var(--line) }
th { font-weight: 600; white-space: nowrap } code { font: .85em ui-monospace, Menlo, Consolas, monospace }
td code { overflow-wrap: anywhere }
"""


def canary_page(url: str, members: Sequence[dict[str, Any]], limit: int, unix: float) -> str:
    """The page. `members`: the engines, as `GET /canary` of a router lists them; `unix`: when they were asked."""
    views = [member["canary"] for member in members if member.get("canary")]
    violations = sum(view.get("violations", 0) for view in views)
    found = stories(views, limit)
    mark, words = ("bad", f"{violations:,} violations") if violations else ("ok", "no violation")
    if silent := len(members) - len(views):
        mark, words = "bad", f"{words}; {silent} of {len(members)} engines did not answer"
    parts = [
        f"<h1>KV canary of {escape(url)}: <span class={mark}>{words}</span></h1>",
        f"<p class=soft>{len(members)} engines, asked {_day(unix)} UTC by <code>serinus canary show --html</code></p>",
        _table(("engine", "mode", "checked", "steps", "slots checked of due", "found"), map(_engine, members)),
    ]
    for name, events in found:
        parts.append(f"<h2>Request <code>{escape(name)}</code></h2>")
        parts.append(f"<figure>{_picture(name, events)}</figure>")
        parts.append(_table(("when", "engine", "step", "what", "page and history"), map(_row, events)))
    if violations and not found:
        parts.append("<p>No request is known for what was found: cached pages, verified by the sweep.</p>")
    others = [item for view in views for item in view.get("incidents", ()) if not item["rid"] and not item["handoff"]]
    if others:
        parts.append("<h2>Found in pages that no request used</h2>")
        rows = ((str(item["first_step"]), *_what(item)) for item in others[-limit:])
        parts.append(_table(("step", "what", "page and history"), rows))
    head = f"<meta charset=utf-8><title>KV canary: {words}</title><style>{_STYLE}</style>"
    return "\n".join((f"<!doctype html><html lang=en><head>{head}</head><body>", *parts, "</body></html>\n"))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Cells of `rows` are HTML already."""
    lines = ["<div class=wide><table><tr>" + "".join(f"<th>{escape(name)}" for name in head)]
    lines += ["<tr>" + "".join(f"<td>{cell}" for cell in row) for row in rows]
    return "\n".join((*lines, "</table></div>"))


def _engine(member: dict[str, Any]) -> tuple[str, ...]:
    where, view = escape(str(member.get("url", ""))), member.get("canary")
    if view is None:
        return where, "-", "-", "-", "-", f"<span class=bad>no answer: {escape(str(member.get('error', '')))}</span>"
    if view["mode"] == "none":
        return f"{escape(view['engine'])}<br>{where}", "none", "-", "-", "-", "no canary"
    counts = [f"{item['count']:,} {item['reason']} by {item['tag']}" for item in view["counts"]]
    planted = [f"faults planted on purpose: {view['injected_total']:,}"] if view["injected_total"] else []
    return (
        f"<b>{escape(view['engine'])}</b><br>{where}",
        view["mode"],
        f"{view['real_data']}, each slot once in {view['stride']} steps; {view['sweep_passes']:,} sweeps",
        f"{view['steps']:,}",
        f"{view['slots_checked']:,} of {view['slots_due']:,}",
        "<br>".join(escape(words) for words in [*counts, *planted]) or "<span class=ok>nothing</span>",
    )


def _row(event: CanaryEvent) -> tuple[str, ...]:
    """A line of the table below a picture."""
    step = "-" if event.step is None else str(event.step)
    what = _what(event.incident) if event.incident else (escape(event.text), "")
    return _day(event.time)[11:] if event.time else "-", escape(event.engine), step, *what


def _what(item: dict[str, Any]) -> tuple[str, str]:
    words = (
        f"{'|'.join(item['reasons'])} by {', '.join(item['tags'])}, {item['count']:,} times up to step"
        f" {item['last_step']}: slot {item['slot']}, position {item['position']}, part {item['part']}"
    )
    values = (
        f"stamp: token {item['stored_token']}, hash {item['stored_hash']}, digest {item['stored_digest']}; expected"
        f" token {item['expected_token']}, hash {item['expected_hash']}; digest of the bytes {item['found_digest']}"
    )
    users = ", ".join(item["users"]) or "none"
    page = f"page {item['page']}, owner {item['owner']}, users {users}; history {item['history']}"
    return f"{escape(words)}<br><code>{escape(values)}</code>", f"<code>{escape(page)}</code>"


def _picture(name: str, events: Sequence[CanaryEvent]) -> str:
    """Engines as lanes, events from left to right, each with an arrow from the one before."""
    events = events[:_DRAWN_MAX]
    lanes = {engine: at for at, engine in enumerate(dict.fromkeys(event.engine for event in events))}
    svg = Svg(_LEFT + _COLUMN * len(events) + 10, _LANE * len(lanes) + 10, f"request {name} across the engines")
    for engine, at in lanes.items():
        svg.box(0, 6 + _LANE * at, svg.width, _LANE - 8, FAINT, round_=6)
        svg.text(14, 6 + _LANE * at + _LANE / 2, engine[:16], colour="currentColor", size=14, bold=True)
    before: tuple[float, float] | None = None
    for column, event in enumerate(events):
        x, y = _LEFT + _COLUMN * column, 16 + _LANE * lanes[event.engine]
        colour, title = _LOOKS[event.kind]
        if before is not None:
            svg.line([before, (x, y + _HIGH / 2)], AMBER, width=2, arrow=True)
        svg.box(x, y, _BOX, _HIGH, colour + "26", border=colour, round_=6, tip=event.text)
        when = "" if event.step is None else f", step {event.step}"
        svg.text(x + 10, y + 20, title + when, colour=colour, size=13, bold=True)
        for line, words in enumerate(_short(event)):
            svg.text(x + 10, y + 39 + 17 * line, words[:38], colour="currentColor", size=11)
        before = (x + _BOX, y + _HIGH / 2)
    return str(svg)


def _short(event: CanaryEvent) -> tuple[str, ...]:
    """Two lines for a box."""
    item = event.incident
    if item is None:
        words, _, rest = event.text.removeprefix("was told by ").partition(", ")
        return words.removesuffix(" planted on purpose"), rest
    page = f"page {item['page']}, position {item['position']}"
    way = item["handoff"]
    if way is not None:
        page += f", from {way['from']}" if "from" in way else f", sent to {way['to']}"
    return f"{'|'.join(item['reasons'])} by {item['tags'][0]}", page


def _day(unix: float) -> str:
    return datetime.fromtimestamp(unix, UTC).strftime("%Y-%m-%d %H:%M:%S")
