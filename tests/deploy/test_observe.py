"""deploy/grafana, deploy/prometheus and docs/OBSERVE.md: each query means series that there are, with their labels."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from serinus.core.metrics import METRICS
from serinus.front.metrics import FrontMetrics, RouterMetrics
from tests.deploy.promql import Query, Series, faults, panels, queries, scraped

REPO = Path(__file__).parents[2]
UNIT_TESTS = Path(__file__).parent / "alerts_test.yaml"
"""promtool runs them in tests/extras."""
OF_ENGINE = ("engine", "role", "rank", "tp_rank", "pp_rank")


def declared() -> Series:
    """All series as the code declares them, with labels of unknown values. tests/e2e holds those against scrapes."""
    series: dict[str, list[dict[str, str]]] = {}
    specs = [(spec, OF_ENGINE) for spec in METRICS]
    for server in (FrontMetrics(engine="", role=""), RouterMetrics(engine="")):
        specs += [(spec, OF_ENGINE[:3]) for spec in server.specs]
    for spec, common in specs:
        for ending in ("_bucket", "_sum", "_count") if spec.kind == "histogram" else ("",):
            labels = (*common, *spec.labels, *("le" for _ in ending if ending == "_bucket"))
            series.setdefault(spec.series + ending, []).append(dict.fromkeys(labels, ""))
    return series


def test_every_query_means_series_and_labels_that_are_declared() -> None:
    asked = queries()
    assert len(asked) > 80
    assert not [fault for query in asked for fault in faults(query, declared())]


@pytest.mark.parametrize(
    ("text", "legend", "fault"),
    [
        ("rate(serinus:no_such_total[5m])", "", "no series serinus:no_such_total"),
        ('sum(serinus:pages{colour="red"})', "", "has no label colour"),
        ("sum by (cause) (rate(serinus:prompt_tokens_total[5m]))", "{{cause}}", "by cause, which"),
        ("sum by (engine) (serinus:token_usage)", "{{role}}", "legend"),
        ('serinus:token_usage{engine="b"}', "", "no serinus:token_usage with engine b"),
        ('1 - serinus:token_usage or (serinus:token_usage{part="x"})', "", "has no label part"),
    ],
)
def test_a_query_of_what_is_not_there_is_found(text: str, legend: str, fault: str) -> None:
    series = {**declared(), **scraped('serinus:token_usage{engine="a",role="decode"} 0.5')}
    found = faults(Query(where="here", text=text, legend=legend), series)
    assert [fault in each for each in found] == [True], found


def test_a_query_that_is_no_promql_is_refused() -> None:
    with pytest.raises(ValueError, match=r".+"):
        _ = Query(where="here", text="sum by (engine (serinus:token_usage)").tree


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of scripts/make_dashboard.py."""
    spec = importlib.util.spec_from_file_location("make_dashboard", REPO / "scripts/make_dashboard.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "make_dashboard", module)  # its dataclass looks there
    spec.loader.exec_module(module)
    return module


def test_dashboard_and_page_are_as_the_script_writes_them(script: ModuleType) -> None:
    assert script.rendered() == script.DASHBOARD.read_text(), "run python scripts/make_dashboard.py"
    text = script.PAGE.read_text()
    assert script.page(text) == text, "run python scripts/make_dashboard.py"


def test_panels_stand_beside_each_other_and_say_what_to_do() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + 7)}
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, f"{panel['title']} lies on another panel"
        taken |= cells
        assert panel["description"]
    titles = [panel["title"] for panel in panels()]
    assert len(set(titles)) == len(titles) > 35


def test_every_alert_has_a_unit_test() -> None:
    alerts = [query.where.removeprefix("alert ") for query in queries() if query.where.startswith("alert ")]
    assert len(alerts) > 12
    tests = UNIT_TESTS.read_text()
    assert not [name for name in alerts if name not in tests]
