"""What a run of the world is made of, as plain data: shapes, the adversary's options, work, faults. Prints and parses.

A Scenario and the code are the same run, every time. `draw` makes one from a seed.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, Final

from serinus.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineShape:
    """The shape of one engine."""

    name: str
    role: str
    """Its role: decode or prefill."""
    tp: int = 1
    pp: int = 1
    pages: int = 17
    """Pages of its pool, the padding page included."""
    page_size: int = 4
    swa_pages: int = 0
    """The same of part SWA, where layers slide."""
    host_pages: int = 0
    """Pages of its host pool of each part, the padding page included; 0 = there is none."""
    write_policy: str = "write_through"
    """When pages are copied to the host."""
    prefetch: str = "none"
    """How long a request waits for the storage behind the host pool; none = there is no storage."""
    chunk: int = 8
    """Prompt tokens of one step at most."""
    overlaps: bool = False
    """Its steps begin before the ones before them are read; it has one rank then, and no peer writes its pages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The cluster and the model."""

    engines: tuple[EngineShape, ...]
    backend: str = "local"
    """How pages travel: local, shm, tcp (receiver-checked), push (Mooncake), pull (NIXL), ipc (CUDA IPC)."""
    layers: int = 2
    heads: int = 2
    vocab_size: int = 16
    context_length: int = 48
    on_failure: str = "recompute"
    secret: str = ""
    """The secret of the cluster; empty = there is none."""
    slides: str = ""
    """F or S (sliding) of each layer, or L (latent) of all; empty = all are F."""
    window: int = 0
    """Positions that a sliding layer sees, the token itself included; 0 = none slides."""
    canary: str = ""
    """Which KV bytes the canaries digest (none, all); empty = there are no canaries."""
    coverage: str = "full"
    """What canaries verify in each step: full, or rotating:N."""
    mode: str = "raise"
    """What they do with what they find: raise or heal."""
    optimistic: bool = False
    """Prompts are asked for before there are pages for them."""
    rows: int = 0
    """Requests that an engine runs at once; 0 = as many as it has rows for."""
    ranked: bool = False
    """Requests are served by the policy `priority`."""
    ageing_s: float = 0.0
    """With it: seconds of waiting that weigh as much as one step of priority; 0 = none do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the adversary may do all the time; probabilities are per chance. All zero = a perfect world."""

    delay_s: float = 0.0
    """A frame takes up to so much longer."""
    late_s: float = 0.0
    """A repeated, reordered or one-sided thing comes up to so much later."""
    drop: float = 0.0
    """A frame is lost."""
    duplicate: float = 0.0
    """A frame comes twice."""
    reorder: float = 0.0
    """A frame may be overtaken."""
    corrupt: float = 0.0
    """A bit of a frame flips."""
    overtake: float = 0.0
    """A PREPARE, GRANT, FAIL or ABORT is overtaken by what came after it."""
    lose_piece: float = 0.0
    """A piece that came is mislaid."""
    allocation: float = 0.0
    """The cache has no room, though it has."""
    restore: float = 0.0
    """A copy between device and host fails; a storage operation ends midway."""
    rank_delay_s: float = 0.0
    """A rank takes up to so much longer than the leader to do its part."""
    write_late_s: float = 0.0
    """A one-sided write lands up to so much later."""
    lose_op: float = 0.0
    """A one-sided operation under way is reported as lost: what it still does is unknown."""
    flip: float = 0.0
    """With canaries: a bit of a page flips on its way out to a peer, before it is digested."""
    stray: float = 0.0
    """With canaries, as all that follows: when a rank begins a step, KV that a page of its held some time ago lands in
    it again, without its stamps."""
    page: float = 0.0
    """...a whole page, stamps and all, is that of another place or of another time."""
    bit: float = 0.0
    """...a bit of KV flips on a page, in use or not."""
    stamp: float = 0.0
    """...a bit of a stamp flips."""
    row: float = 0.0
    """...an entry of a row names another slot."""
    midway: float = 0.0
    """A bit of KV flips after it was stored, before the step is stamped."""
    host: float = 0.0
    """A bit of a page in the host tier flips."""
    copy: float = 0.0
    """A copy between device and host does nothing, or takes other pages, and says that all is well."""

    @property
    def damages(self) -> bool:
        """Whether KV is damaged in ways that only a canary notices."""
        return any(getattr(self, name) for name in DAMAGES)


DAMAGES: Final = ("flip", "stray", "page", "bit", "stamp", "row", "midway", "host", "copy")
"""The options that damage KV behind every error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One request of a client."""

    rid: str
    at: float
    prompt: tuple[int, ...]
    new_tokens: int
    decode: str
    prefill: str
    """Engine that may compute the prompt; empty = none is named."""
    salt: str = ""
    priority: int = 0
    """Smaller = sooner, where requests are ranked."""
    timeout_s: float = 0.0
    """Within which it must end; 0 = whenever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """The client of a request goes away."""

    rid: str
    at: float = 0.0
    step: int = -1
    """Instead of `at`: before the event with this number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crash:
    """An engine is killed, and started again after a while."""

    engine: str
    at: float = 0.0
    down_s: float = 1.0
    step: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """An engine stands still and then goes on, as if nothing had been."""

    engine: str
    at: float = 0.0
    for_s: float = 1.0
    step: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """What one engine sends to another vanishes for a while; the other way stays open."""

    source: str
    target: str
    at: float = 0.0
    for_s: float = 1.0
    step: int = -1
    data: bool = True
    """So does what a one-sided backend moves; False = that goes by another network."""


Fault = Cancel | Crash | Pause | Partition
_FAULTS = {kind.__name__: kind for kind in (Cancel, Crash, Pause, Partition)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One run, from the first request to the last check."""

    seed: int
    """Of everything that is left to chance while it runs."""
    shape: Shape
    options: Options
    works: tuple[Work, ...]
    faults: tuple[Fault, ...] = ()
    drop_frames: tuple[int, ...] = ()
    """Frames, by number, that are lost."""
    repeat_frames: tuple[int, ...] = ()
    """Frames, by number, that come twice."""

    def to_json(self) -> str:
        """One line; `from_json` reads it."""
        data = dataclasses.asdict(self)
        data["faults"] = [{"kind": type(fault).__name__, **dataclasses.asdict(fault)} for fault in self.faults]
        return json.dumps(data, separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> Scenario:
        """What `to_json` wrote. Raises ConfigError."""
        try:
            data: dict[str, Any] = json.loads(text)
            shape = data["shape"]
            shape["engines"] = tuple(EngineShape(**engine) for engine in shape["engines"])
            faults = tuple(_FAULTS[fault.pop("kind")](**fault) for fault in data["faults"])
            works = tuple(Work(**{**work, "prompt": tuple(work["prompt"])}) for work in data["works"])
            return Scenario(
                seed=data["seed"], shape=Shape(**shape), options=Options(**data["options"]), works=works,
                faults=faults, drop_frames=tuple(data["drop_frames"]), repeat_frames=tuple(data["repeat_frames"]),
            )  # fmt: skip
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"testing: no scenario: {error!r}, expected what `serinus sim` printed") from None

    def describe(self) -> list[str]:
        """For people: one line for each thing that is not as in a perfect world, then the work."""
        shape = self.shape
        engines = ", ".join(f"{e.name} (TP{e.tp} PP{e.pp}, {e.pages} pages)" for e in shape.engines)
        lines = [f"world    {engines}; {shape.backend}; {shape.layers} layers x {shape.heads} heads"]
        lines += [f"         canaries, which digest KV: {shape.canary}"] * bool(shape.canary)
        lines += [f"         layers {shape.slides}, a window of {shape.window}"] * bool(shape.window)
        lines += ["         latent rows"] * ("L" in shape.slides)
        lines += ["         prompts are asked for before there are pages for them"] * shape.optimistic
        lines += [f"         by priority, ageing {shape.ageing_s:g} s; {shape.rows} at once"] * shape.ranked
        for field in dataclasses.fields(self.options):
            value = getattr(self.options, field.name)
            if value:
                lines.append(f"option   {field.name} = {value:g}")
        for work in self.works:
            lines.append(
                f"{work.at:7.3f}  {work.rid}: {len(work.prompt)} tokens {list(work.prompt)}, {work.new_tokens} new,"
                f" {work.decode} <- {work.prefill or 'no prefill engine'}"
                + f", priority {work.priority}" * bool(work.priority)
                + f", within {work.timeout_s:g} s" * bool(work.timeout_s)
            )
        for fault in self.faults:
            when = f"step {fault.step}" if fault.step >= 0 else f"{fault.at:7.3f}"
            rest = {f.name: getattr(fault, f.name) for f in dataclasses.fields(fault) if f.name not in ("at", "step")}
            lines.append(f"{when}  {type(fault).__name__.lower()} {rest}")
        if self.drop_frames:
            lines.append(f"frames   {list(self.drop_frames)} are lost")
        if self.repeat_frames:
            lines.append(f"frames   {list(self.repeat_frames)} come twice")
        return lines
