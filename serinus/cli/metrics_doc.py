"""docs/METRICS.md, made from the metrics themselves. `serinus doctor --metrics-doc` prints it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from serinus.core.metrics import MetricSpec

_HEAD = """# Metrics

`GET /metrics` of an engine has its own series and those of its HTTP server; that of a router those of all engines and
its own. Stems and meanings are those of SGLang where it has them, under `serinus:`. A histogram has series with
`_bucket`, `_sum` and `_count` behind its name, and appears with its first observation. Series with labels of their own
appear with their first value.

This page is made by `serinus doctor --metrics-doc > docs/METRICS.md`; tests compare it with the code and with scrapes.
"""


def _rows(specs: Iterable[MetricSpec]) -> Iterator[str]:
    yield from ("| name | kind | labels | meaning |", "|---|---|---|---|")
    for spec in sorted(specs, key=lambda each: each.name):
        labels = ", ".join(f"`{label}`" for label in spec.labels)
        alias = f" (also `{spec.alias}`)" if spec.alias else ""
        yield f"| `{spec.series}`{alias} | {spec.kind} | {labels} | {spec.help} |"


def metrics_markdown() -> str:
    """The text of docs/METRICS.md."""
    from serinus.core.metrics import METRICS
    from serinus.front.metrics import FrontMetrics, HttpMetrics, RouterMetrics

    every = HttpMetrics(engine="", role="").specs
    known = {spec.name for spec in every}
    of_front = [spec for spec in FrontMetrics(engine="", role="").specs if spec.name not in known]
    of_router = [spec for spec in RouterMetrics(engine="").specs if spec.name not in known]
    lines = [_HEAD, "## Of an engine", "", "Labels of all: `engine`, `role`, `rank`, `tp_rank`, `pp_rank`.", ""]
    lines += [*_rows(METRICS), "", "## Of every HTTP server", ""]
    lines += ["Labels of all, here and below: `engine`, `role`, `rank`.", "", *_rows(every), ""]
    lines += ["## Of the HTTP server of an engine", "", *_rows(of_front), ""]
    lines += ["## Of a router", "", *_rows(of_router), ""]
    return "\n".join(lines)
