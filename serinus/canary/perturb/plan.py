"""PerturbPlan: which faults, how often, where and from which step on. Injection: one that was planted. Plain data."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from serinus.core.errors import ConfigError
from serinus.core.parts import Part
from serinus.kernels import Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultMode:
    """One kind of fault, and the check that must report it."""

    damage: str
    """The damage, in words."""
    found_by: str
    """Launch tags that must report it begin with one of these words, separated by a bar."""
    reasons: Reason
    """Each report has at least one of these reasons, and no other."""
    has_part: bool = True
    """Whether it damages KV of one part (else tokens)."""
    reads_bytes: bool = True
    """Whether only digests of KV can find it."""


_STAMP_REASONS = Reason.VERIFY_CHAIN_HASH | Reason.VERIFY_POSITION | Reason.VERIFY_TOKEN | Reason.VERIFY_REAL_KV_HASH
MODES: Mapping[str, FaultMode] = {
    "req_to_token": FaultMode(
        damage="one row entry of a running request is pointed at another active slot",
        found_by="HEAD|TAIL",
        reasons=Reason.VERIFY_CHAIN_HASH | Reason.VERIFY_POSITION,
        reads_bytes=False,
    ),
    "foreign_page": FaultMode(
        damage="one page of a running request's row is pointed at another prompt's page of the same positions",
        found_by="HEAD|TAIL",
        reasons=Reason.VERIFY_CHAIN_HASH,
        reads_bytes=False,
    ),
    "real_kv_used": FaultMode(
        damage="one bit of a slot that a running request reads",
        found_by="TAIL",
        reasons=Reason.VERIFY_REAL_KV_HASH,
    ),
    "real_kv_unused_cache": FaultMode(
        damage="one bit of any cached slot that no request uses, in steps that sweep",
        found_by="SWEEP",
        reasons=Reason.VERIFY_REAL_KV_HASH,
    ),
    "real_kv_post_forward": FaultMode(
        damage="one bit of a slot that this very forward pass wrote, after it was stamped",
        found_by="TAIL",
        reasons=Reason.VERIFY_REAL_KV_HASH,
    ),
    "next_token_swap": FaultMode(
        damage="two requests' sampled tokens are exchanged",
        found_by="HEAD",
        reasons=Reason.WRITE_TOKEN,
        has_part=False,
        reads_bytes=False,
    ),
    "tier_bytes": FaultMode(
        damage="one bit of a page in the host tier, of its KV or of its stamps",
        found_by="HEAD|TAIL",
        reasons=_STAMP_REASONS,
    ),
    "transfer_bytes": FaultMode(
        damage="one bit of a page on its way to another engine, of its KV or of its stamps",
        found_by="HEAD|TAIL",
        reasons=_STAMP_REASONS,
    ),
}
"""All kinds, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PerturbPlan:
    """Which faults to plant, how often and where. Raises ConfigError: an unknown mode or a value outside its range."""

    probabilities: Mapping[str, float] = field(default_factory=dict)
    """Chance of each mode in each step (of tier_bytes and transfer_bytes: in each step, and for each page sent)."""
    target: Part = Part.FULL
    """The part that is damaged."""
    warmup_steps: int = 50
    """Steps before the first fault."""
    seed: int = 0
    count_max: int = 0
    """Faults of each mode at most; 0 = no bound."""

    def __post_init__(self) -> None:
        for name, probability in self.probabilities.items():
            if name not in MODES:
                raise ConfigError(f"canary: perturbation {name!r}, expected one of {', '.join(MODES)}")
            if not 0 <= probability <= 1:
                raise ConfigError(f"canary: perturbation {name} has probability {probability}, expected 0 to 1")
        if self.warmup_steps < 0:
            raise ConfigError(f"canary: perturbation warm-up of {self.warmup_steps} steps, expected 0 or more")

    def check(
        self, *, parts: Collection[Part], real_data: str, sweep_interval: int, has_host: bool, has_oracle: bool,
        sends: bool,
    ) -> None:  # fmt: skip
        """Raise ConfigError where a mode cannot be found, or cannot happen, with these settings."""
        for name, probability in self.probabilities.items():
            if not probability:
                continue
            if MODES[name].has_part and self.target not in parts:
                raise ConfigError(
                    f"canary: perturbation {name} of part {self.target.name.lower()}, which this model has no layers"
                    f" of; expected {' or '.join(part.name.lower() for part in sorted(parts))}"
                )
            if MODES[name].reads_bytes and real_data == "none":
                raise ConfigError(
                    f"canary: perturbation {name} damages KV bytes, but --kv-canary-real-data is none; expected"
                    f" partial or all"
                )
        self._need("real_kv_unused_cache", sweep_interval > 0, "--kv-canary-sweep-interval above 0")
        self._need("tier_bytes", has_host, "--enable-hierarchical-cache")
        self._need("next_token_swap", has_oracle, "--sampling-backend token_oracle")
        self._need(
            "transfer_bytes", sends, "--disaggregation-mode prefill (of `serinus up`: --prefill-kv-canary-perturb)"
        )

    def _need(self, name: str, there: bool, what: str) -> None:
        if self.probabilities.get(name) and not there:
            raise ConfigError(f"canary: perturbation {name} without {what}, expected it")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The bit that a fault changed: of KV (layer, half, head), or of a stamp (lane, field)."""

    layer: int = -1
    """The model's number of the layer."""
    half: str = ""
    """Of keys (K) or of values (V)."""
    head: int = -1
    """The model's number of the KV head."""
    lane: str = ""
    """HEAD_K, HEAD_V, TAIL_K or TAIL_V, where a stamp was changed; else empty."""
    field: str = ""
    """token, position, hash or digest, where a stamp was changed; else empty."""
    byte: int = 0
    """Within the head, or within the field."""
    bit: int = 0

    def at(self, *, byte: int, bit: int) -> Place:
        """The same place, at that byte and bit."""
        return replace(self, byte=byte, bit=bit)

    def __str__(self) -> str:
        stratum = f"{self.lane}.{self.field}" if self.lane else f"layer{self.layer}.{self.half}.head{self.head}"
        return f"{stratum}.byte{self.byte}.bit{self.bit}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Injection:
    """One fault that was planted, with its place."""

    mode: str
    step: int
    part: str = ""
    slot: int = 0
    """Where; of a page that is not on the device, which slot of the page; 0 where tokens were damaged."""
    page: int = 0
    """The page, on the tier where it was damaged; 0 where that is not known, or tokens were damaged."""
    position: int = -1
    rid: str = ""
    before: int = 0
    after: int = 0
    place: Place | None = None
    """Which bit; None where no bytes were damaged."""
    rank: str = ""
    """Name of the rank whose pools hold it, where the engine has several ranks."""

    def line(self) -> str:
        """key=value in a fixed order, for the log."""
        return (
            f"kv_canary injected: mode={self.mode} step={self.step} part={self.part or '-'} slot_idx={self.slot}"
            f" page={self.page} position={self.position} place={self.place or '-'} req={self.rid or '-'}"
            f" before={self.before} after={self.after}"
            f"{' rank=' + self.rank.replace(' ', '_') if self.rank else ''}"
        )

    def as_json(self) -> dict[str, Any]:
        """The injection as `GET /canary` lists it."""
        return asdict(self)


def parse_perturb(text: str) -> dict[str, float]:
    """NAME=PROB[,NAME=PROB...] as a mapping. Raises ConfigError: the text has another form."""
    found: dict[str, float] = {}
    for item in filter(None, (piece.strip() for piece in text.split(","))):
        name, equals, value = item.partition("=")
        try:
            found[name] = float(value)
        except ValueError:
            equals = ""
        if not equals:
            raise ConfigError(
                f"canary: perturbation {item!r}, expected NAME=PROBABILITY, for instance real_kv_used=0.01"
            )
    return found
