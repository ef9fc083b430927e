"""What generation_config.json names holds for every request that does not name it, at every endpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serinus.core.sampling import SamplingParams
from serinus.testing.fake_engine import FakeEngine
from serinus.testing.running_front import RunningFront, front_settings, running_front
from serinus.wire.messages import Generate

DEFAULTS: dict[str, int | float] = {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.05, "max_new_tokens": 40}


@pytest.fixture(scope="module")
def tuned(byte_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFront]:
    """A front whose engine's checkpoint has defaults."""
    engine = FakeEngine(
        endpoint=f"ipc://{tmp_path_factory.mktemp('tuned')}/engine",
        vocab_size=267, context_length=256, eos_ids=(257, 3), sampling_defaults=DEFAULTS,
    )  # fmt: skip
    with running_front(front_settings(model_path=str(byte_folder), served_model_name="canary"), engine) as running:
        yield running


def asked(front: RunningFront, path: str, body: dict[str, Any]) -> SamplingParams:
    """What the engine is asked for."""
    assert front.post(path, body).status_code == 200
    last = front.engine.of(Generate)[-1]
    assert isinstance(last, Generate)
    return last.request.sampling


CHAT = {"messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize(
    ("path", "body", "length"),
    [
        ("/v1/completions", {"prompt": "x"}, 16),
        ("/v1/chat/completions", CHAT, 40),
        ("/generate", {"text": "x"}, 40),
        ("/v1/completions", {"prompt": "x", "max_tokens": 7}, 7),
        ("/v1/completions", {"prompt": "x", "max_tokens": 70}, 40),
        ("/v1/chat/completions", {**CHAT, "max_tokens": 70}, 40),
        ("/generate", {"text": "x", "sampling_params": {"max_new_tokens": 70}}, 40),
    ],
)
def test_defaults_of_the_checkpoint_hold_and_bound_the_length(
    tuned: RunningFront, path: str, body: dict[str, Any], length: int
) -> None:
    params = asked(tuned, path, body)
    assert (params.temperature, params.top_k, params.repetition_penalty, params.top_p) == (0.6, 20, 1.05, 1.0)
    assert params.max_new_tokens == length


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x", "temperature": 0, "top_k": -1, "top_p": 0.5}),
        ("/v1/chat/completions", {**CHAT, "temperature": 0, "top_k": -1, "top_p": 0.5}),
        ("/generate", {"text": "x", "sampling_params": {"temperature": 0, "top_k": -1, "top_p": 0.5}}),
    ],
)
def test_a_request_overrides_them(tuned: RunningFront, path: str, body: dict[str, Any]) -> None:
    params = asked(tuned, path, body)
    assert (params.temperature, params.top_k, params.top_p, params.repetition_penalty) == (0.0, -1, 0.5, 1.05)


def test_a_length_that_was_not_asked_for_is_cut_to_the_context(tuned: RunningFront) -> None:
    ids = [1] * 250
    answer = tuned.post("/generate", {"input_ids": ids, "sampling_params": {"ignore_eos": True}}).json()
    assert len(answer["output_ids"]) == 6
    refused = tuned.post("/generate", {"input_ids": ids, "sampling_params": {"max_new_tokens": 20}})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_new_tokens")


def test_people_can_read_them(tuned: RunningFront) -> None:
    info = tuned.http.get("/server_info").json()
    assert (info["sampling_defaults"], info["eos_ids"]) == (DEFAULTS, [257, 3])
    assert tuned.http.get("/get_model_info").json()["preferred_sampling_params"] == DEFAULTS
