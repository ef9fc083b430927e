"""The dashboard and the alerts against a scrape of engines with ranks, tiers and a canary that found a fault."""

from __future__ import annotations

from pathlib import Path

import pytest

from serinus.testing.servers import Server
from tests.deploy.promql import faults, queries, scraped

from .cluster import HTTP, generate, until, url_of
from .conftest import HANDS_OVER, small

pytestmark = pytest.mark.proof
SELDOM = {
    "serinus:num_recomputed_requests_total",
    "serinus:num_bootstrap_failed_reqs_total",
    "serinus:num_transfer_failed_reqs_total",
    "serinus:wire_bad_frames_total",
    "serinus:wire_connections_cut_total",
    "serinus:api_key_tokens_total",
    "serinus:router_circuit_open",
    "serinus:swa_token_usage",
}
"""What a sound cluster with one dense model and no keys does not show: tests/deploy holds it against the code alone."""


def test_every_query_finds_its_series_in_a_real_scrape(checkpoint: Path) -> None:
    words = ("--kv-canary", "heal", "--kv-canary-perturb-api", "--enable-hierarchical-cache", "--decode-tp-size", "2")
    with Server("up", str(checkpoint), "--prefill", "1", "--decode", "1", *words, *HANDS_OVER, *small()) as server:
        plan = {"perturb": {"real_kv_used": 1.0}, "target": "full", "count": 1, "seconds": 60}
        order = HTTP.post(f"{url_of(server.url, 'decode-0')}/canary/perturb", json=plan)
        assert order.status_code == 200, order.text
        for start in range(24):  # more KV than the device has, so that some leaves it
            generate(server.url, [5 + (start * 31 + i * 7) % 300 for i in range(300)], 12)
        generate(server.url, [5 + i * 7 % 300 for i in range(300)], 4)
        until(lambda: "kv_canary_heals" in HTTP.get(f"{server.url}/metrics").text, "a heal")
        series = scraped(HTTP.get(f"{server.url}/metrics").text)
    assert sum(len(each) for each in series.values()) > 500
    missing = [fault for query in queries() for fault in faults(query, series)]
    for name in SELDOM - set(series):
        missing = [fault for fault in missing if not fault.endswith(name) and f"which {name} has not" not in fault]
    assert not missing, "\n".join(missing)
