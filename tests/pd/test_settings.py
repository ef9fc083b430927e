"""Settings of the handoff machines: what makes no sense, or cannot be safe, is refused at birth."""

from __future__ import annotations

import pytest

from serinus.core.errors import ConfigError
from serinus.pd import Capabilities, Fence, Mode
from tests.pd.tiny import make_settings


def test_settings_that_make_no_sense_are_refused() -> None:
    wrong: list[dict[str, object]] = [
        {"vocab_size": 0}, {"piece_bytes_max": 65 << 20}, {"backends": ("carrier pigeon",)}, {"park_tokens": -1},
        {"silence_s_max": 0.5}, {"backends": ()}, {"handoff_s_max": 0.0}, {"abort_s_max": 0.0},
    ]  # fmt: skip
    for changes in wrong:
        with pytest.raises(ConfigError):
            make_settings("d", 1, **changes)


def test_a_backend_that_can_push_and_cannot_fence_is_refused_at_birth() -> None:
    unsafe = Capabilities(mode=Mode.PUSH)
    with pytest.raises(ConfigError, match="cannot cut one off"):
        make_settings("d", 1, backends=("x",), capabilities={"x": unsafe})
    for safe in (Capabilities(mode=Mode.PUSH, fence=Fence.CLOSE), Capabilities(mode=Mode.PULL)):
        assert make_settings("d", 1, backends=("x",), capabilities={"x": safe}).capabilities_of("x") == safe
