"""deploy/grafana against the schema that Grafana publishes for its dashboards and panels (grafana-foundation-sdk)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana" / "serinus.json"
pytestmark = pytest.mark.proof


def as_grafana_has_it(dashboard: dict[str, Any]) -> dict[str, Any]:
    """The dashboard once Grafana's types have read it, panels and queries by their plugins: without what these lack."""
    from grafana_foundation_sdk.cog import plugins
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.models.dashboard import Dashboard

    plugins.register_default_plugins()
    found: dict[str, Any] = json.loads(JSONEncoder(sort_keys=True).encode(Dashboard.from_json(dashboard)))
    return found


def lost(ours: Any, theirs: Any, path: str = "") -> list[str]:
    """Places of ours that Grafana does not have, or has otherwise; what it adds are its defaults."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        pairs = [(f"{path}/{key}", value, theirs.get(key)) for key, value in ours.items()]
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        pairs = [(f"{path}/{at}", a, b) for at, (a, b) in enumerate(zip(ours, theirs, strict=True))]
    else:
        return [] if ours == theirs else [path]
    return [place for where, a, b in pairs for place in lost(a, b, where)]


def test_grafana_reads_every_field_of_the_dashboard() -> None:
    ours = json.loads(DASHBOARD.read_text())
    assert len(ours["panels"]) > 40
    assert not lost(ours, as_grafana_has_it(ours))


@pytest.mark.parametrize(
    "place",
    [
        ("descripton",),
        ("panels", 1, "gridPos", "width"),
        ("panels", 1, "fieldConfig", "defaults", "units"),
        ("panels", 1, "options", "legend", "mode"),
        ("panels", 1, "targets", 0, "expression"),
    ],
)
def test_a_field_that_grafana_does_not_know_is_seen(place: tuple[str | int, ...]) -> None:
    ours = json.loads(DASHBOARD.read_text())
    inside = ours
    for step in place[:-1]:
        inside = inside[step]
    inside[place[-1]] = "wrong"
    assert lost(ours, as_grafana_has_it(ours)) == ["/" + "/".join(map(str, place))]
