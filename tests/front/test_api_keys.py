"""API keys with names, weights and limits: the file, what is refused of it and of requests, and routers."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from serinus.core.clock import WallClock
from serinus.core.errors import ConfigError, RateLimited
from serinus.core.request import Share
from serinus.front import KeyFile
from serinus.front.key_file import ApiKey
from serinus.front.key_limits import KeyLimits
from serinus.front.proofs import SHARE, proof_of
from serinus.testing.fake_engine import FakeEngine
from serinus.testing.running_front import RunningFront, front_settings, running_front
from serinus.wire.messages import Generate

CLOCK = WallClock()
ASK = {"prompt": "x" * 10, "max_tokens": 5, "temperature": 0}


def write(path: Path, *lines: dict[str, Any] | str) -> str:
    """A key file, put in its place at once."""
    new = path.with_suffix(".new")
    new.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    new.replace(path)
    return str(path)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def shares_of(front: RunningFront) -> list[Share]:
    asked = front.engine.of(Generate)
    return [each.request.share for each in asked if isinstance(each, Generate)]


def value_of(http: httpx.Client, series: str) -> float:
    text = http.get("/metrics").text
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(series.split("{")[0])
               and all(part in line for part in series.partition("{")[2].rstrip("}").split(",")))  # fmt: skip


# ---- the file -----------------------------------------------------------------------------------------------------


def test_a_key_is_found_by_itself_or_by_its_hash_and_is_kept_nowhere(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"sk-two").hexdigest()
    one = {"name": "one", "key": "sk-one", "weight": 2, "tokens_per_minute": 9, "max_queued_requests": 3}
    keys = KeyFile(write(tmp_path / "keys", "# ours", one, "", {"name": "two", "sha256": digest}))
    assert keys.find("sk-one") == ApiKey(name="one", weight=2.0, tokens_per_minute=9, max_queued_requests=3)
    assert keys.find("sk-two") == ApiKey(name="two")
    assert keys.find("sk-three") is None
    assert keys.find(digest) is None
    assert "sk-one" not in repr(vars(keys))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2: no JSON"),
        ("[1]", "line 2: got no object"),
        ({"name": "a"}, "line 2: key and sha256 are not given"),
        ({"name": "a", "key": "k", "sha256": "0" * 64}, "line 2: key and sha256 are both given"),
        ({"name": "a", "sha256": "F" * 64}, "line 2: sha256 is"),
        ({"name": "a", "key": "my key "}, "line 2: key is no text"),
        ({"name": "a", "key": 7}, "line 2: key is no text"),
        ({"key": "k"}, "line 2: name is None"),
        ({"name": "a b", "key": "k"}, "line 2: name is 'a b'"),
        ({"name": "a", "key": "k", "weight": 0}, "line 2: weight is 0, expected a number from 0.001"),
        ({"name": "a", "key": "k", "weight": True}, "line 2: weight is True"),
        ({"name": "a", "key": "k", "requests_per_minute": -1}, "line 2: requests_per_minute is -1"),
        ({"name": "a", "key": "k", "tokens_per_minute": 1.5}, "line 2: tokens_per_minute is 1.5"),
        ({"name": "a", "key": "k", "rpm": 5}, "line 2: field 'rpm' is unknown"),
        ({"name": "first", "key": "k"}, "line 2: name is that of line 1"),
        ({"name": "a", "key": "sk-secret"}, "line 2: key is that of line 1"),
    ],
)
def test_a_wrong_line_is_named_with_its_field_and_never_with_its_key(tmp_path: Path, line: Any, said: str) -> None:
    path = write(tmp_path / "keys", {"name": "first", "key": "sk-secret"}, line)
    for make in (KeyFile, lambda file: front_settings(api_keys_file=file)):
        with pytest.raises(ConfigError) as caught:
            make(path)
        assert said in str(caught.value)
        assert "sk-secret" not in str(caught.value)


def test_a_file_without_keys_or_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no key"):
        KeyFile(write(tmp_path / "keys", "# nothing"))
    with pytest.raises(ConfigError, match="No such file"):
        KeyFile(str(tmp_path / "nowhere"))


def test_a_file_that_changed_is_read_again_and_a_wrong_one_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys"
    keys = KeyFile(write(path, {"name": "a", "key": "old"}))
    write(path, {"name": "a", "key": "new"})
    assert keys.refresh(10.0)
    assert (keys.find("old"), keys.find("new")) == (None, ApiKey(name="a"))
    write(path, {"name": "a", "key": "newest", "weight": "much"})
    assert not keys.refresh(10.5)  # looked at a moment ago
    assert not keys.refresh(11.5)
    assert not keys.refresh(13.0)  # and it is said once
    assert caplog.text.count("line 1: weight is 'much'") == 1
    assert keys.find("new") is not None
    assert not keys.refresh(13.1, asked=True)
    path.unlink()
    assert not keys.refresh(20.0)
    assert keys.find("new") is not None


# ---- limits -------------------------------------------------------------------------------------------------------


def test_requests_and_tokens_come_back_with_time_and_debt_is_waited_for() -> None:
    limits, key = KeyLimits(), ApiKey(name="k", requests_per_minute=2, tokens_per_minute=600)
    held = limits.begin(key, 400, 0.0)
    assert held == 100
    limits.end(key, held, 1200)  # it cost more than there was: 600 tokens of debt, a minute
    with pytest.raises(RateLimited, match="tokens_per_minute = 600") as caught:
        limits.begin(key, 0, 30.0)
    assert dict(caught.value.headers)[b"retry-after"] in (b"30", b"31")
    held = limits.begin(key, 4, 60.2)
    limits.end(key, held, None)  # not known: what it held stays taken
    limits.begin(key, 0, 60.5)
    with pytest.raises(RateLimited, match="requests_per_minute = 2"):
        limits.begin(key, 0, 60.6)
    limits.begin(key, 0, 95.0)


def test_a_limit_that_a_key_gets_later_begins_full_whatever_it_used_before() -> None:
    limits, free = KeyLimits(), ApiKey(name="k")
    for number in range(1000):
        limits.end(free, limits.begin(free, 400, number / 10), 5000)
    limited = ApiKey(name="k", requests_per_minute=2, tokens_per_minute=600)
    for _ in range(2):
        limits.end(limited, limits.begin(limited, 4, 100.0), 1)
    with pytest.raises(RateLimited, match="requests_per_minute = 2"):
        limits.begin(limited, 4, 100.0)


def test_so_many_at_once_and_a_new_file_changes_limits_not_what_is_used() -> None:
    limits, key = KeyLimits(), ApiKey(name="k", max_concurrent_requests=2)
    held = [limits.begin(key, 0, 0.0) for _ in range(2)]
    with pytest.raises(RateLimited, match="2 requests being answered"):
        limits.begin(key, 0, 0.0)
    wider = ApiKey(name="k", max_concurrent_requests=3)
    limits.begin(wider, 0, 0.0)
    with pytest.raises(RateLimited):
        limits.begin(wider, 0, 0.0)
    limits.end(key, held[0], 1)
    assert limits.running_of("k") == 2
    limits.begin(wider, 0, 0.0)


# ---- a front ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_front_lets_keys_in_by_their_limits_and_tells_the_engine_whose_requests_are(
    tmp_path: Path, byte_folder: Path, new_endpoint: Callable[[], str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "serinus.front")
    path = tmp_path / "keys"
    write(
        path,
        {"name": "gold", "key": "sk-gold", "weight": 3, "max_queued_requests": 7},
        {"name": "two", "key": "sk-two", "requests_per_minute": 2},
    )
    settings = front_settings(model_path=str(byte_folder), api_keys_file=str(path), admin_api_key="root")
    with running_front(settings, FakeEngine(endpoint=new_endpoint(), vocab_size=267)) as front:
        assert front.post("/v1/completions", ASK).status_code == 401
        assert front.post("/v1/completions", ASK, **bearer("sk-none")).status_code == 401
        assert front.post("/v1/completions", ASK, **bearer("sk-gold")).status_code == 200
        assert front.post("/v1/completions", {**ASK, "stream": True}, **{"x-api-key": "sk-gold"}).status_code == 200
        assert front.post("/v1/completions", ASK, **bearer("root")).status_code == 200
        gold = Share(name="gold", weight=3.0, queued_max=7)
        assert shares_of(front) == [gold, gold, Share()]
        for status in (200, 200, 429):
            answer = front.post("/v1/completions", ASK, **bearer("sk-two"))
            assert answer.status_code == status
        error = answer.json()["error"]
        assert (error["code"], error["type"]) == ("rate_limit_exceeded", "rate_limit_error")
        assert 25 <= int(answer.headers["retry-after"]) <= 31
        assert front.http.get("/v1/models", headers=bearer("sk-two")).status_code == 200  # limits are of generation
        for key, status in (("sk-gold", 401), ("root", 200)):
            assert front.post("/flush_cache", {}, **bearer(key)).status_code == status
        assert value_of(front.http, 'serinus:api_key_requests_total{key="gold"}') == 2
        assert value_of(front.http, 'serinus:api_key_tokens_total{key="gold"}') == 2 * (10 + 5)
        assert value_of(front.http, 'serinus:api_key_refused_total{key="two",limit="requests_per_minute"}') == 1
        assert value_of(front.http, 'serinus:api_key_running_requests{key="two"}') == 0
        assert "sk-" not in front.http.get("/metrics").text
        assert "key: two" in caplog.text
        assert "sk-" not in caplog.text


@pytest.mark.slow
def test_operations_are_closed_where_there_is_a_file_and_no_admin_key(
    tmp_path: Path, byte_folder: Path, new_endpoint: Callable[[], str]
) -> None:
    path = write(tmp_path / "keys", {"name": "a", "key": "sk-a"})
    settings = front_settings(model_path=str(byte_folder), api_keys_file=path)
    with running_front(settings, FakeEngine(endpoint=new_endpoint(), vocab_size=267)) as front:
        for headers in ({}, bearer("sk-a"), bearer("x")):
            answer = front.http.post("/flush_cache", headers=headers)
            assert answer.status_code == 401
            assert "no --admin-api-key" in answer.json()["error"]["message"]
        assert front.http.get("/health").status_code == 200


@pytest.mark.slow
def test_a_front_refuses_more_requests_at_once_and_takes_a_new_file(
    tmp_path: Path, byte_folder: Path, new_endpoint: Callable[[], str]
) -> None:
    path = tmp_path / "keys"
    write(path, {"name": "a", "key": "sk-a", "max_concurrent_requests": 1})
    settings = front_settings(model_path=str(byte_folder), api_keys_file=str(path))
    engine = FakeEngine(endpoint=new_endpoint(), vocab_size=267, stall=True)
    with running_front(settings, engine) as front:
        first = threading.Thread(target=front.post, args=("/v1/completions", ASK), kwargs=bearer("sk-a"))
        first.start()
        engine.wait_for(lambda engine: bool(engine.running))
        answer = front.post("/v1/completions", ASK, **bearer("sk-a"))
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        write(path, {"name": "a", "key": "sk-b", "max_concurrent_requests": 2})
        while front.http.get("/v1/models", headers=bearer("sk-b")).status_code != 200:
            pass
        assert front.post("/v1/completions", ASK, **bearer("sk-a")).status_code == 401
        engine.let_go()
        assert front.post("/v1/completions", ASK, **bearer("sk-b")).status_code == 200
        first.join(60)


@pytest.mark.slow
@pytest.mark.parametrize(("secret", "status"), [("s", 200), ("wrong", 401), ("", 401)])
def test_a_share_is_said_by_a_router_never_by_a_client(
    tmp_path: Path, byte_folder: Path, new_endpoint: Callable[[], str], secret: str, status: int
) -> None:
    path = write(tmp_path / "keys", {"name": "a", "key": "sk-a"})
    settings = front_settings(model_path=str(byte_folder), api_keys_file=path, router_secrets=("", "s"))
    said = '{"name": "greedy", "weight": 1000.0, "queued_max": 0}'
    headers = {"x-serinus-share": said, "x-serinus-share-proof": proof_of(said, [secret], SHARE)}
    with running_front(settings, FakeEngine(endpoint=new_endpoint(), vocab_size=267)) as front:
        assert front.post("/v1/completions", ASK, **headers).status_code == status
        answer = front.post("/v1/completions", ASK, **headers, **bearer("sk-a"))
        assert answer.status_code == 200
        assert shares_of(front)[-1] == Share(
            name="greedy" if secret == "s" else "a", weight=1000.0 if secret == "s" else 1
        )
        assert ("x-serinus-tokens" in answer.headers) == (secret == "s")
        assert front.post("/flush_cache", {}, **headers).status_code == 401


# ---- a router -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_router_checks_and_counts_and_its_engines_hear_the_name_alone(
    route: Any, tmp_path: Path, streamed: bool, path: str
) -> None:
    file = write(
        tmp_path / "keys",
        {"name": "a", "key": "sk-a", "weight": 2, "tokens_per_minute": 40},
        {"name": "b", "key": "sk-b"},
    )
    ask: dict[str, Any] = {"max_tokens": 5, "temperature": 0, "stream": streamed}
    ask |= {"prompt": "x" * 10} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
    with route(1, 0, keys={"api_keys_file": file}) as running:
        assert running.http.post(path, json=ask).status_code == 401
        answer = running.http.post(path, json=ask, headers=bearer("sk-b"))
        assert answer.status_code == 200
        assert "x-serinus-tokens" not in answer.headers
        assert "serinus-tokens" not in answer.text
        if streamed:
            assert answer.text.endswith("data: [DONE]\n\n")
        (share,) = shares_of(running.decode[0])
        assert share == Share(name="b")
        counted = value_of(running.http, 'serinus:api_key_tokens_total{key="b",rank="front",role="router"}')
        (asked,) = running.decode[0].engine.of(Generate)
        assert counted == len(asked.request.prompt) + 5
        statuses = [running.http.post(path, json=ask, headers=bearer("sk-a")).status_code for _ in range(9)]
        assert statuses[0] == 200
        assert statuses[-1] == 429
        assert shares_of(running.decode[0])[1] == Share(name="a", weight=2.0)
        assert len(shares_of(running.decode[0])) == 1 + statuses.count(200)
