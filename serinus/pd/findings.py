"""Findings of a canary about pages that a handoff moved, as one engine tells them to the other. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from serinus.core.handoff import HandoffFinding
from serinus.core.parts import Part
from serinus.pd.actions import Send
from serinus.wire.messages import Fail, KvFound

_REASON_CHARS: Final = 2000


def sends(finding: HandoffFinding, up: Mapping[str, str]) -> list[Send]:
    """What is told of a finding: over the connection that the pages went over; where that is gone to every engine of
    that name, as the other engine may have a new connection, and one that had no part in the handoff loses nothing.

    `up`: names of the engines that are connected, by their connection.
    """
    is_there = up.get(finding.peer) == finding.engine
    peers = [finding.peer] if is_there else [peer for peer, engine in up.items() if engine == finding.engine]
    return [Send(peer=peer, message=_message_of(finding)) for peer in peers]


def _message_of(finding: HandoffFinding) -> KvFound:
    part = Part[finding.part] if finding.part else Part.FULL
    return KvFound(
        xid=finding.xid, rid=finding.rid, part=part, position=max(0, finding.position),
        reason=finding.reason[:_REASON_CHARS], recall=finding.is_recall, salt=finding.salt, tokens=finding.tokens,
        source=finding.is_source,
    )  # fmt: skip


def heard(message: KvFound, engine: str, peer: str) -> HandoffFinding:
    """What the other engine told, for this one."""
    part = Part(message.part).name if message.part < len(Part) else ""
    return HandoffFinding(
        engine=engine, peer=peer, xid=message.xid, rid=message.rid, part=part, position=message.position,
        reason=message.reason[:_REASON_CHARS], salt=message.salt, tokens=message.tokens, is_source=message.source,
        is_recall=message.recall,
    )  # fmt: skip


def ended_there(message: Fail, engine: str, peer: str, rid: str) -> HandoffFinding:
    """The other engine gave a handoff up because of what its canary found."""
    return HandoffFinding(engine=engine, peer=peer, xid=message.xid, rid=rid, reason=message.reason[:_REASON_CHARS])
