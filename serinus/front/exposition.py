"""The answer to a scrape: several Prometheus texts as one, in the format and the encoding that the client asks for."""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterable, Mapping

from prometheus_client.exposition import choose_encoder

from serinus.front.exchange import HttpExchange

_GZIP = re.compile(r"(?:^|,)\s*(?:gzip|x-gzip|\*)\s*(?:;\s*q=(?P<weight>[0-9.]+)\s*)?(?=,|$)", re.IGNORECASE)
_GZIP_LEVEL = 1
"""A text of series shrinks to a tenth at the lowest level already."""
_ASKED_CHARS_MAX = 1000
"""Of a header that says what a client takes."""


async def answer_scrape(exchange: HttpExchange, texts: Iterable[str]) -> None:
    """Answer with these Prometheus texts: as OpenMetrics and in gzip, where the request's headers ask for that.

    Cost: 2 us a series; gzip 1 ms for 100 kB.
    """
    _, content_type = choose_encoder(exchange.header("accept")[:_ASKED_CHARS_MAX])
    open_metrics = content_type.startswith("application/openmetrics-text")
    body = merge_expositions(texts, open_metrics=open_metrics).encode()
    exchange.headers.append((b"vary", b"accept, accept-encoding"))
    if _takes_gzip(exchange.header("accept-encoding")):
        body = gzip.compress(body, _GZIP_LEVEL)
        exchange.headers.append((b"content-encoding", b"gzip"))
    await exchange.reply(200, body, content_type.encode())


def _takes_gzip(accepted: str) -> bool:
    found = _GZIP.search(accepted[:_ASKED_CHARS_MAX])
    return found is not None and (found["weight"] or "1").strip("0.") != ""


def _open_metrics_head(head: Mapping[str, str]) -> list[str]:
    """The HELP and TYPE lines of a family as OpenMetrics has them: a counter's are named without `_total`."""
    _, _, family, kind = head.get("TYPE", "# TYPE  untyped").split(" ", 3)
    if kind == "counter" and family.endswith("_total"):
        bare = family.removesuffix("_total")
        return [line.replace(f" {family} ", f" {bare} ", 1) for line in head.values()]
    unknown = "untyped" if kind != "counter" else kind
    return [line.replace(f" {family} {unknown}", f" {family} unknown") for line in head.values()]


def merge_expositions(texts: Iterable[str], *, open_metrics: bool = False) -> str:
    """Join Prometheus texts of several processes into one valid text, of the same format or in OpenMetrics.

    All samples of a family stand together under one HELP and one TYPE line (the first that was seen), families in order
    of first appearance. Identical sample lines are kept once.
    """
    heads: dict[str, dict[str, str]] = {}
    samples: dict[str, dict[str, None]] = {}
    for text in texts:
        family = ""
        for line in text.splitlines():
            if line.startswith(("# HELP ", "# TYPE ")):
                _, kind, family, *_ = line.split(" ", 3)
                heads.setdefault(family, {}).setdefault(kind, line)
                samples.setdefault(family, {})
            elif line and not line.startswith("#"):
                name = line.split("{", 1)[0].split(" ", 1)[0]
                home = family if family and name.startswith(family) else name
                samples.setdefault(home, {})[line] = None
    lines: list[str] = []
    for family, rows in samples.items():
        head = heads.get(family, {})
        lines.extend(_open_metrics_head(head) if open_metrics else head.values())
        lines.extend(rows)
    if open_metrics:
        lines.append("# EOF")
    return "\n".join(lines) + "\n" if lines else ""
