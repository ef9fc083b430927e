"""A cluster with a canary that takes orders of faults, and a headless browser before its dashboard."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import sync_playwright

import serinus
from serinus.core.clock import WallClock
from serinus.testing.servers import Server

MODEL = Path(serinus.__file__).parent / "cli" / "demo" / "model"
SETTINGS = (
    "--max-total-tokens", "16384", "--page-size", "8", "--kv-canary", "heal", "--kv-canary-perturb-api",
    "--kv-canary-sweep-seconds", "60", "--served-model-name", "canary", "--admin-api-key", "admin",
    "--disaggregation-min-tokens", "8",
)  # fmt: skip
CLOCK = WallClock()
ADMIN = {"authorization": "Bearer admin"}


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """The system's Chromium under playwright, which has an event loop of its own until the module ends.

    Fails, in words, where it is not there: `make proof` installs it."""
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert path is not None, (
        "no chromium on this machine, expected `apt-get install chromium` (root) to have put one here"
    )
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def up() -> Iterator[Server]:
    """Router, one prefill and one decode engine, with the model of the demo."""
    with Server("up", str(MODEL), "--prefill", "1", "--decode", "1", *SETTINGS, timeout_s=240) as server:
        yield server


class Page:
    """A page of the dashboard, and all that its browser complained of."""

    def __init__(self, page: Any, url: str, query: str = "#key=admin") -> None:
        self.page = page
        self.complaints: list[str] = []
        self.asked: set[str] = set()
        page.on("console", lambda m: self.complaints.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self.asked.add(request.url))
        self.url = url
        page.goto(f"{url}/dashboard{query}")

    def until(self, script: str, timeout_s: float = 90.0) -> None:
        """Look at the page until an expression is true; it allows no evaluation of its own."""
        end = CLOCK.now() + timeout_s
        while not self.page.evaluate(script):
            assert CLOCK.now() < end, f"not true within {timeout_s} s: {script}; the headline: {self.headline()}"
            self.page.wait_for_timeout(100)

    def headline(self) -> str:
        return str(self.page.inner_text("#words"))

    def check(self) -> None:
        """Nothing was complained of, and nothing asked for elsewhere."""
        assert not self.complaints, self.complaints
        away = {url for url in self.asked if not url.startswith((self.url, "data:"))}
        assert not away, away


@contextmanager
def opened(chromium: Any, url: str, query: str = "#key=admin", **context: Any) -> Iterator[Page]:
    """The dashboard in a browser of its own."""
    made = chromium.new_context(viewport={"width": 1440, "height": 1000}, **context)
    try:
        yield Page(made.new_page(), url, query)
    finally:
        made.close()


@contextmanager
def traffic(url: str, *, streams: int = 2) -> Iterator[None]:
    """Requests with a common beginning, without a pause, until left."""
    stop = threading.Event()
    head = " ".join(f"The {color} door is number {n}." for n in range(12) for color in ("blue", "red"))

    def ask(stream: int) -> None:
        with httpx.Client(base_url=url, timeout=120) as http:
            number = 0
            while not stop.is_set():
                number += 1
                prompt = f"{head} And now question {number} of stream {stream}, which nobody has asked before:"
                body = {"model": "canary", "prompt": prompt, "max_tokens": 60, "ignore_eos": True}
                try:
                    http.post("/v1/completions", json=body)
                except httpx.HTTPError:
                    stop.wait(0.2)  # an engine is being restarted

    threads = [threading.Thread(target=ask, args=(stream,)) for stream in range(streams)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(130)
