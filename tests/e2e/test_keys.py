"""Keys, shares, priorities and certificates as operators meet them: real processes, https, files that are replaced."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import ssl
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from serinus.core.clock import WallClock
from serinus.testing.servers import Server

from .cluster import until
from .conftest import HANDS_OVER, small

pytestmark = [pytest.mark.slow, pytest.mark.proof]
CLOCK = WallClock()
CERTIFICATES = Path(__file__).parents[1] / "front" / "certificates"
KEYS: tuple[dict[str, Any], ...] = (
    {"name": "flood", "key": "sk-flood"},
    {"name": "guest", "key": "sk-guest"},
    {"name": "few", "key": "sk-few", "requests_per_minute": 2},
)


def put(target: Path, text: str | Path) -> None:
    """A file in its place at once."""
    new = target.with_suffix(".new")
    if isinstance(text, Path):
        shutil.copy(text, new)
    else:
        new.write_text(text)
    new.replace(target)


def put_keys(folder: Path, keys: tuple[dict[str, Any], ...]) -> str:
    put(folder / "keys", "\n".join(map(json.dumps, keys)))
    return str(folder / "keys")


def put_certificate(folder: Path, name: str) -> tuple[str, ...]:
    for end in ("key", "crt"):
        put(folder / f"now.{end}", CERTIFICATES / f"{name}.{end}")
    return ("--ssl-certfile", str(folder / "now.crt"), "--ssl-keyfile", str(folder / "now.key"))


def shows(server: Server, name: str) -> bool:
    """Whether a new connection is shown this certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection(("127.0.0.1", server.port)) as raw, context.wrap_socket(raw) as sock:
        shown = sock.getpeercert(binary_form=True)
    return shown == ssl.PEM_cert_to_DER_cert((CERTIFICATES / f"{name}.crt").read_text())


def client(server: Server, *names: str) -> httpx.Client:
    """One that trusts these certificates. Each question has a connection of its own."""
    trusting = ssl.create_default_context(cafile=CERTIFICATES / f"{names[0]}.crt")
    for name in names[1:]:
        trusting.load_verify_locations(CERTIFICATES / f"{name}.crt")
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.Client(base_url=f"https://127.0.0.1:{server.port}", verify=trusting, timeout=120, limits=limits)


def ask(http: httpx.Client, key: str, prompt: list[int], count: int, priority: int = 0) -> tuple[int, float]:
    """Status of one /generate call, and when it came."""
    sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, "priority": priority}
    answer = http.post("/generate", json=body, headers={"authorization": f"Bearer {key}"})
    return answer.status_code, CLOCK.now()


def waiting(http: httpx.Client) -> float:
    text = http.get("/metrics").text
    names = ("serinus:num_queue_reqs{", "serinus:num_decode_prealloc_queue_reqs{")
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(names))


@pytest.mark.parametrize("prefill", ["0", "1"])
def test_up_on_https_shares_by_key_orders_by_priority_and_takes_new_files(
    checkpoint: Path, tmp_path: Path, prefill: str
) -> None:
    words = ["up", str(checkpoint), *HANDS_OVER, *small(), *put_certificate(tmp_path, "first"), "--prefill", prefill]
    words += ["--api-keys-file", put_keys(tmp_path, KEYS), "--schedule-policy", "priority"]
    words += ["--max-running-requests", "1", "--admin-api-key", "root"]
    with Server(*words) as server, client(server, "first", "second") as http, ThreadPoolExecutor(40) as pool:
        assert http.post("/generate", json={"input_ids": [1]}).status_code == 401
        assert ask(http, "sk-none", [1], 1)[0] == 401
        assert ask(http, "root", list(range(40)), 3)[0] == 200
        assert [ask(http, "sk-few", [1], 1)[0] for _ in range(3)] == [200, 200, 429]
        # One key floods the queue; another one's request is served after those that run, not after all.
        flood = [pool.submit(ask, http, "sk-flood", [number, 7], 120) for number in range(24)]
        until(lambda: waiting(http) >= 12, "the flood waits")
        guest = pool.submit(ask, http, "sk-guest", [400, 7], 5)
        status, came = guest.result()
        ends = sorted(each.result() for each in flood)
        assert {each[0] for each in ends} == {status} == {200}
        assert sum(each[1] > came for each in ends) >= 8, "the guest was served behind the flood"
        # Two classes of load of one key: the important one overtakes.
        low = [pool.submit(ask, http, "sk-flood", [number, 8], 240, 5) for number in range(16)]
        until(lambda: waiting(http) >= 8, "the less important ones wait")
        high = [pool.submit(ask, http, "sk-flood", [number, 9], 5, 0) for number in range(4)]
        last = max(each.result()[1] for each in high)
        assert all(each.result()[0] == 200 for each in (*low, *high))
        assert sum(each.result()[1] > last for each in low) >= 4, "the important ones were served behind the others"
        # Files that are replaced, with and without a signal.
        put_keys(tmp_path, (*KEYS, {"name": "new", "key": "sk-new"}))
        until(lambda: ask(http, "sk-new", [1], 1)[0] == 200, "the new key opens")
        put_keys(tmp_path, KEYS)
        server.process.send_signal(signal.SIGHUP)
        server.wait_line("took 3 API keys")
        until(lambda: ask(http, "sk-new", [1], 1)[0] == 401, "the key that was removed is refused")
        assert shows(server, "first")
        put_certificate(tmp_path, "second")
        until(lambda: shows(server, "second"), "the new certificate is shown")
        assert ask(http, "sk-flood", [1], 1)[0] == 200
        text = http.get("/metrics").text
        assert 'key="guest"' in text
        assert "sk-" not in text
        assert "sk-" not in server.output
        assert server.stop() == 0


def test_serve_on_https_checks_keys_and_takes_a_new_certificate(checkpoint: Path, tmp_path: Path) -> None:
    words = ["serve", str(checkpoint), *small(), *put_certificate(tmp_path, "first")]
    with (
        Server(*words, "--api-keys-file", put_keys(tmp_path, KEYS)) as server,
        client(server, "first", "second") as http,
    ):
        assert [ask(http, "sk-few", [1], 1)[0] for _ in range(3)] == [200, 200, 429]
        put_certificate(tmp_path, "second")
        until(lambda: shows(server, "second"), "the new certificate is shown")
        put(tmp_path / "keys", "{broken")
        server.process.send_signal(signal.SIGHUP)
        server.wait_line("line 1: no JSON .* the old keys stay")
        assert ask(http, "sk-guest", [1], 1)[0] == 200
        assert server.process.poll() is None


def test_a_wrong_key_file_ends_the_command_before_anything_starts(checkpoint: Path, tmp_path: Path) -> None:
    path = put_keys(tmp_path, ({"name": "a", "key": "sk-a", "weight": -1},))
    for words in (("serve", str(checkpoint)), ("up", str(checkpoint)), ("router", "--decode", "http://127.0.0.1:9")):
        server = Server(*words, "--api-keys-file", path)
        try:
            assert "line 1: weight is -1" in server.wait_line("api-keys-file")
            assert server.process.wait(60) == 2
        finally:
            server.kill()
