"""Tokenizers, a front and a router that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from serinus.core.clock import WallClock
from serinus.front import HttpServer, RouterSettings, create_router_app
from serinus.front.router import Router
from serinus.testing.fake_engine import FakeEngine
from serinus.testing.running_front import RunningFront, front_settings, running_front, serving
from serinus.testing.small_tokenizers import make_byte_tokenizer
from serinus.text import Tokenizer, load_tokenizer

CLOCK = WallClock()


@pytest.fixture(scope="module", autouse=True)
def no_authorities(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Clients of httpx trust an empty folder: reading the authorities of the world takes each of them 65 ms."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_DIR", str(tmp_path_factory.mktemp("authorities")))
        yield


@pytest.fixture(scope="session")
def byte_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_byte_tokenizer(tmp_path_factory.mktemp("byte"))


@pytest.fixture
def new_endpoint(tmp_path: Path) -> Callable[[], str]:
    """A fresh ipc address each time."""
    count = iter(range(1000))
    return lambda: f"ipc://{tmp_path}/e{next(count)}"


@pytest.fixture(scope="module")
def front(byte_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFront]:
    """One front for a whole file; its engine answers at once."""
    folder = tmp_path_factory.mktemp("front")
    engine = FakeEngine(endpoint=f"ipc://{folder}/engine", vocab_size=267, context_length=256)
    settings = front_settings(
        model_path=str(byte_folder), served_model_name="canary", engine="fake-0", router_secrets=("a router's",)
    )
    with running_front(settings, engine) as running:
        yield running


@pytest.fixture(scope="session")
def tokenizer(byte_folder: Path) -> Tokenizer:
    return load_tokenizer(str(byte_folder))


class RunningRouter:
    """A router, its engines' fronts and a client."""

    def __init__(
        self, server: HttpServer, router: Router, decode: list[RunningFront], prefill: list[RunningFront]
    ) -> None:
        self.server = server
        self.router = router
        self.decode = decode
        self.prefill = prefill
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=30)

    def until(self, holds: Callable[[], bool]) -> None:
        """Ask /health until `holds`; the router looks at its engines meanwhile."""
        end = CLOCK.now() + 60
        while not holds():
            assert CLOCK.now() < end, "the router never came to see it so"
            self.http.get("/health")

    def alive(self) -> list[bool]:
        return [member.alive for member in self.router.fleet.members]


@pytest.fixture
def route(byte_folder: Path, new_endpoint: Callable[[], str]) -> Callable[..., Any]:
    """Makes a router before `decode` and `prefill` engines. `models`: names of theirs; `keys`: settings of engines and
    router alike; other keywords: of the router."""

    @contextmanager
    def make(
        decode: int,
        prefill: int,
        *,
        pd_address: str = "tcp://{}:1",
        keys: dict[str, Any] | None = None,
        stall: tuple[bool, ...] = (),
        models: tuple[str, ...] = (),
        keep_alive_s: float = 5.0,
        **more: Any,
    ) -> Iterator[RunningRouter]:
        fronts: dict[str, list[RunningFront]] = {"decode": [], "prefill": []}
        with ExitStack() as stack:
            for role, count in (("decode", decode), ("prefill", prefill)):
                for index in range(count):
                    name = f"{role}-{index}"
                    engine = FakeEngine(
                        endpoint=new_endpoint(),
                        engine=name,
                        role=role,
                        vocab_size=267,
                        pd_address=pd_address.format(name) if role == "prefill" else "",
                        stall=role == "decode" and index < len(stall) and stall[index],
                        context_length=100_000,
                        max_total_tokens=200_000,
                    )
                    settings = front_settings(
                        model_path=str(byte_folder),
                        served_model_name=models[index] if index < len(models) else "canary",
                        engine=name,
                        role=role,
                        keep_alive_s=keep_alive_s,
                        **{"router_secrets": ("a router's",), **(keys or {})},
                    )
                    fronts[role].append(stack.enter_context(running_front(settings, engine)))
            routed = RouterSettings(
                decode_urls=tuple(front.url for front in fronts["decode"]),
                prefill_urls=tuple(front.url for front in fronts["prefill"]),
                **{"poll_s": 0.02, "poll_s_max": 20.0, "router_secrets": ("a router's",), **(keys or {}), **more},
            )
            app = create_router_app(routed)
            with serving(app) as server:
                running = RunningRouter(server, app.state.router, fronts["decode"], fronts["prefill"])
                with running.http:
                    running.until(lambda: all(running.alive()))
                    yield running
                for front in (*fronts["decode"], *fronts["prefill"]):
                    front.server.stop(now=True)  # each takes 0.15 s: they end side by side

    return make
