"""The detector matrix: every fault that can be planted, one at a time, against every detector of a canary.

    for cell in plan_matrix(subject): print(run_cell(cell, subject, faults=3).perfect)

A cell plants one kind of fault in one part of one model, on one side of a prefill/decode pair, waits for the reports of
both canaries, and compares them with what `MODES` promises: which check reports it, for which reason, how soon, and
that no other check reports anything. A cell without a mode is a clean run under abort, eviction and reload.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from serinus.canary import Violation
from serinus.canary.perturb import MODES
from serinus.core.parts import Part
from serinus.core.settings import coverage_stride
from serinus.models import load_spec
from serinus.selftest.fixture import SIDES, CanaryPDFixture, Planted

__all__ = ["CLEAN", "Cell", "Subject", "plan_matrix", "run_cell"]

CLEAN = "none"
"""The mode of a cell in which nothing is planted."""
_AT_ARRIVAL = ("transfer_bytes", "tier_bytes")
_TIERED = {"enable_hierarchical_cache": True, "hicache_ratio": 4.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model under test, and the settings of both its engines."""

    name: str
    checkpoint: Path
    settings: Mapping[str, Any] = field(default_factory=dict)


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
        planted = self.injected > 0 if self.mode != CLEAN else self.slots_checked > 0
        soon = self.promise is None or self.latency <= self.promise
        return planted and self.detected == self.injected and soon and not self.alarms and not self.error

    def as_json(self) -> dict[str, Any]:
        """The cell as JSON-ready data."""
        return {**asdict(self), "perfect": self.perfect}


def plan_matrix(subject: Subject) -> list[Cell]:
    """The cells of one model, not run yet. Raises ConfigError: the model or the settings are wrong."""
    spec = load_spec(subject.checkpoint)
    parts = sorted(part for part in spec.parts if spec.layers_of(part))
    stride = coverage_stride(str(subject.settings.get("kv_canary_coverage", "full")))
    cells = [Cell(model=subject.name, part="all", mode=CLEAN, side="both", expected="neither", promise=None)]
    for mode, facts in MODES.items():
        for part in parts if facts.has_part else parts[:1]:
            for side in _sides(mode):
                handed = side == "prefill"
                cell = Cell(
                    model=subject.name,
                    part=part.name if facts.has_part else "tokens",
                    mode=mode,
                    side=side,
                    expected=f"decode {facts.found_by}",
                    promise=None if handed or mode in _AT_ARRIVAL else _promise(mode, stride),
                )  # fmt: skip
                cells.append(cell)
    return cells


def _sides(mode: str) -> tuple[str, ...]:
    if mode == "transfer_bytes":
        return ("prefill",)
    return SIDES if mode == "real_kv_post_forward" else ("decode",)


def _promise(mode: str, stride: int) -> int:
    if mode in ("req_to_token", "real_kv_used"):
        return stride - 1
    return {"real_kv_unused_cache": 0, "real_kv_post_forward": stride, "next_token_swap": 1}[mode]


def run_cell(cell: Cell, subject: Subject, *, faults: int = 3, seed: int = 0) -> Cell:
    """Run one cell in engines of its own, `faults` faults one after the other. Returns it, filled in.

    Raises ConfigError: the settings do not fit the model; AssertionError or SerinusError: the engines broke.
    Cost: two engines are built; then about 30 steps a fault.
    """
    pair = _engines(cell, subject, seed)
    length = _length(pair)
    scene = _SCENES[cell.mode if cell.mode in _SCENES else "running"]
    if cell.side == "prefill":
        scene = _handed_over
    rounds = faults if cell.mode != CLEAN else 1
    seen = dict.fromkeys(SIDES, 0)
    for _ in range(rounds):
        before = len(pair.planted)
        scene(pair, cell, length)
        pair.run()
        _classify(pair, cell, pair.planted[before:], seen)
        pair.release()
    cell.slots_checked = sum(pair.canary(side).checked_slots() for side in SIDES)
    pair.close()
    return cell


def _engines(cell: Cell, subject: Subject, seed: int) -> CanaryPDFixture:
    mode = cell.mode
    settings: dict[str, Any] = {"kv_canary": "raise", **subject.settings}
    decode: dict[str, Any] = {"kv_canary_sweep_interval": 2}
    prefill: dict[str, Any] = {}
    if mode in (CLEAN, "tier_bytes"):
        page = int(settings.get("page_size", 4))
        decode |= {**_TIERED, "max_total_tokens": 24 * page, "max_running_requests": 2}
    if mode == CLEAN:
        prefill |= decode
    if mode == "next_token_swap":
        settings["sampling_backend"] = "token_oracle"
    planted = {} if mode == CLEAN else {f"perturb_{cell.side}": f"{mode}=1.0"}
    spec_parts = [part for part in Part if part.name == cell.part]
    target = spec_parts[0] if spec_parts else _first_part(subject)
    return CanaryPDFixture(
        subject.checkpoint, target=None if mode == CLEAN else target, seed=seed, armed=False,
        prefill_settings=prefill, decode_settings=decode, **planted, **settings,
    )  # fmt: skip


def _first_part(subject: Subject) -> Part:
    spec = load_spec(subject.checkpoint)
    return min(part for part in spec.parts if spec.layers_of(part))


def _length(pair: CanaryPDFixture) -> int:
    """Tokens of a prompt: three pages and a half."""
    return 3 * pair.pair.decode.built.config.memory.page_size + 2


# ---- scenes: what happens around one fault --------------------------------------------------------------------------

Scene = Callable[[CanaryPDFixture, Cell, int], None]


def _running(pair: CanaryPDFixture, cell: Cell, length: int) -> None:
    """Three requests are under way, far from their ends."""
    stride = pair.canary("decode").settings.stride
    rids = pair.send_parallel_short_requests(3, distinct_prompts=True, prompt_tokens=length, new_tokens=16 + 2 * stride)
    pair.run_until(lambda: all(len(pair.tokens(rid)) >= 3 for rid in rids))
    pair.arm("decode")


def _handed_over(pair: CanaryPDFixture, cell: Cell, length: int) -> None:
    """Two prompts are computed for the decode engine."""
    pair.arm("prefill")
    pair.send_parallel_short_requests(2, distinct_prompts=True, prompt_tokens=length)


def _asleep(pair: CanaryPDFixture, cell: Cell, length: int) -> None:
    """Some prompts are cached; another request keeps the engine at work."""
    pair.send_parallel_short_requests(2, distinct_prompts=True, prompt_tokens=length)
    pair.run()
    pair.arm("decode")
    pair.send_parallel_short_requests(1, distinct_prompts=True, prompt_tokens=length, new_tokens=12)


def _came_back(pair: CanaryPDFixture, cell: Cell, length: int) -> None:
    """Four prompts go down to the host tier and come back, until the damaged page has been among them."""
    pair.flush()
    page = pair.pair.decode.built.config.memory.page_size
    prompts = [pair.random_prompt(10 * page + 1) for _ in range(4)]
    for prompt in prompts:
        pair.send(prompt, new_tokens=2)
        pair.run()
    total = pair.canary("decode").violation_count
    pair.arm("decode")
    for prompt in 3 * prompts:
        pair.send(prompt, new_tokens=2)
        pair.run()
        if pair.canary("decode").violation_count > total:
            return


def _clean(pair: CanaryPDFixture, cell: Cell, length: int) -> None:
    """Shared and distinct prompts, aborts, more tokens than the device holds, prompts that come back."""
    page = pair.pair.decode.built.config.memory.page_size
    shared = [pair.random_prompt(8 * page + 1) for _ in range(3)]
    for turn in range(6):
        rids = [pair.send([*shared[turn % 3], *pair.random_prompt(2)], new_tokens=page) for _ in range(2)]
        rids += pair.send_parallel_short_requests(2, distinct_prompts=turn % 2 == 0, prompt_tokens=length)
        for _ in range(3 + 4 * turn):
            pair.turn()
        if pair.finish(rids[turn % 4]) is None:
            pair.pair.abort(rids[turn % 4])
        pair.run()


_SCENES: Mapping[str, Scene] = {
    CLEAN: _clean,
    "running": _running,
    "real_kv_unused_cache": _asleep,
    "tier_bytes": _came_back,
}


# ---- reports --------------------------------------------------------------------------------------------------------


def _classify(pair: CanaryPDFixture, cell: Cell, planted: Sequence[Planted], seen: dict[str, int]) -> None:
    """Compare what was found since the last fault with what was planted; `seen`: violations compared, by side."""
    cell.injected += len(planted)
    found = list(_news(pair, seen))
    detected: set[int] = set()
    for side, violation in found:
        index = next((i for i, p in enumerate(planted) if _explains(p, side, violation)), None)
        if index is None or side != "decode" or violation.tag.split("_")[0] not in MODES[cell.mode].found_by.split("|"):
            cell.alarms.append(f"{side}: {violation.line()}")
            continue
        if index not in detected:
            cell.latency = max(cell.latency, violation.step - planted[index].steps[side])
        detected.add(index)
        if (by := f"{side} {violation.tag}") not in cell.by:
            cell.by.append(by)
    cell.detected += len(detected)


def _news(pair: CanaryPDFixture, seen: dict[str, int]) -> Iterator[tuple[str, Violation]]:
    for side in SIDES:
        canary = pair.canary(side)
        new, seen[side] = canary.violation_count - seen[side], canary.violation_count
        for violation in pair.violations(side)[-new:] if new else ():
            yield side, violation


def _explains(planted: Planted, side: str, violation: Violation) -> bool:
    """Whether this violation is what that fault leads to."""
    injection = planted.injection
    mode = MODES[injection.mode]
    if violation.reasons & ~mode.reasons:
        return False
    if injection.mode == "next_token_swap":
        return {violation.stored_token, violation.expected_token} == {injection.before, injection.after}
    if violation.part.name != injection.part:
        return False
    if injection.mode == "req_to_token":
        return violation.rid == injection.rid and violation.position - injection.position in (0, 1)
    if injection.mode in _AT_ARRIVAL:
        return True  # which page it was cannot be told from here; that it was one slot is what the stories prove
    same_place = violation.slot == injection.slot if side == planted.side else True
    return same_place and (injection.position < 0 or violation.position == injection.position)
