"""The detector matrix: every fault that can be planted, one at a time, against every detector of a canary.

    for cell in plan_matrix(subject): print(run_cell(cell, subject, faults=3).perfect)

A cell plants one kind of fault in one part of one model, on one side of a prefill/decode pair, waits for the reports of
both canaries, and compares them with what `MODES` promises: which check reports it, for which reason, how soon, and
that no other check reports anything. A cell without a mode is a clean run under abort, eviction and reload.

Where the engines have several ranks, every rank that holds KV of the part is damaged, one after the other in an order
by the seed, and that very rank must report it. Latent rows are the same on all slices of a stage, and the first of them
sends them to all: on their way those of it are damaged, and every slice that got them must report it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from serinus.canary.perturb import MODES
from serinus.core.parts import Part
from serinus.core.rng import Rng
from serinus.core.stamps import STAMP_FIELDS
from serinus.models import ModelSpec, load_spec
from serinus.parallel import Mesh
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
    ranks: list[str] = field(default_factory=list)
    """Ranks whose KV can be damaged; empty = tokens are damaged, or an engine has one rank."""
    ranks_hit: list[str] = field(default_factory=list)
    """Those that were damaged and reported it."""
    places: int = 0
    """Layers x halves x heads that can be damaged, and on each rank lanes x fields of stamps where those can."""
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
        whole = set(self.ranks) <= set(self.ranks_hit)
        return planted and whole and self.detected == self.injected and soon and not self.alarms and not self.error

    def as_json(self) -> dict[str, Any]:
        """The cell as JSON-ready data."""
        return {**asdict(self), "perfect": self.perfect}


def plan_matrix(subject: Subject) -> list[Cell]:
    """The cells of one model, not run yet. Raises ConfigError: the model or the settings are wrong, or the model cannot
    be divided among so many ranks."""
    spec, mesh = load_spec(subject.checkpoint), _mesh(subject)
    spec.shards(mesh)
    parts = sorted(part for part in spec.parts if spec.layers_of(part))
    cells = [Cell(model=subject.name, part="all", mode=CLEAN, side="both", expected="neither", promise=None)]
    if parts != [Part.SWA] and not subject.modes:
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
                places = _places(spec, subject, part, mode, is_sent=finder != side)
                cells.append(
                    Cell(
                        model=subject.name, part=part.name if facts.has_part else "tokens", mode=mode, side=side,
                        expected=f"{finder} {facts.found_by}", finder=finder, promise=None,
                        ranks=[mesh.name(rank) for rank in places] if mesh.size > 1 else [],
                        places=sum(places.values()),
                    )
                )  # fmt: skip
    return cells


def _sides(mode: str, part: Part) -> tuple[str, ...]:
    if mode == "transfer_bytes":
        return ("prefill",)
    if mode == "tier_bytes" and part is Part.SWA:  # prefill keeps pages there that no prompt ever loads: out of windows
        return ("decode",)
    return ("decode",) if mode == "next_token_swap" else SIDES


def _mesh(subject: Subject) -> Mesh:
    return Mesh(tp=subject.settings.get("tp_size", 1), pp=subject.settings.get("pp_size", 1))


def _takers(spec: ModelSpec, mesh: Mesh) -> dict[str, list[str]]:
    """Of latent rows, by the first slice of each stage the ranks that it sends them to."""
    if not spec.is_latent:
        return {}
    stages = [[mesh.rank_of(tp_rank=tp, pp_rank=pp) for tp in range(mesh.tp)] for pp in range(mesh.pp)]
    return {mesh.name(stage[0]): [mesh.name(rank) for rank in stage] for stage in stages}


def _places(spec: ModelSpec, subject: Subject, part: Part, mode: str, *, is_sent: bool) -> dict[int, int]:
    """The ranks that a mode can damage, and how many places it can hit there; empty: it damages tokens. `is_sent`: what
    the other engine gets of them is damaged."""
    partial = subject.settings.get("kv_canary_real_data") == "partial"
    stamped = 2 * part.halves * STAMP_FIELDS if mode in _AT_ARRIVAL else 0
    found = {}
    for shard in spec.shards(_mesh(subject)) if MODES[mode].has_part else ():
        layers, heads = len(spec.on(shard).layers_of(part)), len(shard.kv_heads)
        if partial and MODES[mode].reads_bytes:
            heads = int(0 in shard.kv_heads)  # the first bytes of head 0 alone are digested
        if layers and heads and not (is_sent and spec.is_latent and shard.tp_rank):
            found[shard.rank] = layers * part.halves * heads + stamped if MODES[mode].reads_bytes else 0
    return found


def _promise(pair: CanaryPDFixture, cell: Cell) -> int | None:
    """Steps within which a fault is reported, from the settings."""
    stride = pair.canary(cell.finder).settings.stride
    if cell.finder != cell.side or cell.mode in _AT_ARRIVAL:
        return None
    if cell.mode == "real_kv_unused_cache":
        return pages_to_sweep(pair, cell.side, Part[cell.part])
    # With stages as many steps are under way as there are stages, and a request runs in one of so many.
    return pair.mesh.pp * {"real_kv_post_forward": stride, "next_token_swap": 1}.get(cell.mode, stride - 1)


def run_cell(cell: Cell, subject: Subject, *, faults: int = 3, seed: int = 0) -> Cell:
    """Run one cell in engines of its own. Returns it, filled in.

    Args:
        faults: at least so many; where bytes are damaged also as many as there are places (96 at most).
    Raises ConfigError: the settings do not fit the model; AssertionError or SerinusError: the engines broke, or let
        wrong KV be used.
    Cost: two engines are built, for each rank that is damaged; then a few steps a fault.
    """
    if cell.mode not in MODES:
        _run_in(cell, subject, None, faults, seed)
        return cell
    part = _target(cell, subject)
    spec, is_sent = load_spec(subject.checkpoint), cell.finder != cell.side
    places = _places(spec, subject, part, cell.mode, is_sent=is_sent)
    victims: list[int | None] = [*(places or (None,))]
    Rng(seed).split(f"ranks of {cell.mode}").shuffle(victims)
    for victim in victims:
        every = 0 if victim is None or cell.mode == "tier_bytes" else min(places[victim], _FAULTS_MAX)
        _run_in(cell, subject, victim, max(faults, every), seed)
    return cell


def _run_in(cell: Cell, subject: Subject, rank: int | None, faults: int, seed: int) -> None:
    """Run a cell in a pair of its own. `rank`: the one that is damaged; None = no KV is."""
    pair = _engines(cell, subject, seed)
    try:
        handed = cell.mode == "real_kv_post_forward" and cell.side == "prefill"
        scene = SCENES["transfer_bytes" if handed else cell.mode]
        if cell.mode in MODES:
            cell.promise = _promise(pair, cell)
        if (cell.places and cell.mode != "tier_bytes") or cell.mode not in MODES:
            pair.seed_faults(seed, rank=rank)
            scene(pair, cell.side, faults)
            pair.run()
        else:  # each ends its request: one after the other, each with a seed of its own
            for number in range(faults):
                # An odd seed points a row at another request's slot: chunks of prefill read one prompt at a time.
                pair.seed_faults(seed + number if cell.side == "decode" else 2 * (seed + number), rank=rank)
                scene(pair, cell.side, 1)
                pair.run()
                pair.release()
        _judge(pair, cell)
    finally:
        pair.close()


def _engines(cell: Cell, subject: Subject, seed: int) -> CanaryPDFixture:
    mode = cell.mode
    logs = mode in _LOGGED and cell.side == cell.finder
    settings: dict[str, Any] = {"kv_canary": "log" if logs else "raise", **subject.settings}
    page = int(settings.get("page_size", 4))
    prefill, decode = scene_settings(mode, cell.side, cell.part, page, _mesh(subject).pp)
    if mode == "next_token_swap":
        settings["sampling_backend"] = "token_oracle"
    planted = {f"perturb_{cell.side}": f"{mode}=1.0"} if mode in MODES else {}
    return CanaryPDFixture(
        subject.checkpoint, target=_target(cell, subject) if planted else None, seed=seed, armed=False,
        prefill_settings=prefill, decode_settings=decode, **planted, **settings,
    )  # fmt: skip


def _target(cell: Cell, subject: Subject) -> Part:
    """The part that is damaged; of tokens, the first there is."""
    spec = load_spec(subject.checkpoint)
    parts = [part for part in spec.parts if spec.layers_of(part)]
    return next((part for part in parts if part.name == cell.part), min(parts))


# ---- reports --------------------------------------------------------------------------------------------------------


def _judge(pair: CanaryPDFixture, cell: Cell) -> None:
    """Compare what was found with what was planted; add it to the cell."""
    checked = [pair.checked_slots(side) for side in SIDES]
    cell.slots_checked += sum(map(sum, checked))
    if cell.mode == CLEAN:
        silent = [f"{side} {name}" for side, found in zip(SIDES, checked, strict=True)
                  for name, slots in zip(pair.ranks, found, strict=True) if not slots]  # fmt: skip
        cell.alarms += [f"checked nothing: {name}" for name in silent]
    if cell.mode == OVERFLOW:
        return  # the scene has counted
    page = pair.built("decode").config.memory.page_size
    takers = _takers(pair.built("decode").spec, pair.mesh)
    matches = matched(pair.planted, _reports(pair), cell.finder, page, pair.ranks, takers)
    cell.injected += len(pair.planted)
    cell.alarms += [f"{side}: {violation.line()}" for side, violation in matches.unexplained]
    hit = set()
    for planted, step, reports in zip(pair.planted, matches.detected(), matches.by_fault, strict=True):
        injection = planted.injection
        if step is None:
            cell.alarms.append(f"not reported as it must be: {planted.side}: {injection.line()}")
            continue
        cell.detected += 1
        hit |= {(injection.rank, injection.place.at(byte=0, bit=0))} if injection.place is not None else set()
        if injection.rank and injection.rank not in cell.ranks_hit:
            cell.ranks_hit.append(injection.rank)
        if cell.finder == cell.side and cell.mode not in _AT_ARRIVAL:
            cell.latency = max(cell.latency, step - injection.step)
        cell.by += [by for side, violation in reports if (by := f"{side} {violation.tag}") not in cell.by]
    cell.by = list(dict.fromkeys(cell.by))
    cell.hit += len(hit)


def _reports(pair: CanaryPDFixture) -> Iterator[Report]:
    for side in SIDES:
        for violation in pair.violations(side):
            yield side, violation
