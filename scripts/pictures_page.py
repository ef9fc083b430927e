"""Makes the pictures of the dashboard, from a real run: docs/pictures/dashboard-*.png, light and dark.

    python scripts/pictures_page.py [docs/pictures]

`serinus up` with one prefill and one decode engine and the demo's model answers questions; then one fault is planted.
Needs Chromium (`apt-get install chromium`) and playwright (of the extra dev). Fails where the page has an error.
"""

from __future__ import annotations

import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
from playwright.sync_api import sync_playwright

import serinus
from serinus.core.rng import Rng
from serinus.testing.servers import Server

SETTINGS = (
    "--max-total-tokens", "16384", "--page-size", "8", "--kv-canary", "heal", "--kv-canary-perturb-api",
    "--kv-canary-sweep-seconds", "60", "--served-model-name", "canary", "--disaggregation-min-tokens", "8",
)  # fmt: skip
THINGS = ("door", "cabin", "gate", "chest", "tower", "garden")
BYTES_MAX = 300_000
_SOUND = "document.querySelector('#words').textContent.startsWith('KV sound: ')"
_STORY = "document.querySelector('.story').innerText.includes('the right answer left')"


def ask(url: str, stream: int, stop: threading.Event) -> None:
    """One client that asks about its things, one question after the other."""
    rng, turn = Rng(stream), 0
    facts = " ".join(f"The {rng.choice(THINGS)} number {n} has the code {rng.randrange(9999)}." for n in range(40))
    with httpx.Client(base_url=url, timeout=120) as http:
        while not stop.is_set():
            turn += 1
            prompt = f"{facts[: 600 + 200 * (turn % 4)]} What opens the {rng.choice(THINGS)}? It is question {turn}."
            body = {"model": "canary", "prompt": prompt, "max_tokens": 20 + rng.randrange(90), "ignore_eos": True}
            http.post("/v1/completions", json=body)
            stop.wait(rng.random())


def until(page: Any, script: str, seconds: int = 90) -> None:
    """Look at the page until an expression is true."""
    for _ in range(10 * seconds):
        if page.evaluate(script):
            return
        page.wait_for_timeout(100)
    raise AssertionError(f"pictures: not true within {seconds} s: {script}")


def take(page: Any, folder: Path, name: str, scheme: str) -> None:
    """One picture, in both schemes in turn."""
    page.emulate_media(color_scheme=scheme)
    page.wait_for_timeout(1500)
    file = folder / f"dashboard-{name}-{scheme}.png"
    page.screenshot(path=str(file))
    size = file.stat().st_size
    assert size < BYTES_MAX, f"pictures: {file} has {size} bytes, expected less than {BYTES_MAX}"
    print(f"{file}: {size // 1000} kB")


def main() -> None:
    """Start the engines, ask, take the pictures."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/pictures")
    folder.mkdir(parents=True, exist_ok=True)
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("pictures: no chromium on this machine, expected `apt-get install chromium`")
    model = Path(serinus.__file__).parent / "cli" / "demo" / "model"
    stop = threading.Event()
    complaints: list[str] = []
    with Server("up", str(model), *SETTINGS, timeout_s=300) as up, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1360, "height": 920})
        page.on("console", lambda m: complaints.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(f"{up.url}/dashboard")
        clients = [threading.Thread(target=ask, args=(up.url, stream, stop)) for stream in range(3)]
        for client in clients:
            client.start()
        try:
            page.wait_for_timeout(45_000)
            until(page, _SOUND)
            for scheme in ("light", "dark"):
                for tab in ("map", "tree", "requests", "handoffs"):
                    page.click(f"#tab-{tab}")
                    take(page, folder, tab, scheme)
            order = {"perturb": {"real_kv_used": 1.0}, "role": "decode", "count": 1, "seconds": 60}
            httpx.post(f"{up.url}/canary/perturb", json=order, timeout=60).raise_for_status()
            page.click("#tab-incidents")
            page.wait_for_selector(".story li.planted", timeout=90_000)
            until(page, _STORY)
            for scheme in ("light", "dark"):
                take(page, folder, "incident", scheme)
        finally:
            stop.set()
            for client in clients:
                client.join(130)
        browser.close()
    assert not complaints, complaints


if __name__ == "__main__":
    main()
