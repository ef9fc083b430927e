"""Receipts of the canary in the answers of every endpoint, and the event that ends a stream with a wrong token."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from serinus.testing.fake_engine import FakeEngine
from serinus.testing.running_front import RunningFront, front_settings, running_front
from serinus.wire.messages import Abort

GREEDY: dict[str, Any] = {"model": "canary", "temperature": 0, "max_tokens": 5}


@pytest.fixture(scope="module")
def front(byte_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFront]:
    endpoint = f"ipc://{tmp_path_factory.mktemp('front')}/engine"
    engine = FakeEngine(
        endpoint=endpoint, vocab_size=267, context_length=256, kv_canary="heal", convicts=(66,), step_s=0.001
    )
    settings = front_settings(model_path=str(byte_folder), served_model_name="canary", engine="fake-0")
    with running_front(settings, engine) as running:
        yield running


def is_whole(receipt: dict[str, Any], horizon: int) -> bool:
    assert set(receipt) == {
        "coverage", "slots_due", "slots_checked", "horizon", "sources", "heals", "heal_reasons", "repaired_from",
        "chain_hash",
    }  # fmt: skip
    return receipt["horizon"] == horizon == sum(receipt["sources"].values())


def test_every_endpoint_shows_the_receipt(front: RunningFront) -> None:
    done = front.post("/v1/completions", {**GREEDY, "prompt": [1, 2, 3]}).json()
    assert is_whole(done["usage"]["kv_integrity"], 7)
    done = front.post("/v1/completions", {**GREEDY, "prompt": [[1, 2, 3], [4]]}).json()
    assert [is_whole(each, n) for each, n in zip(done["usage"]["kv_integrity"], (7, 5), strict=True)] == [True] * 2
    done = front.post("/generate", {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 4}}).json()
    assert is_whole(done["meta_info"]["kv_integrity"], 5)


@pytest.mark.parametrize("with_usage", [True, False])
def test_a_stream_of_openai_has_it_in_its_last_events(front: RunningFront, with_usage: bool) -> None:
    client = openai.OpenAI(base_url=front.url + "/v1", api_key="none")
    asked: dict[str, Any] = {"stream_options": {"include_usage": True}} if with_usage else {}
    chunks = list(client.completions.create(**GREEDY, prompt=[1, 2, 3], stream=True, **asked))
    last = [chunk for chunk in chunks if chunk.choices][-1]
    assert is_whole((last.choices[0].model_extra or {})["kv_integrity"], 7)
    assert all(chunk.choices for chunk in chunks[: len(chunks) - with_usage])
    if with_usage:
        assert chunks[-1].usage is not None
        assert is_whole((chunks[-1].usage.model_extra or {})["kv_integrity"], 7)


def test_an_answer_that_a_stop_text_ends_has_it_too(front: RunningFront) -> None:
    whole = front.post("/v1/completions", {**GREEDY, "prompt": "abc", "max_tokens": 8}).json()["choices"][0]["text"]
    body = {**GREEDY, "prompt": "abc", "max_tokens": 250, "stop": whole[3]}
    cut = whole[: whole.index(whole[3])]
    done = front.post("/v1/completions", body).json()
    assert done["choices"][0]["text"] == cut
    assert done["choices"][0]["finish_reason"] == "stop"
    assert "kv_integrity" in done["usage"]
    events = front.events("/v1/completions", {**body, "stream": True})
    assert "".join(event["choices"][0]["text"] for event in events) == cut
    assert "kv_integrity" in events[-1]["choices"][0]
    aborts = [message for message in front.engine.received if isinstance(message, Abort) and message.matched_stop]
    assert {(abort.silent, abort.kept) for abort in aborts} <= {(False, done["usage"]["completion_tokens"])}


def test_a_stream_with_a_wrong_token_ends_with_an_error_that_names_it(front: RunningFront) -> None:
    answer = front.post("/v1/completions", {**GREEDY, "prompt": [66, 1], "stream": True}).text
    last = answer.removesuffix("\n\ndata: [DONE]\n\n").rpartition("\n")[2].removeprefix("data: ")
    error = json.loads(last)["error"]
    assert (error["code"], error["param"]) == ("kv_integrity", "output[0]")
    client = openai.OpenAI(base_url=front.url + "/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.APIError, match="KV integrity"):
        list(client.completions.create(**GREEDY, prompt=[66, 1], stream=True))
