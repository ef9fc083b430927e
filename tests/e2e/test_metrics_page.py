"""docs/METRICS.md against scrapes of a cluster: every family that is shown stands there, with its kind and labels."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from serinus.testing.servers import Server

from .cluster import HTTP, generate

pytestmark = pytest.mark.slow
PAGE = Path(__file__).parents[2] / "docs" / "METRICS.md"
COMMON = {"engine", "role", "rank", "tp_rank", "pp_rank", "le"}


def listed() -> dict[str, tuple[str, set[str]]]:
    """Kind and own labels of each family of the page."""
    found = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        row = re.fullmatch(r"\| `(\S+)`(?: \(also `(\S+)`\))? \| (\w+) \| (.*?) \| .* \|", line)
        if row:
            for name in filter(None, (row[1], row[2])):
                found[name] = (row[3], set(re.findall(r"`(\w+)`", row[4])))
    return found


def test_every_family_of_a_scrape_stands_on_the_page_with_its_kind_and_labels(cluster: Server) -> None:
    generate(cluster.url, list(range(60)), 4)
    assert HTTP.post(f"{cluster.url}/generate", json={"nothing": 1}).status_code == 400
    text, page = HTTP.get(f"{cluster.url}/metrics").text, listed()
    kinds = dict(re.findall(r"^# TYPE (\S+) (\w+)$", text, re.MULTILINE))
    assert len(kinds) > 80
    assert {name: page[name][0] if name in page else "missing" for name in kinds} == kinds
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        name = line.split("{")[0]
        family = name if name in page else re.sub(r"_(bucket|sum|count)$", "", name)
        assert set(re.findall(r'[{,](\w+)="', line)) - COMMON == page[family][1], line
    for name in ("time_to_first_token_seconds", "kv_transfer_latency_ms", "router_requests_total"):
        assert f"serinus:{name}" in kinds, "the cluster was to show this"
