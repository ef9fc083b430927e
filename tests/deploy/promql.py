"""Queries of the dashboard and of the alerts, taken apart by a PromQL parser and held against series."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import promql_parser
import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
ALERTS = DEPLOY / "prometheus/alerts.yaml"
OF_PROMETHEUS = {"instance", "job"}
"""Labels that the scraper adds."""
Series = Mapping[str, Sequence[Mapping[str, str]]]
"""Labels of the series of each name; of a series that is only declared the values are empty."""


@dataclass(frozen=True, kw_only=True)
class Query:
    """One query, and where it stands."""

    where: str
    text: str
    legend: str = ""

    @property
    def tree(self) -> Any:
        """Parsed, with values for Grafana's variables. Raises ValueError."""
        text = self.text.replace("$__rate_interval", "5m").replace("$__range", "1h")
        return promql_parser.parse(re.sub(r'"\$\w+"', '".*"', text))


def panels() -> list[dict[str, Any]]:
    """The panels of the dashboard, rows aside."""
    board = json.loads((DEPLOY / "grafana/serinus.json").read_text())
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def queries() -> list[Query]:
    """Those of all panels and alerts."""
    found = [
        Query(where=f"panel {panel['title']!r}", text=target["expr"], legend=target["legendFormat"])
        for panel in panels()
        for target in panel["targets"]
    ]
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    return found + [Query(where=f"alert {rule['alert']}", text=rule["expr"]) for rule in rules]


def inside(tree: Any) -> Iterator[Any]:
    """The parts of which a part of a query is made."""
    for name in ("lhs", "rhs", "expr", "param", "vector_selector"):
        if getattr(tree, name, None) is not None:
            yield getattr(tree, name)
    yield from getattr(tree, "args", None) or ()


def selectors(tree: Any) -> Iterator[Any]:
    """Every part `name{matchers}` of a query."""
    if isinstance(tree, promql_parser.VectorSelector):
        yield tree
    for part in inside(tree):
        yield from selectors(part)


def aggregates(tree: Any) -> Iterator[Any]:
    """Every `sum by (...) (...)` and the like."""
    if isinstance(tree, promql_parser.AggregateExpr):
        yield tree
    for part in inside(tree):
        yield from aggregates(part)


def faults(query: Query, series: Series) -> list[str]:
    """What a query names that these series do not have, in words."""
    found = []
    for selector in selectors(query.tree):
        there = series.get(selector.name or "", ())
        if not there:
            found.append(f"{query.where}: no series {selector.name}")
            continue
        for matcher in selector.matchers.matchers:
            values = {labels.get(matcher.name) for labels in there} - {None, ""}
            known = any(matcher.name in labels for labels in there) or matcher.name in OF_PROMETHEUS
            if not known:
                found.append(f"{query.where}: {selector.name} has no label {matcher.name}")
            elif values and not any(re.fullmatch(matcher.value, value or "") for value in values):
                found.append(f"{query.where}: no {selector.name} with {matcher.name} {matcher.value}, only {values}")
    kept: set[str] = set()
    for aggregate in aggregates(query.tree):
        labels = set(aggregate.modifier.labels) if aggregate.modifier is not None else set()
        kept |= labels
        for selector in selectors(aggregate.expr):
            there = series.get(selector.name or "", ())
            lacks = [label for label in labels - OF_PROMETHEUS if not any(label in own for own in there)]
            found += [f"{query.where}: by {label}, which {selector.name} has not" for label in lacks]
    if not set(re.findall(r"{{(\w+)}}", query.legend)) <= kept:
        found.append(f"{query.where}: legend {query.legend!r} of {kept}")
    return found


def scraped(text: str) -> dict[str, list[dict[str, str]]]:
    """The series of a Prometheus text."""
    series: dict[str, list[dict[str, str]]] = {}
    for line in text.splitlines():
        row = re.fullmatch(r"([\w:]+)(?:{(.*)})? \S+", line)
        if row:
            series.setdefault(row[1], []).append(dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', row[2] or "")))
    return series
