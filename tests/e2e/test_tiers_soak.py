"""The soak of the tiers (tests/e2e/soak.py), at a size that fits the suite."""

from __future__ import annotations

from pathlib import Path

import pytest

from .soak import POLICIES, Ask, checkpoint_of, make_load, soak, without_cache

pytestmark = pytest.mark.proof

Expected = tuple[Path, list[Ask], list[list[int] | None]]


@pytest.fixture(scope="module", params=["gemma3_text"])
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Expected:
    """A model with both parts, a load, and what an engine without a cache answers."""
    folder = tmp_path_factory.mktemp("soak")
    checkpoint = checkpoint_of(request.param, folder)
    asks = make_load(100, seed=1)
    return checkpoint, asks, without_cache(checkpoint, asks)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_answer_is_that_of_an_engine_without_a_cache(policy: str, reference: Expected) -> None:
    checkpoint, asks, expected = reference
    report = soak("gemma3_text", policy, checkpoint, checkpoint.parent / "kv", asks, expected)
    assert report.requests == len(asks)
    assert not report.wrong
