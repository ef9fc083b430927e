"""A run of `serinus batch`: asks a server, writes each answer when it comes, and tells what came of it.

What has no answer is not written: the next run asks it again.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO, Final

import httpx

from serinus.cli.batch_file import BadLine, BatchLine, answer_line, bad_line, lines_of
from serinus.cli.own_server import OwnServer, own_server
from serinus.core.config import ServeConfig
from serinus.core.errors import ConfigError
from serinus.engine.progress import counted
from serinus.front import client_tls

_CONNECT_S_MAX: Final = 10.0
_TRIES: Final = 8
"""Of one request, where the server has no room or cannot be reached."""
_PAUSE_S: Final = 0.5
"""Before the second try; twice as long before each further one..."""
_PAUSE_S_MAX: Final = 10.0
"""The longest of these pauses."""
_NO_ROOM: Final = (429, 503)
_BAD_SHOWN_MAX: Final = 20


async def answer_all(
    config: ServeConfig, arguments: argparse.Namespace, total: int, answered: set[str], bad: set[int]
) -> int:
    """Answer the file of `arguments`, but for what `answered` and `bad` say is in the output; the exit code.

    Raises ConfigError: there is no server, or the engine does not come up.
    """
    async with _server(config, arguments) as (client, own):
        with (
            Path(arguments.output_file).open("ab") as out,
            counted("batch", total, show=not arguments.disable_tqdm) as advance,
        ):
            batch = _Batch(client, own, out, advance, answered, bad)
            await batch.answer(lines_of(arguments.input_file), arguments.max_concurrency)
    return batch.tell(arguments.output_file)


@asynccontextmanager
async def _server(
    config: ServeConfig, arguments: argparse.Namespace
) -> AsyncIterator[tuple[httpx.AsyncClient, OwnServer | None]]:
    """A client of the server that answers, and the server where it is our own. Raises ConfigError."""
    limits = httpx.Limits(max_connections=arguments.max_concurrency, max_keepalive_connections=None)
    timeout = httpx.Timeout(None, connect=_CONNECT_S_MAX)
    verify = client_tls(config.server.ssl_ca_certs) if arguments.url.startswith("https://") else False

    def client_of(url: str, key: str) -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return httpx.AsyncClient(
            base_url=url, headers=headers, limits=limits, timeout=timeout, trust_env=False, verify=verify
        )

    if not arguments.url:
        async with own_server(config) as own, client_of(own.url, own.api_key) as client:
            yield client, own
        return
    try:
        async with client_of(arguments.url, config.server.api_key) as client:
            there = await client.get("/v1/models", timeout=_CONNECT_S_MAX)
            if there.status_code != 200:
                raise ConfigError(
                    f"batch: {arguments.url}/v1/models answered {there.status_code}, expected 200"
                    f"{' with the right --api-key' * (there.status_code in (401, 403))}"
                )
            yield client, None
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise ConfigError(f"batch: --url is {arguments.url!r} ({error}), expected http://host:port") from None
    except httpx.TransportError as error:
        raise ConfigError(f"batch: no answer at {arguments.url} ({error}), expected a server") from None


class _Batch:
    """One run of `serinus batch`: what it asks, writes and counts."""

    def __init__(
        self, client: httpx.AsyncClient, own: OwnServer | None, out: IO[bytes], advance: Callable[[], None],
        answered: set[str], bad: set[int],
    ) -> None:  # fmt: skip
        self._client, self._own, self._out, self._advance = client, own, out, advance
        self._answered, self._bad_before = answered, bad
        self._statuses: Counter[int] = Counter()
        self._skipped = 0
        self._bad: list[BadLine] = []
        self._lost = ""
        """Why there is no server any more."""

    async def answer(self, lines: Iterator[BatchLine | BadLine], concurrency: int) -> None:
        """Answer all of them that have no answer yet, so many at a time."""
        await asyncio.gather(*(self._some(lines) for _ in range(concurrency)))

    async def _some(self, lines: Iterator[BatchLine | BadLine]) -> None:
        """Take lines, one after the other: all callers share them."""
        for line in lines:
            if isinstance(line, BadLine):
                self._bad.append(line)
                if line.number not in self._bad_before:
                    self._write(bad_line(line))
            elif line.custom_id in self._answered:
                self._skipped += 1
            else:
                await self._ask(line)
            if self._lost:
                return
            self._advance()

    async def _ask(self, line: BatchLine) -> None:
        why = ""
        for count in range(_TRIES):
            if self._own is not None and self._own.ending:
                why = self._own.ending
                break
            try:
                headers = {"content-type": "application/json"}
                answer = await self._client.post(line.url, content=line.body, headers=headers)
            except httpx.TransportError as error:
                why = f"{type(error).__name__}: {error}"
            else:
                if answer.status_code not in _NO_ROOM:
                    self._statuses[answer.status_code] += 1
                    request_id = answer.headers.get("x-request-id", "")
                    self._write(answer_line(line, answer.status_code, request_id, answer.content))
                    return
                why = f"it answered {answer.status_code}: {answer.text[:300]}"
            if self._lost:
                return
            await asyncio.sleep(min(_PAUSE_S * 2**count, _PAUSE_S_MAX))
        self._lost = self._lost or f"line {line.number} ({line.custom_id}) has no answer: {why}"

    def _write(self, row: bytes) -> None:
        self._out.write(row)
        self._out.flush()

    def tell(self, path: str) -> int:
        """Print what came of it; the exit code."""
        for line in self._bad[:_BAD_SHOWN_MAX]:
            print(f"batch: line {line.number}: {line.reason}", file=sys.stderr)
        if len(self._bad) > _BAD_SHOWN_MAX:
            print(f"batch: {len(self._bad) - _BAD_SHOWN_MAX} more bad lines", file=sys.stderr)
        errors = {status: count for status, count in sorted(self._statuses.items()) if status >= 400}
        failed = sum(errors.values())
        told = f"{self._statuses.total() - failed} answered, {failed} answered with an error"
        if errors:
            told += " (" + ", ".join(f"{count} times {status}" for status, count in errors.items()) + ")"
        print(f"batch: {told}, {self._skipped} had an answer already, {len(self._bad)} bad lines: {path}")
        if self._lost:
            print(f"batch: ended early: {self._lost}; the same command goes on from here", file=sys.stderr)
        return 1 if failed or self._bad or self._lost else 0
