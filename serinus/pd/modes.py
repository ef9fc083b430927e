"""How pages are kept safe while another process may write or read them: three modes, and what backends can do. Pure.

The rule of all three: a page is used again only when no process can write it any more, and that fact comes from an
event, never from a clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from serinus.core.errors import ConfigError
from serinus.pd.layout import RankLayout, difference, is_same
from serinus.pd.slices import slices_fault
from serinus.wire.messages import LayoutSignature


class Mode(Enum):
    """Which side moves the bytes, and what makes a closed grant safe."""

    RECEIVER_CHECKED = "receiver_checked"
    """A: decode's own thread copies, and only while the grant is open. Closing it is local: pages are free at once."""
    PUSH = "push"
    """B: prefill writes into decode's memory. Pages stay in quarantine until every writer acknowledged the ABORT, or
    was cut off at the transport."""
    PULL = "pull"
    """C: decode reads prefill's memory. Its pages stay in quarantine until its own reads have ended; it commits only
    when prefill confirms that the source was there all the time."""


class Fence(Enum):
    """How a backend keeps a peer that no longer answers from writing into our memory."""

    NONE = "none"
    """It cannot: no fence."""
    CLOSE = "close"
    """Closing what the peer is connected to refuses its writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a data backend says of itself."""

    mode: Mode
    fence: Fence = Fence.NONE
    """Matters to PUSH alone."""
    recut: Mode | None = None
    """The mode between engines whose pages differ in shape (TP, PP, page size); None = pages only go whole."""
    same_host: bool = False
    """Works only within one machine."""
    whole_chunks: bool = False
    """Pages move at the speed of memory: a message for all that a step computed, not for every few megabytes."""
    slices: bool = False
    """Between unequal layouts a rank reads its own layers and heads alone, straight into its pages, which must be of
    equal size; there is a digest of them for each rank that does (with `recut` PULL)."""

    def between(self, source: RankLayout, target: RankLayout) -> Mode:
        """The mode between two engines that can exchange KV."""
        return self.mode if self.recut is None or is_same(source, target) else self.recut

    def objection(self, ours: LayoutSignature, theirs: LayoutSignature, *, we_send: bool = False) -> str:
        """Why KV of these layouts cannot travel so, in words with both values; empty = it can. `we_send`: see
        `difference`."""
        reason = difference(ours, theirs, can_recut=self.recut is not None, we_send=we_send)
        return reason or (slices_fault(ours, theirs) if self.slices else "")


_CHECKED = Capabilities(mode=Mode.RECEIVER_CHECKED, recut=Mode.RECEIVER_CHECKED)
_KNOWN: Mapping[str, Capabilities] = {
    "local": _CHECKED,
    "shm": Capabilities(mode=Mode.RECEIVER_CHECKED, recut=Mode.RECEIVER_CHECKED, same_host=True),
    "tcp": _CHECKED,
}


def known_capabilities(name: str) -> Capabilities | None:
    """Those of the backends that this room brings along; None = it says itself."""
    return _KNOWN.get(name)


def check_safe(name: str, capabilities: Capabilities) -> None:
    """Raises ConfigError where no mode is safe with what the backend can do."""
    if capabilities.mode is Mode.PUSH and capabilities.fence is Fence.NONE:
        raise ConfigError(
            f"pd: backend {name!r} lets peers write into our memory (push) and cannot cut one off,"
            " expected a fence (unregister, close), or pull, or receiver_checked"
        )
