"""Every error Serinus raises on purpose, as one tree.

    SerinusError
      ConfigError        the user's settings; raised before anything starts
      RequestError       one request is at fault; answered with 4xx, the engine goes on
        BadRequest         a field of the request is wrong (names field, value, expectation)
          BadSampling        a sampling parameter is
          PromptTooLong      the prompt does not fit the context or the KV pool
        UnknownModel       no such served model (404)
        Unauthorized       missing or wrong API key (401)
        RateLimited        its API key has as much as it may have now (429)
      PeerError          another process is at fault; retry, reroute, recompute
        PeerGone           the other process ended or stopped answering
        TransferFailed     pages did not arrive whole
        DigestMismatch     pages arrived, but not the bytes that were sent
        LayoutMismatch     the two engines cannot exchange KV (other model, dtype, page size...)
        FrameError         bytes that are no frame of ours
      CapacityError      no room now: back-pressure, never a crash (503)
        TooLate            the deadline of a request cannot be met (504)
      OutOfMemory        a step needs more memory than there is: its requests fail (500), the engine goes on
      StepAbandoned      another rank of the engine cannot go on with this step; its ranks leave it together
      KvViolation        the canary saw a broken promise
      InvariantError     we broke our own promise; this engine stops, loudly, with the evidence

A message reads `room: what is wrong, which value, what was expected`.
"""

from __future__ import annotations

import math
from typing import Any

from serinus.core.shown import shown

__all__ = [
    "BadRequest",
    "BadSampling",
    "CapacityError",
    "ConfigError",
    "DigestMismatch",
    "FrameError",
    "InvariantError",
    "KvViolation",
    "LayoutMismatch",
    "OutOfMemory",
    "PeerError",
    "PeerGone",
    "PromptTooLong",
    "RateLimited",
    "RequestError",
    "SerinusError",
    "StepAbandoned",
    "TooLate",
    "TransferFailed",
    "Unauthorized",
    "UnknownModel",
]


class SerinusError(Exception):
    """Root of everything Serinus raises on purpose."""


class ConfigError(SerinusError):
    """A setting is wrong. Raised before anything starts; the CLI prints it and exits with 2."""


class RequestError(SerinusError):
    """One request is at fault; the engine goes on.

    `status` is the HTTP status, `kind` the OpenAI-style error type.
    """

    status: int = 400
    kind: str = "invalid_request_error"


class BadRequest(RequestError):
    """A field of a request is wrong: which field, which value, what was expected."""

    def __init__(self, field: str, value: Any, expected: str) -> None:
        super().__init__(f"{field}: got {shown(value)}, expected {expected}")
        self.field = field
        self.value = value
        self.expected = expected

    def rename(self, field: str) -> None:
        """Say it of `field`, the name that the client has for what this error is about."""
        self.field = field
        self.args = (f"{field}: got {shown(self.value)}, expected {self.expected}",)


class BadSampling(BadRequest):
    """A sampling parameter is out of its range or of the wrong type."""


class PromptTooLong(BadRequest):
    """The prompt (plus what must be generated) does not fit the context or the KV pool."""

    code: str | None = "context_length_exceeded"

    def __init__(self, field: str, value: Any, expected: str, *, context: int | None) -> None:
        """`context`: tokens that one sequence may have, said in the words by which clients of OpenAI's API know this
        error; None = the bound is another one, of this endpoint alone."""
        known = "" if context is None else f". This model's maximum context length is {context} tokens"
        super().__init__(field, value, expected + known)
        if context is None:
            self.code = None


class UnknownModel(RequestError):
    """The request names a model that this server does not serve."""

    status = 404
    kind = "not_found_error"
    code = "model_not_found"
    field = "model"


class Unauthorized(RequestError):
    """The API key is missing or wrong."""

    status = 401
    kind = "authentication_error"


class RateLimited(RequestError):
    """The API key of the request has as much as it may have now."""

    status = 429
    kind = "rate_limit_error"
    code = "rate_limit_exceeded"

    def __init__(self, message: str, retry_s: float = 1.0) -> None:
        """`retry_s`: seconds after which it may be tried again."""
        super().__init__(message)
        self.headers = ((b"retry-after", str(max(1, math.ceil(retry_s))).encode()),)


class PeerError(SerinusError):
    """Another process is at fault: retry, reroute or recompute."""


class PeerGone(PeerError):
    """The other process ended, was cut off, or stopped answering."""


class TransferFailed(PeerError):
    """Pages were promised and did not arrive whole."""


class DigestMismatch(TransferFailed):
    """Pages arrived, but not the bytes that were sent."""


class LayoutMismatch(PeerError):
    """Two engines cannot exchange KV; the message names the field that differs."""


class FrameError(PeerError):
    """Bytes on the wire are no frame of ours; `reason` is the label it is counted under."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"wire: {reason}{': ' + detail if detail else ''}")
        self.reason = reason


class CapacityError(SerinusError):
    """No room now. Back-pressure (HTTP 503), never a crash."""

    status: int = 503
    kind: str = "overloaded_error"


class TooLate(CapacityError):
    """A request cannot end by its deadline: it is refused before it costs anything."""

    status = 504
    kind = "timeout_error"


class OutOfMemory(SerinusError):
    """A step needs more memory than the machine, or the device, has. Its requests fail; the engine goes on."""


class StepAbandoned(SerinusError):
    """Another rank of the engine cannot go on with the step that this one computes. The next step is sound again."""


class KvViolation(SerinusError):
    """The canary saw KV that is not what was written."""


class InvariantError(SerinusError):
    """We broke our own promise. The engine stops, loudly, with the evidence in the message."""
