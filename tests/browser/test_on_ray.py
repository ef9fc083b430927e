"""The dashboard of a router that an actor of a Ray cluster hosts, in a real browser."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.ray_group import KEY, ray_group

from .conftest import MODEL, opened, traffic
from .test_dashboard import GENERATED, HEARD

pytestmark = [pytest.mark.proof, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]
SETTINGS = (
    "--prefill", "1", "--decode", "1", "--threads", "1", "--max-total-tokens", "4096", "--page-size", "8",
    "--disaggregation-min-tokens", "8", "--served-model-name", "canary",
)  # fmt: skip


def test_the_page_of_any_node_shows_the_engines_of_all(chromium: Any) -> None:
    with ray_group(MODEL, *SETTINGS, nodes=1) as group:
        engines, routers = group.engines(), group.routers()
        assert len({each["node"] for each in engines.values()}) == 2, "each engine has a node of its own"
        for url in routers.values():
            with opened(chromium, url, f"#key={KEY}") as shown, traffic(url, streams=1):
                shown.until(f"{HEARD} === 2")
                shown.until("document.querySelector('#words').textContent.startsWith('KV sound: ')")
                names = "[...window.serinus.model.engines.values()].map((e) => e.name).sort().join()"
                assert shown.page.evaluate(names) == ",".join(sorted(engines))
                before = shown.page.evaluate(GENERATED)
                shown.until(f"{GENERATED} > {before} + 50")
                shown.until("document.querySelectorAll('#pools canvas').length === 2")
                shown.page.click("#tab-handoffs")
                shown.page.wait_for_selector("#pane-handoffs .piece-taken", timeout=60_000, state="attached")
                shown.check()
