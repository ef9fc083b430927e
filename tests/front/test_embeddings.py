"""/v1/embeddings of an embedding model, before an engine whose hidden states are (3, tokens of the text): 3 of a last
token, 4 of a mean, 5 of a first token."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serinus.testing.fake_engine import FakeEngine
from serinus.testing.running_front import RunningFront, front_settings, running_front

MODULES = [{"path": "1_Pooling", "type": "x.Pooling"}, {"path": "2_Normalize", "type": "x.Normalize"}]


@pytest.fixture
def pooling() -> str:
    return "lasttoken"


@pytest.fixture
def embedder(
    byte_folder: Path, tmp_path: Path, new_endpoint: Callable[[], str], pooling: str
) -> Iterator[RunningFront]:
    folder = tmp_path / "embedder"
    shutil.copytree(byte_folder, folder)
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{pooling}": True}))
    (folder / "modules.json").write_text(json.dumps(MODULES))
    settings = front_settings(model_path=str(folder), served_model_name="canary")
    with running_front(settings, FakeEngine(endpoint=new_endpoint(), vocab_size=267)) as running:
        yield running


def test_texts_and_ids_are_embedded_in_their_order(embedder: RunningFront) -> None:
    texts = ["abcd", "a"]
    token_counts = embedder.post("/tokenize", {"prompt": texts}).json()["count"]
    for given, counts in ((texts, token_counts), ([[5, 6, 7], [9]], [3, 1])):
        answer = embedder.post("/v1/embeddings", {"model": "canary", "input": given}).json()
        assert [each["index"] for each in answer["data"]] == [0, 1]
        for each, count in zip(answer["data"], counts, strict=True):
            expected = np.array([3.0, count]) / np.hypot(3.0, count)
            assert each["embedding"] == pytest.approx(expected.tolist(), abs=1e-6)
        assert counts[0] > counts[1]
        assert answer["usage"] == {"prompt_tokens": sum(counts), "total_tokens": sum(counts)}


@pytest.mark.parametrize(("pooling", "about"), [("mean_tokens", 4.0), ("cls_token", 5.0)])
def test_the_engine_pools_as_the_checkpoint_says(embedder: RunningFront, about: float) -> None:
    (found,) = embedder.post("/v1/embeddings", {"model": "canary", "input": [[5, 6, 7]]}).json()["data"]
    assert found["embedding"] == pytest.approx([about / np.hypot(about, 3.0), 3.0 / np.hypot(about, 3.0)])


def test_fewer_dimensions_are_the_first_ones_of_length_1(embedder: RunningFront) -> None:
    (cut,) = embedder.post("/v1/embeddings", {"model": "canary", "input": "abcd", "dimensions": 1}).json()["data"]
    assert cut["embedding"] == [1.0]


def test_base64_holds_the_same_numbers(embedder: RunningFront) -> None:
    body = {"model": "canary", "input": "abcd"}
    (plain,) = embedder.post("/v1/embeddings", body).json()["data"]
    (packed,) = embedder.post("/v1/embeddings", {**body, "encoding_format": "base64", "dimensions": 2}).json()["data"]
    assert np.frombuffer(base64.b64decode(packed["embedding"]), "<f4").tolist() == pytest.approx(plain["embedding"])


@pytest.mark.parametrize(
    ("change", "field", "expected"),
    [
        ({"input": []}, "input", "a text, texts"),
        ({"input": ["x"] * 129}, "input", "at most 128 sequences"),
        ({"encoding_format": "int8"}, "encoding_format", "float or base64"),
        ({"dimensions": 0}, "dimensions", "1 to 2, the model's own"),
        ({"dimensions": 3}, "dimensions", "1 to 2, the model's own"),
        ({"input": [10**6]}, "input", "token ids from 0 to"),
    ],
)
def test_wrong_bodies_are_refused_by_field(
    embedder: RunningFront, change: dict[str, Any], field: str, expected: str
) -> None:
    answer = embedder.post("/v1/embeddings", {"input": "x", **change})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), answer.text
    assert expected in answer.json()["error"]["message"]
