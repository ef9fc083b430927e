"""Spans of a request's trace as plain data: engines record them, their fronts export them (OpenTelemetry)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta

from serinus.core.bounds import Name, Text

SPANS_MAX = 1024
"""Spans that one message carries at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanRecord:
    """One span that has ended."""

    name: Name
    """queue, prefill, handoff, decode..."""
    traceparent: Name
    """W3C form of the span under which it stands."""
    start: float
    """Clock.now() of the machine; its processes have one clock."""
    end: float
    """The same clock, at its end."""
    attributes: Annotated[Mapping[Name, str | int | float | bool], Meta(max_length=64)] = field(default_factory=dict)
    """What is told of it."""
    parts: Annotated[tuple[tuple[Name, float, float], ...], Meta(max_length=64)] = ()
    """Name, start and end of spans inside of it."""
    error: Text = ""
    """Why it failed; empty = it did not."""
