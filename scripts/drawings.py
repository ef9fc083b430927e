"""The drawings of the docs' concepts as SVG: `make pictures-plots`. Plain data and the package's own writer of SVG.

python scripts/drawings.py --write docs/pictures
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from serinus.cli.svg import AMBER, BLUE, GREEN, GREY, RED, TEAL, TEXT, VIOLET, Svg


def box(
    svg: Svg, x: float, y: float, width: float, height: float, colour: str, words: Sequence[str], *, mono: bool = False
) -> None:
    """A rounded box; the first line of its words is a title."""
    svg.box(x, y, width, height, colour + "22", border=colour, round_=7)
    top = y + height / 2 - 9 * (len(words) - 1) + 5
    for line, text in enumerate(words):
        svg.text(
            x + width / 2, top + 18 * line, text, colour=colour if not line else TEXT, size=13 if not line else 12,
            anchor="middle", bold=not line, mono=mono and bool(line),
        )  # fmt: skip


def three_answers() -> Svg:
    """One fault under three settings of --kv-canary; the answers are those of `serinus demo`."""
    svg = Svg(960, 336, "One fault, three answers: none, raise and heal")
    svg.text(20, 24, "Customer B asks:", size=13)
    svg.text(20, 44, "What opens the silver cabin?", size=15, bold=True)
    svg.text(20, 66, "The KV that this request reads:")
    for page in range(6):
        wrong = page == 3
        colour = RED if wrong else GREEN
        svg.box(20 + 46 * page, 78, 40, 52, colour + "30", border=colour, round_=4)
        svg.text(40 + 46 * page, 110, "A" if wrong else "B", colour=colour, size=16, anchor="middle", bold=True)
    svg.line([(178, 164), (178, 136)], RED, width=2, arrow=True)
    svg.text(20, 182, "a page of customer A's chat,", colour=RED, bold=True)
    svg.text(20, 200, "as one that was freed twice would be", colour=RED)
    svg.text(20, 236, "the same fault, planted three times", size=12)
    svg.text(20, 254, "by `serinus demo`", size=12)
    rows = (
        ("--kv-canary none", RED, "HTTP 200", "The silver cabin: 7217.", "fluent, wrong, and another customer's code"),
        ("--kv-canary raise", AMBER, "HTTP 500", "KV integrity: verify_chain_hash at slot 64, position 0",
         "the log names the page, its owner and its history"),
        ("--kv-canary heal (default)", GREEN, "HTTP 200", "The silver cabin: 7492.",
         "with a receipt: 1 heal, 114 tokens repaired from device and peer"),
    )  # fmt: skip
    for at, (flag, colour, status, answer, note) in enumerate(rows):
        y = 16 + 106 * at
        svg.line([(304, 104), (352, y + 44)], colour, width=2, arrow=True)
        svg.box(356, y, 590, 90, colour + "1c", border=colour, round_=8)
        svg.text(374, y + 24, flag, size=13, mono=True)
        svg.text(930, y + 24, status, colour=colour, size=14, anchor="end", bold=True)
        svg.text(374, y + 51, answer, colour=colour, size=15, bold=True)
        svg.text(374, y + 75, note)
    return svg


def handoff() -> Svg:
    """The messages of a handoff between a decode and a prefill engine."""
    svg = Svg(960, 470, "A handoff: decode asks and grants, prefill computes and sends, decode verifies and commits")
    left, right = 250.0, 710.0
    box(svg, left - 110, 10, 220, 44, GREEN, ("decode engine", "owns the request"))
    box(svg, right - 110, 10, 220, 44, VIOLET, ("prefill engine", "computes the prompt"))
    for x in (left, right):
        svg.line([(x, 54), (x, 460)], GREY, width=1, dashes="4 4")
    steps = (
        (78, 0, "", "own prefix cache, pages for the rest"),
        (130, 1, "PREPARE: the prompt, what is held, pages that may be filled", "own prefix cache, chunks"),
        (196, -1, "DATA: pages of a chunk, digests", "grant open? copy, check digests"),
        (230, 1, "DATA_OK", "bytes of staging are free"),
        (272, -1, "DATA ... for each chunk, as it is computed", ""),
        (322, -1, "DONE: first token, totals", "granted = sent = landed?"),
        (356, 0, "", "the canary verifies all; commit"),
        (396, 1, "DONE_OK", "holds dropped"),
        (440, 0, "", "decode, stream"),
    )
    for y, way, message, note in steps:
        if way:
            ends = [(left + 6, y), (right - 6, y)] if way > 0 else [(right - 6, y), (left + 6, y)]
            svg.line(ends, BLUE if way > 0 else AMBER, width=2, arrow=True)
            svg.text((left + right) / 2, y - 6, message, size=13, anchor="middle")
        if note and way > 0:
            svg.text(right + 14, y + 4, note)
        elif note:
            svg.text(left - 14, y + 4, note, anchor="end", colour=GREEN if not way else TEXT)
    return svg


def page() -> Svg:
    """States of a page, and what changes them."""
    svg = Svg(960, 300, "The states of a page: each has exactly one owner")
    places = {
        "FREE": (30, 110, GREY, "no owner"), "REQUEST": (260, 110, BLUE, "one request"),
        "TREE": (500, 110, GREEN, "the prefix cache"), "COPY": (750, 30, TEAL, "a copy under way"),
        "QUARANTINED": (750, 190, RED, "found wrong"),
    }  # fmt: skip
    for name, (x, y, colour, note) in places.items():
        box(svg, x, y, 160, 60, colour, (name, note))
    svg.line([(190, 130), (258, 130)], GREY, arrow=True)
    svg.text(224, 122, "allocate", size=11, anchor="middle")
    svg.line([(258, 154), (192, 154)], GREY, arrow=True)
    svg.text(224, 170, "finish", size=11, anchor="middle")
    svg.line([(420, 140), (498, 140)], GREY, arrow=True)
    svg.text(459, 132, "publish", size=11, anchor="middle")
    svg.line([(660, 128), (748, 74)], GREY, arrow=True)
    svg.text(690, 82, "back up, load", size=11, anchor="middle")
    svg.line([(660, 152), (748, 206)], RED, arrow=True)
    svg.text(690, 206, "violation", size=11, anchor="middle", colour=RED)
    svg.line([(580, 108), (580, 60), (110, 60), (110, 108)], GREY, arrow=True)
    svg.text(345, 52, "evict: unpinned leaves, oldest first; a page that a transfer still reads is held", size=11,
             anchor="middle")  # fmt: skip
    svg.line([(748, 232), (110, 232), (110, 172)], GREY, arrow=True, dashes="4 4")
    svg.text(430, 250, "released by a flush; a page that fails twice is RETIRED and never comes back", size=11,
             anchor="middle")  # fmt: skip
    svg.text(30, 286, "Every change is checked in production: a double free fails where it happens, with both owners.")
    return svg


def checks() -> Svg:
    """Where KV is stamped, and where the stamp is verified."""
    svg = Svg(960, 330, "Where the canary looks: a stamp where KV is computed, a check wherever it is read or moves")
    box(svg, 20, 120, 150, 70, BLUE, ("computed", "stamp: token, position,", "chain hash, digest"))
    box(svg, 250, 120, 150, 70, GREEN, ("on the device", "read by each step"))
    box(svg, 520, 20, 150, 60, TEAL, ("on the host",))
    box(svg, 780, 20, 150, 60, TEAL, ("in files",))
    box(svg, 520, 130, 150, 60, VIOLET, ("another engine",))
    box(svg, 520, 250, 150, 60, AMBER, ("the answer", "its last tokens"))
    marks = (
        ((170, 155), (248, 155), "read back", 0), ((400, 140), (518, 56), "before it is cached", -12),
        ((670, 50), (778, 50), "before and after", 0), ((400, 158), (518, 160), "at arrival", 0),
        ((400, 178), (518, 276), "its whole row", 14),
    )  # fmt: skip
    for begin, end, words, shift in marks:
        svg.line([begin, end], GREY, width=1.8, arrow=True)
        x, y = (begin[0] + end[0]) / 2, (begin[1] + end[1]) / 2
        svg.dot(x, y, 6, GREEN)
        svg.text(x + shift, y - 12, words, size=11, anchor="middle" if not shift else "end" if shift < 0 else "start")
    svg.line([(290, 192), (290, 236), (360, 236), (360, 192)], GREEN, width=1.8, arrow=True)
    svg.text(325, 256, "every byte of a running row, each slot", size=11, anchor="middle")
    svg.text(325, 271, "at least once in 16 steps; the sweep, within", size=11, anchor="middle")
    svg.text(325, 286, "an hour, whatever is cached", size=11, anchor="middle")
    svg.dot(325, 236, 6, GREEN)
    svg.dot(30, 300, 6, GREEN)
    svg.text(44, 304, "verified here", size=11)
    return svg


def rooms() -> Svg:
    """The packages by floor: imports point down."""
    floors = (
        ("8", (("cli", "the commands"),)),
        ("7", (("sim", "the simulated cluster"), ("selftest", "the canary's"), ("testing", "fakes, oracle"))),
        ("6", (("engine", "one engine: its turn, its process, LLM"),)),
        ("5", (("ranks", "the line of commands, rank bodies, supervision"),)),
        ("4", (("sched", "plans each step"), ("runner", "computes it"))),
        ("3", (("pd", "handoffs"), ("canary", "checks of KV"), ("front", "HTTP, router"))),
        ("2", (("pool", "bytes of all tiers"), ("models", "decoders"), ("text", "tokenizer, templates"))),
        ("1", (("wire", "messages"), ("cache", "what is where"), ("parallel", "shares"), ("kernels", "device work"))),
        ("0", (("core", "ids, errors, settings, plain data"),)),
    )
    colours = (GREY, TEAL, BLUE, VIOLET, GREEN, AMBER, TEAL, BLUE, GREY)
    svg = Svg(960, 58 * len(floors) + 20, "The rooms of the package by floor; imports point down")
    for row, ((floor, names), colour) in enumerate(zip(floors, colours, strict=True)):
        y, width = 8 + 58 * row, 880 / len(names)
        svg.text(26, y + 30, floor, size=16, anchor="middle", bold=True)
        for at, (name, what) in enumerate(names):
            box(svg, 62 + width * at, y, width - 12, 48, colour, (name, what))
    return svg


DRAWINGS: dict[str, Callable[[], Svg]] = {
    "three-answers": three_answers, "handoff": handoff, "page": page, "checks": checks, "rooms": rooms,
}  # fmt: skip


def main() -> None:
    """Write all of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", type=Path, required=True, metavar="FOLDER", help="where the SVG files go")
    folder = parser.parse_args().write
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in DRAWINGS.items():
        (folder / f"{name}.svg").write_text(str(draw()), encoding="utf-8")
        print(folder / f"{name}.svg")


if __name__ == "__main__":
    main()
