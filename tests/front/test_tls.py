"""https: a server with a certificate, one that is replaced while it runs, and clients that trust it or do not."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from serinus.cli.bench.transport import Target, trace_request
from serinus.core.clock import WallClock
from serinus.core.errors import ConfigError
from serinus.core.settings import ServerSettings
from serinus.front import HttpServer, RouterSettings, create_router_app, server_tls
from serinus.front.tls import ServerTls
from serinus.front.upstream import NotConnected, fetch
from serinus.testing.fake_engine import FakeEngine
from serinus.testing.running_front import front_settings, running_front, serving

PLACE = Path(__file__).parent / "certificates"
FIRST, SECOND = (str(PLACE / f"{name}.crt") for name in ("first", "second"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    put(tmp_path, "first")
    return tmp_path


def put(folder: Path, name: str, *, ends: tuple[str, ...] = ("crt", "key")) -> None:
    for end in ends:
        shutil.copy(PLACE / f"{name}.{end}", folder / f"now.{end}.new")
        (folder / f"now.{end}.new").replace(folder / f"now.{end}")


def tls_of(folder: Path) -> ServerTls:
    tls = server_tls(ServerSettings(ssl_certfile=str(folder / "now.crt"), ssl_keyfile=str(folder / "now.key")))
    assert tls is not None
    return tls


@contextmanager
def engine_on_https(folder: Path, byte_folder: Path) -> Iterator[tuple[HttpServer, str]]:
    settings = front_settings(model_path=str(byte_folder), served_model_name="canary")
    engine = FakeEngine(endpoint=f"ipc://{folder}/engine", vocab_size=267, context_length=256)
    with running_front(settings, engine, tls=tls_of(folder)) as front:
        yield front.server, front.url


def shown_by(server: HttpServer) -> bytes:
    """The certificate that a new connection is shown."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection(("127.0.0.1", server.port)) as raw, context.wrap_socket(raw) as sock:
        return sock.getpeercert(binary_form=True) or b""


def der(path: str) -> bytes:
    return ssl.PEM_cert_to_DER_cert(Path(path).read_text())


@pytest.mark.slow
def test_answers_and_streams_come_over_https_behind_a_router_with_https(
    folder: Path, byte_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = {"prompt": "x", "max_tokens": 20, "temperature": 0}
    with engine_on_https(folder, byte_folder) as (_, url):
        assert url.startswith("https://")
        app = create_router_app(RouterSettings(decode_urls=(url,), poll_s=0.05, ssl_ca_certs=FIRST))
        with serving(app, tls=tls_of(folder)) as router:
            target = f"https://127.0.0.1:{router.port}"
            trusting = ssl.create_default_context(cafile=FIRST)
            with httpx.Client(base_url=target, verify=trusting, timeout=30) as http:
                while http.get("/health").status_code != 200:  # until the router has looked at its engine
                    pass
                answer = http.post("/v1/completions", json=ask)
                assert answer.status_code == 200, answer.text
                streamed = http.post("/v1/completions", json={**ask, "stream": True}).text
                assert streamed.endswith("data: [DONE]\n\n")
                assert streamed.count("data: ") > 10
            monkeypatch.setenv("SSL_CERT_FILE", FIRST)  # what the system trusts is read when a context is made
            from serinus.front import tls

            tls._client_tls.cache_clear()
            trace = asyncio.run(trace_request(Target.from_url(target), "GET", "/health", b"", WallClock(), s_max=10))
            assert (trace.status, trace.failure) == (200, "")
            tls._client_tls.cache_clear()


@pytest.mark.slow
def test_a_client_refuses_a_certificate_that_it_does_not_trust(folder: Path, byte_folder: Path) -> None:
    with engine_on_https(folder, byte_folder) as (_, url):
        for ca_certs in ("", SECOND):
            with pytest.raises(NotConnected, match="certificate"):
                asyncio.run(fetch(url, "GET", "/health", s_max=10, ca_certs=ca_certs))
        assert asyncio.run(fetch(url, "GET", "/health", s_max=10, ca_certs=FIRST))[0] == 200


@pytest.mark.slow
def test_a_certificate_that_is_replaced_is_shown_to_new_connections(folder: Path, byte_folder: Path) -> None:
    with engine_on_https(folder, byte_folder) as (server, _):
        assert shown_by(server) == der(FIRST)
        put(folder, "second")
        while shown_by(server) != der(SECOND):
            pass


def test_files_that_do_not_fit_each_other_change_nothing(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    tls = tls_of(folder)
    put(folder, "second", ends=("crt",))
    assert not tls.refresh(10.0)
    assert "the old one stays" in caplog.text
    assert not tls.refresh(20.0)  # and it is said once
    assert caplog.text.count("the old one stays") == 1
    (folder / "now.key").unlink()
    assert not tls.refresh(30.0)
    put(folder, "second")
    assert not tls.refresh(30.5)  # looked at a moment ago
    assert tls.refresh(31.5)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"ssl_certfile": "/nowhere.crt"}, "No such file"),
        ({"ssl_certfile": FIRST}, "expected a certificate and its key"),
        ({"ssl_certfile": FIRST, "ssl_keyfile": SECOND.replace("crt", "key")}, "expected a certificate and its key"),
    ],
)
def test_a_wrong_certificate_is_refused_at_the_start(change: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        server_tls(ServerSettings(**change))
    with pytest.raises(ConfigError, match="--ssl-certfile as well"):
        ServerSettings(ssl_keyfile=FIRST)
    with pytest.raises(ConfigError, match="--ssl-ca-certs '/nowhere'"):
        RouterSettings(decode_urls=("https://a:1",), ssl_ca_certs="/nowhere")
