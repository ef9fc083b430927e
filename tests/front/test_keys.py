"""Which key opens which endpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from serinus.front.proofs import proof_of
from serinus.testing.fake_engine import FakeEngine
from serinus.testing.running_front import front_settings, running_front
from serinus.wire.messages import Generate

ASK = {"prompt": "x", "max_tokens": 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("api_key", "admin_key", "shown", "user_status", "admin_status"),
    [
        ("", "", "", 200, 200),
        ("", "", "Bearer any", 200, 200),
        ("k", "", "", 401, 401),
        ("k", "", "Bearer wrong", 401, 401),
        ("k", "", "k", 401, 401),
        ("k", "", "Basic k", 401, 401),
        ("k", "", "Bearer k", 200, 200),
        ("k", "", "bearer k", 200, 200),
        ("k", "a", "Bearer k", 200, 401),
        ("k", "a", "Bearer a", 200, 200),
        ("", "a", "", 200, 401),
        ("", "a", "Bearer a", 200, 200),
        ("ключ", "", "Bearer ÿ", 401, 401),
        ("k", "", "x-api-key k", 200, 200),
        ("k", "", "x-api-key wrong", 401, 401),
    ],
)
def test_keys_open_what_they_should(
    byte_folder: Path,
    new_endpoint: Callable[[], str],
    api_key: str,
    admin_key: str,
    shown: str,
    user_status: int,
    admin_status: int,
) -> None:
    settings = front_settings(model_path=str(byte_folder), api_key=api_key, admin_api_key=admin_key)
    name = "x-api-key" if shown.startswith("x-api-key") else "authorization"
    headers = httpx.Headers([(name, shown.removeprefix("x-api-key "))] if shown else [], encoding="latin-1")
    with running_front(settings, FakeEngine(endpoint=new_endpoint(), vocab_size=267)) as front:
        for path in ("/health", "/metrics", "/openapi.json"):
            assert front.http.get(path).status_code == 200
        answer = front.http.post("/v1/completions", json=ASK, headers=headers)
        assert answer.status_code == user_status
        assert front.http.get("/server_info", headers=headers).status_code == user_status
        assert front.http.post("/flush_cache", headers=headers).status_code == admin_status
        aborted = front.http.post("/abort_request", json={"rid": "x"}, headers=headers)
        assert aborted.status_code == admin_status
        if user_status == 401:
            assert answer.json()["error"]["type"] == "authentication_error"
            assert answer.headers["www-authenticate"] == "Bearer"
            assert not front.engine.running


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "known", "taken"),
    [
        ({}, "", False),
        ({}, "guess", False),
        ({"api_key": "k"}, "", False),
        ({"api_key": "k"}, "wrong", False),
        ({"api_key": "k"}, "k", True),
        ({"api_key": "k", "admin_api_key": "a"}, "k", False),
        ({"api_key": "k", "admin_api_key": "a"}, "a", True),
        ({"router_secrets": ("", "s")}, "", False),
        ({"router_secrets": ("", "s")}, "s", True),
        ({"router_secrets": ("c", "s"), "api_key": "k"}, "c", True),
        ({"prefill_addresses": ("tcp://10.0.0.1:9",)}, "", True),
        ({"prefill_addresses": ("tcp://10.0.0.2:9",)}, "", False),
    ],
)
def test_a_prefill_engine_is_named_by_a_router_or_by_the_operator_never_by_a_client(
    byte_folder: Path, new_endpoint: Callable[[], str], settings: dict[str, Any], known: str, taken: bool
) -> None:
    address = "tcp://10.0.0.1:9"
    key = settings.get("api_key", "none")
    headers = {"authorization": f"Bearer {key}", "x-serinus-prefill": address}
    headers["x-serinus-proof"] = proof_of(address, ["other", known]) if known else ""
    made = front_settings(model_path=str(byte_folder), **settings)
    with running_front(made, FakeEngine(endpoint=new_endpoint(), vocab_size=267)) as front:
        assert front.http.post("/v1/completions", json=ASK, headers=headers).status_code == 200
        (asked,) = front.engine.of(Generate)
        assert isinstance(asked, Generate)
        assert asked.request.prefill_address == (address if taken else "")
