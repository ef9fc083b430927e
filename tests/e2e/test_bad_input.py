"""Bad input, through real HTTP to a real engine: a clear 4xx that names field, value and expectation; nothing leaks."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from serinus.core.user_secret import user_secret
from serinus.front.proofs import proof_of
from serinus.testing.servers import Server

from .cluster import generate, idle
from .conftest import HANDS_OVER, small

pytestmark = pytest.mark.slow
LONG = list(range(300)) * 3


@pytest.fixture(scope="module")
def guarded(checkpoint: Path) -> Iterator[Server]:
    """One engine with a pool smaller than its context, behind keys and a small body limit."""
    words = ["serve", str(checkpoint), "--dtype", "float32", "--page-size", "8", "--max-total-tokens", "256"]
    keys = ["--api-key", "user", "--admin-api-key", "boss", "--max-body-bytes", "100000"]
    with Server(*words, *keys, "--served-model-name", "bird") as server:
        yield server


def post(server: Server, path: str, body: Any, key: str = "user") -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    if isinstance(body, bytes):
        return httpx.post(server.url + path, content=body, headers={**headers, "content-type": "application/json"})
    return httpx.post(server.url + path, json=body, headers=headers, timeout=120)


BAD: dict[str, tuple[str, Any, int, tuple[str, ...]]] = {
    "longer than the context": ("/generate", {"input_ids": LONG}, 400, ("input_ids", str(len(LONG)))),
    "longer than the pool": ("/generate", {"input_ids": LONG[:400]}, 400, ("400", "256")),
    "empty prompt": ("/v1/completions", {"model": "bird", "prompt": ""}, 400, ("prompt",)),
    "no prompt": ("/v1/completions", {"model": "bird"}, 400, ("prompt",)),
    "empty ids": ("/generate", {"input_ids": []}, 400, ("input_ids",)),
    "id too large": ("/generate", {"input_ids": [1, 100000]}, 400, ("input_ids", "100000")),
    "negative id": ("/generate", {"input_ids": [1, -5]}, 400, ("input_ids", "-5")),
    "no JSON": ("/v1/completions", b"{nope", 400, ("JSON",)),
    "wrong type": ("/v1/completions", {"model": "bird", "prompt": "a", "max_tokens": "many"}, 400, ("max_tokens",)),
    "NaN": ("/v1/completions", b'{"model":"bird","prompt":"a","temperature":NaN}', 400, ()),
    "negative": ("/v1/completions", {"model": "bird", "prompt": "a", "temperature": -1}, 400, ("temperature", "-1")),
    "top_p": ("/v1/completions", {"model": "bird", "prompt": "a", "top_p": 1.5}, 400, ("top_p", "1.5")),
    "n too large": ("/v1/completions", {"model": "bird", "prompt": "a", "n": 5000}, 400, ("n", "5000")),
    "max_tokens 0": ("/v1/completions", {"model": "bird", "prompt": "a", "max_tokens": 0}, 400, ("max_tokens", "0")),
    "unknown model": ("/v1/completions", {"model": "cat", "prompt": "a"}, 404, ("cat", "bird")),
    "bad UTF-8": ("/v1/completions", b'{"model":"bird","prompt":"\xff\xfe"}', 400, ()),
    "no messages": ("/v1/chat/completions", {"model": "bird", "messages": []}, 400, ("messages",)),
    "unknown path": ("/v1/nothing", {}, 404, ("/v1/nothing",)),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_requests_are_refused_in_words(guarded: Server, name: str) -> None:
    path, body, status, words = BAD[name]
    answer = post(guarded, path, body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert all(word in f"{error['message']} {error['param']}" for word in words), error
    code = {"longer": "context_length_exceeded", "unknown model": "model_not_found"}
    assert error["code"] == next((text for start, text in code.items() if name.startswith(start)), None)


@pytest.mark.parametrize("key", ["", "wrong", "boss-and-more"])
def test_a_wrong_or_missing_key_is_401(guarded: Server, key: str) -> None:
    answer = post(guarded, "/v1/completions", {"model": "bird", "prompt": "a"}, key)
    assert answer.status_code == 401
    assert "key" in answer.json()["error"]["message"].lower()


def test_flush_and_abort_want_the_admin_key(guarded: Server) -> None:
    assert post(guarded, "/flush_cache", {}).status_code == 401
    assert post(guarded, "/abort_request", {"abort_all": True}).status_code == 401
    assert post(guarded, "/flush_cache", {}, "boss").status_code == 200
    assert post(guarded, "/abort_request", {"abort_all": True}, "boss").status_code == 200


def test_a_huge_body_is_413(guarded: Server) -> None:
    assert post(guarded, "/generate", {"text": "x" * 200_000}).status_code == 413


def test_after_all_that_the_engine_serves_and_holds_nothing(guarded: Server) -> None:
    for path, body, _status, _words in BAD.values():
        post(guarded, path, body)
    answer = post(guarded, "/v1/completions", {"model": "bird", "prompt": "a bird", "max_tokens": 4})
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] in range(1, 5)
    idle(guarded.url)


def test_a_request_larger_than_what_is_left_of_the_pool_ends_with_length(guarded: Server) -> None:
    body = {"input_ids": list(range(200)), "sampling_params": {"max_new_tokens": 300, "ignore_eos": True}}
    answer = post(guarded, "/generate", body)
    assert answer.status_code == 200
    assert answer.json()["meta_info"]["finish_reason"]["type"] == "length"
    assert answer.json()["meta_info"]["completion_tokens"] < 300
    idle(guarded.url)


# ---- at start -------------------------------------------------------------------------------------------------------


def run(*words: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "serinus", *words], capture_output=True, text=True, timeout=240, stdin=subprocess.DEVNULL
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.proof
def test_a_broken_checkpoint_ends_the_start_with_its_reason(checkpoint: Path, tmp_path: Path) -> None:
    for file in checkpoint.iterdir():
        data = file.read_bytes()
        (tmp_path / file.name).write_bytes(data[:-100] if file.suffix == ".safetensors" else data)
    code, output = run("serve", str(tmp_path), "--port", "0")
    assert code == 2
    assert "safetensors" in output


@pytest.mark.proof
def test_engines_whose_weights_differ_in_one_bit_refuse_each_other_and_say_why(
    checkpoint: Path, tmp_path: Path
) -> None:
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    (file,) = tmp_path.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    prompt = [(5 * i) % 400 for i in range(60)]
    with (
        Server("serve", str(tmp_path), "--disaggregation-mode", "prefill", *small()) as prefill,
        Server("serve", str(checkpoint), "--disaggregation-mode", "decode", *HANDS_OVER, *small()) as decode,
    ):
        address = httpx.get(f"{prefill.url}/server_info").json()["pd_address"]
        body = {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 4}}
        headers = {"x-serinus-prefill": address, "x-serinus-proof": proof_of(address, [user_secret()])}
        answer = httpx.post(f"{decode.url}/generate", json=body, headers=headers, timeout=120)
        assert answer.status_code == 200
        assert answer.json()["meta_info"]["local_reason"] == "refused"
        line = decode.wait_line("prefill engine .* is refused")
        assert "layout differs in model" in line
        assert len(generate(decode.url, prompt, 4)["output_ids"]) == 4
