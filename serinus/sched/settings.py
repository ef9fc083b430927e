"""The numbers the scheduler works by, checked at birth. Knows neither flags nor environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from serinus.core.errors import ConfigError
from serinus.core.parts import Part

POLICIES = ("fcfs", "lpm", "priority")
"""First come, first served; longest cached prefix first; smallest priority first, and of one priority the oldest."""

PREFETCH_POLICIES = ("none", "best_effort", "timeout", "wait_complete")
"""No storage; take what has come when there is room; wait up to a deadline; wait to the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedSettings:
    """What bounds a step, a sequence and a queue. Raises ConfigError where a number makes no sense."""

    page_size: int
    """Tokens of one page; the cache's own."""
    context_length: int
    """Tokens of one sequence at most, prompt and output together; width of a row."""
    rows: int
    """Rows of req_to_token, row 0 (padding) included."""
    vocab_size: int
    """Token ids are below this."""
    eos_ids: tuple[int, ...] = ()
    """Tokens that end an answer unless the request ignores them."""
    max_total_tokens: int | None = None
    """Tokens one request may occupy in the pool; None = all pages but the padding page."""
    max_running_requests: int = 64
    """Requests in a batch (and in transit towards it) at most; below `rows`."""
    max_queued_requests: int = 4096
    """Requests that wait at most; one more is refused (CapacityError). Under the policy `priority`: of the priority of
    the new one, or a more important one; and eight times as many altogether."""
    queued_max_of: Mapping[int, int] = field(default_factory=dict)
    """Under the policy `priority`: how many of these priorities may wait, besides that."""
    priority_ageing_s: float = 0.0
    """Under the policy `priority`: a request goes before those of one step more importance that came so many seconds
    later (and half as many, see queues.place_of); 0 = never."""
    request_s_max: float = 0.0
    """Seconds that a request may take; 0 = no bound but its own."""
    chunked_prefill_size: int = 2048
    """Prompt tokens of one step at most; -1 = no bound, prompts are never split."""
    step_s_max: float = 0.0
    """Seconds of a step at most: long prompts are cut so that a step takes no longer, at the rate of the latest ones;
    0 = no bound."""
    schedule_policy: str = "fcfs"
    """The order of admission: one of POLICIES."""
    growth_tokens: int = 64
    """A newcomer is admitted only if every running request could still grow by this much (or to its end)."""
    min_remote_tokens: int = 0
    """A remote request that lacks fewer prompt tokens than this is computed here."""
    local_gain: float = 0.0
    """A remote request is computed here where its first token then comes so many times sooner, by what the engines
    measured (handoff_choice.py); 0 = never for that."""
    prefetch_policy: str = "none"
    """How long a request waits for the storage: none (it is not asked), best_effort, timeout or wait_complete."""
    prefetch_s_max: float = 1.0
    """With timeout: seconds since its arrival that a request may wait for the storage."""
    depth: int = 1
    """Plans that may be under way at once; more than 1 where the ranks work on several steps at a time. Each then takes
    its share of the decoding requests."""
    overlaps: bool = False
    """Plans say what goes on behind them (StepPlan.ahead), where they can."""
    turn_size: int = 0
    """Positions that a canary verifies in one step where each has its turn: whole pages; 0 = one."""
    verify_steps: int = 0
    """A canary verifies each slot that a decoding request reads in one of so many steps of that request; 1 = in each;
    0 = there is no canary: all that is computed counts as verified."""
    raises: bool = False
    """A request whose KV is found wrong ends."""
    heals: bool = False
    """Requests that read wrong KV are computed again: no request gives its pages back before all of its KV is verified,
    and tokens of an answer that is not streamed leave only when they are known to be right."""
    confirms_streams: bool = False
    """With `heals`: tokens of streams too leave only when they are known to be right."""
    verify_parts: tuple[Part, ...] = ()
    """The parts in which a canary verifies slots: those with layers."""
    lpm_scan_requests: int = 128
    """Waiting requests whose cached prefix lpm looks up in one step."""
    lpm_skips_max: int = 256
    """Times lpm may let others pass a request before it goes first."""

    def __post_init__(self) -> None:
        for name in ("page_size", "rows", "vocab_size", "max_running_requests", "max_queued_requests", "depth"):
            if getattr(self, name) < 1:
                raise ConfigError(f"sched: {name} is {getattr(self, name)}, expected at least 1")
        if self.context_length < 2:
            raise ConfigError(f"sched: context_length is {self.context_length}, expected at least 2")
        if self.max_running_requests >= self.rows:
            raise ConfigError(
                f"sched: max_running_requests is {self.max_running_requests}, expected less than rows = {self.rows}"
                " (row 0 is padding)"
            )
        if self.chunked_prefill_size != -1 and self.chunked_prefill_size < self.page_size:
            raise ConfigError(
                f"sched: chunked_prefill_size is {self.chunked_prefill_size}, expected -1 (no bound) or at least one"
                f" page = {self.page_size} tokens"
            )
        for name in ("step_s_max", "priority_ageing_s", "request_s_max", "local_gain"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"sched: {name} is {getattr(self, name)}, expected at least 0")
        if self.schedule_policy not in POLICIES:
            raise ConfigError(f"sched: schedule_policy is {self.schedule_policy!r}, expected one of {list(POLICIES)}")
        if self.prefetch_policy not in PREFETCH_POLICIES:
            raise ConfigError(
                f"sched: prefetch_policy is {self.prefetch_policy!r}, expected one of {list(PREFETCH_POLICIES)}"
            )
        if self.max_total_tokens is not None and self.max_total_tokens < 2:
            raise ConfigError(f"sched: max_total_tokens is {self.max_total_tokens}, expected at least 2")
        if self.verify_steps < 0:
            raise ConfigError(f"sched: verify_steps is {self.verify_steps}, expected at least 0")
        if self.growth_tokens < 0 or self.min_remote_tokens < 0:
            raise ConfigError(
                f"sched: growth_tokens is {self.growth_tokens} and min_remote_tokens {self.min_remote_tokens},"
                " expected at least 0"
            )
