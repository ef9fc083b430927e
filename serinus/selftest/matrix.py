"""The detector matrix: every fault that can be planted, one at a time, against every detector of a canary.

    for cell in plan_matrix(subject): print(run_cell(cell, subject, faults=3).perfect)

A cell plants one kind of fault in one part of one model, on one side of a prefill/decode pair, waits for the reports of
both canaries, and compares them with what `MODES` promises: which check reports it, for which reason, how soon, and
that no other check reports anything. A cell without a mode is a clean run under abort, eviction and reload.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from serinus.canary.perturb import MODES
from serinus.core.parts import Part
from serinus.core.stamps import STAMP_FIELDS, STAMP_LANES
from serinus.models import ModelSpec, load_spec
from serinus.selftest.fixture import SIDES, CanaryPDFixture
from serinus.selftest.matching import Report, matched
from serinus.selftest.scenes import CLEAN, OVERFLOW, SCENES, pages_to_sweep, scene_settings

__all__ = ["CLEAN", "Cell", "Subject", "plan_matrix", "run_cell"]

_AT_ARRIVAL = ("transfer_bytes", "tier_bytes")
_LOGGED = ("real_kv_used", "real_kv_unused_cache", "real_kv_post_forward")
"""Modes whose faults are planted one a step and stay: the canary logs them. The others end their requests."""
_FAULTS_MAX = 96
"""Of one cell, unless more are asked for: more places than that are drawn, not gone through."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model under test, and the settings of both its engines."""

    name: str
    checkpoint: Path
    settings: Mapping[str, Any] = field(default_factory=dict)
    modes: tuple[str, ...] = ()
    """The faults to plant, where not all."""
    sides: tuple[str, ...] = SIDES
    """Engines in which they are planted."""


@dataclass(slots=True, kw_only=True)
class Cell:
    """One kind of fault in one place, and the reports of it."""

    model: str
    part: str
    mode: str
    side: str
    """Engine in which it is planted."""
    expected: str
    """The checks that must report it, in words."""
    promise: int | None
    """Steps within which it must be reported; None = whenever the bytes are read next."""
    injected: int = 0
    detected: int = 0
    by: list[str] = field(default_factory=list)
    """The checks that did report it: side and launch tag."""
    finder: str = "decode"
    """Engine that must report it."""
    places: int = 0
    """Layers x halves x heads that can be damaged, and lanes x fields of stamps where those can."""
    hit: int = 0
    """How many of them were damaged and reported."""
    latency: int = 0
    """Steps of the engine that found it, from planting to report; the longest."""
    alarms: list[str] = field(default_factory=list)
    """Violations that no planted fault explains, or that another check reported; log lines."""
    slots_checked: int = 0
    error: str = ""
    """Why the cell could not be run to its end."""

    @property
    def perfect(self) -> bool:
        """Everything planted was found by its detector in time, and nothing else was."""
        planted = self.injected > 0 if self.mode in MODES else self.slots_checked > 0
        soon = self.promise is None or self.latency <= self.promise
        return planted and self.detected == self.injected and soon and not self.alarms and not self.error

    def as_json(self) -> dict[str, Any]:
        """The cell as JSON-ready data."""
        return {**asdict(self), "perfect": self.perfect}


def plan_matrix(subject: Subject) -> list[Cell]:
    """The cells of one model, not run yet. Raises ConfigError: the model or the settings are wrong."""
    spec = load_spec(subject.checkpoint)
    parts = sorted(part for part in spec.parts if spec.layers_of(part))
    partial = subject.settings.get("kv_canary_real_data") == "partial"
    cells = [Cell(model=subject.name, part="all", mode=CLEAN, side="both", expected="neither", promise=None)]
    if Part.FULL in parts and not subject.modes:
        says = "decode counts all"
        cells.append(Cell(model=subject.name, part="all", mode=OVERFLOW, side="decode", expected=says, promise=None))
    for mode, facts in MODES.items():
        if subject.modes and mode not in subject.modes:
            continue
        for part in parts if facts.has_part else parts[:1]:
            for side in _sides(mode, part):
                if side not in subject.sides:
                    continue
                finder = "decode" if mode in ("transfer_bytes", "real_kv_post_forward") else side
                cells.append(
                    Cell(
                        model=subject.name, part=part.name if facts.has_part else "tokens", mode=mode, side=side,
                        expected=f"{finder} {facts.found_by}", finder=finder, promise=None,
                        places=_places(spec, part, mode, partial=partial),
                    )
                )  # fmt: skip
    return cells


def _sides(mode: str, part: Part) -> tuple[str, ...]:
    if mode == "transfer_bytes":
        return ("prefill",)
    if mode == "tier_bytes" and part is Part.SWA:  # prefill keeps pages there that no prompt ever loads: out of windows
        return ("decode",)
    return ("decode",) if mode == "next_token_swap" else SIDES


def _places(spec: ModelSpec, part: Part, mode: str, *, partial: bool) -> int:
    if not MODES[mode].reads_bytes:
        return 0
    heads = 1 if partial else spec.kv_head_count
    return len(spec.layers_of(part)) * 2 * heads + (STAMP_LANES * STAMP_FIELDS if mode in _AT_ARRIVAL else 0)


def _promise(pair: CanaryPDFixture, cell: Cell) -> int | None:
    """Steps within which a fault is reported, from the settings."""
    stride = pair.canary(cell.finder).settings.stride
    if cell.finder != cell.side or cell.mode in _AT_ARRIVAL:
        return None
    if cell.mode == "real_kv_unused_cache":
        return pages_to_sweep(pair, cell.side, Part[cell.part])
    return {"real_kv_post_forward": stride, "next_token_swap": 1}.get(cell.mode, stride - 1)


def run_cell(cell: Cell, subject: Subject, *, faults: int = 3, seed: int = 0) -> Cell:
    """Run one cell in engines of its own. Returns it, filled in.

    Args:
        faults: at least so many; where bytes are damaged also as many as there are places (96 at most).
    Raises ConfigError: the settings do not fit the model; AssertionError or SerinusError: the engines broke, or let
        wrong KV be used.
    Cost: two engines are built; then a few steps a fault.
    """
    pair = _engines(cell, subject, seed)
    try:
        handed = cell.mode == "real_kv_post_forward" and cell.side == "prefill"
        scene = SCENES["transfer_bytes" if handed else cell.mode]
        count = max(faults, min(cell.places, _FAULTS_MAX))
        if cell.mode in MODES:
            cell.promise = _promise(pair, cell)
        if (cell.places and cell.mode != "tier_bytes") or cell.mode not in MODES:
            scene(pair, cell.side, count)
            pair.run()
        else:  # each ends its request: one after the other, each with a seed of its own
            for number in range(faults):
                # An odd seed points a row at another request's slot: chunks of prefill read one prompt at a time.
                pair.seed_faults(seed + number if cell.side == "decode" else 2 * (seed + number))
                scene(pair, cell.side, 1)
                pair.run()
                pair.release()
        _judge(pair, cell)
        cell.slots_checked = sum(pair.canary(side).checked_slots() for side in SIDES)
    finally:
        pair.close()
    return cell


def _engines(cell: Cell, subject: Subject, seed: int) -> CanaryPDFixture:
    mode = cell.mode
    logs = mode == OVERFLOW or (mode in _LOGGED and (cell.side == cell.finder))
    settings: dict[str, Any] = {"kv_canary": "log" if logs else "raise", **subject.settings}
    page = int(settings.get("page_size", 4))
    prefill, decode = scene_settings(mode, cell.side, cell.part, page)
    if mode == "next_token_swap":
        settings["sampling_backend"] = "token_oracle"
    planted = {f"perturb_{cell.side}": f"{mode}=1.0"} if mode in MODES else {}
    spec_parts = [part for part in Part if part.name == cell.part]
    target = spec_parts[0] if spec_parts else _first_part(subject)
    return CanaryPDFixture(
        subject.checkpoint, target=target if planted else None, seed=seed, armed=False,
        prefill_settings=prefill, decode_settings=decode, **planted, **settings,
    )  # fmt: skip


def _first_part(subject: Subject) -> Part:
    spec = load_spec(subject.checkpoint)
    return min(part for part in spec.parts if spec.layers_of(part))


# ---- reports --------------------------------------------------------------------------------------------------------


def _judge(pair: CanaryPDFixture, cell: Cell) -> None:
    """Compare what was found with what was planted."""
    if cell.mode == OVERFLOW:
        return  # the scene has counted
    page = pair.built("decode").config.memory.page_size
    matches = matched(pair.planted, _reports(pair), cell.finder, page)
    cell.injected = len(pair.planted)
    cell.alarms = [f"{side}: {violation.line()}" for side, violation in matches.unexplained]
    hit = set()
    for planted, step, reports in zip(pair.planted, matches.detected(), matches.by_fault, strict=True):
        if step is None:
            cell.alarms.append(f"not reported as it must be: {planted.side}: {planted.injection.line()}")
            continue
        cell.detected += 1
        place = planted.injection.place
        hit |= {place.at(byte=0, bit=0)} if place is not None else set()
        if cell.finder == cell.side and cell.mode not in _AT_ARRIVAL:
            cell.latency = max(cell.latency, step - planted.injection.step)
        cell.by += [by for side, violation in reports if (by := f"{side} {violation.tag}") not in cell.by]
    cell.by = list(dict.fromkeys(cell.by))
    cell.hit = len(hit)


def _reports(pair: CanaryPDFixture) -> Iterator[Report]:
    for side in SIDES:
        for violation in pair.violations(side):
            yield side, violation
