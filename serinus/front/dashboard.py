"""/dashboard of an engine: the page, its stream of events, and what it shows of one thing that was clicked.

The engine is asked for frames while at least one page is open, by one task for all of them: with none it is asked for
nothing. The stream is bounded: a page that reads too slowly misses deltas and gets the whole state again.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from base64 import b64encode
from collections.abc import Callable, Iterator
from functools import cache
from importlib.resources import files
from typing import Any, Final
from urllib.parse import parse_qs

import msgspec

from serinus.core.errors import BadRequest, CapacityError, PeerError, RequestError
from serinus.core.version import package_version
from serinus.front.exchange import HttpExchange
from serinus.front.frames import FrameEncoder
from serinus.front.state import Front
from serinus.text import Tokenizer

PERIOD_S: Final = 0.5
"""Seconds between two frames."""
_ANSWER_S_MAX: Final = 600.0
"""A long step delays a frame, an engine that is gone says so."""
_RETRY_S: Final = 1.0
_LOOK_S: Final = 1.0
"""A stream without news looks so often whether this server ends..."""
_TEXTS, _NUMBERS = ("what", "tier", "part"), ("page", "node")
"""What a look may name."""
_NOTHING: Final = b": \n\n"
"""...and sends this, so that what is between does not take it for dead."""
_WAITING_MAX: Final = 8
"""Events that wait for one page at most."""
_PAGES_MAX: Final = 16
"""Pages that are open at one server at most."""
_ASSETS: Final = "assets"
_SCRIPTS: Final = ("model.js", "kv_map.js", "tree.js", "lanes.js", "story.js", "rates.js", "page.js")
_TEXT_TOKENS: Final = 512
"""Tokens of a prefix that are shown as text."""


class Subscription:
    """Events that wait for one page."""

    def __init__(self) -> None:
        self._events: list[bytes] = []
        self._news = asyncio.Event()
        self.lost = True
        """Deltas are of no use to it: it is to get the whole state."""
        self.closed = False
        """The page is gone."""

    def put(self, delta: bytes, whole: bytes) -> None:
        """What has changed, and what is then; the second is needed where the page is `lost`."""
        if self.lost:
            self._events, self.lost = [whole], False
        elif len(self._events) >= _WAITING_MAX:
            self._events, self.lost = [], True
        else:
            self._events.append(delta)
        self._news.set()

    def say(self, event: bytes) -> None:
        """In place of all that waits; then the whole state."""
        self._events, self.lost = [event], True
        self._news.set()

    def close(self) -> None:
        """The page is gone: `take` returns."""
        self.closed = True
        self._news.set()

    async def take(self, s_max: float) -> bytes:
        """All events since the last call; none once the page is gone, or where none came in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(s_max):
                while not self._events and not self.closed:
                    self._news.clear()
                    await self._news.wait()
        events, self._events = self._events, []
        return b"".join(events)


async def stream(exchange: HttpExchange, one: Subscription, stops: Callable[[], bool]) -> None:
    """Send what comes for a page until it is closed, or `stops` says that this server ends."""
    await exchange.body()
    exchange.watch(one.close)
    try:
        await exchange.open_stream()
        while not one.closed and not stops():
            await exchange.push(await one.take(_LOOK_S) or _NOTHING)
        if not one.closed:
            await exchange.end()
    finally:
        exchange.unwatch()


class DashboardFeed:
    """Frames of one engine for all open pages."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._pages: set[Subscription] = set()
        self._task: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def open(self) -> Iterator[Subscription]:
        """A page opens. Raises CapacityError: too many are open."""
        if len(self._pages) >= _PAGES_MAX:
            raise CapacityError(f"dashboard: {_PAGES_MAX} pages are open, expected less")
        one = Subscription()
        self._pages.add(one)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._ask())
        try:
            yield one
        finally:
            self._pages.discard(one)
            if not self._pages and self._task is not None:
                self._task.cancel()
                self._task = None

    async def page(self, exchange: HttpExchange) -> None:
        """The page itself, as one text."""
        await answer_page(exchange)

    async def events(self, exchange: HttpExchange) -> None:
        """The stream of events, until the page is closed or this server stops. Raises CapacityError."""
        with self.open() as one:
            await stream(exchange, one, lambda: self._front.client.draining)

    async def look(self, exchange: HttpExchange) -> None:
        """One page of KV, or one node of the tree with its text. Raises RequestError, EngineDown."""
        front = self._front
        order = msgspec.json.encode(_looked_at(exchange.query))
        reply = await front.client.call("look", s_max=front.settings.call_s_max, body=order)
        if not reply.ok:
            raise RequestError(reply.body.decode(errors="replace"))
        found = msgspec.json.decode(reply.body)
        tokenizer = await front.tokenizer_or_none()
        if "tokens" in found and tokenizer is not None:
            found["text"] = _shown_text(tokenizer, found["tokens"][:_TEXT_TOKENS])
            found["before_text"] = _shown_text(tokenizer, found["before"][-_TEXT_TOKENS:])
        await exchange.json(found)

    async def _ask(self) -> None:
        """While pages are open: ask for a frame, tell them, wait."""
        front, encoder = self._front, FrameEncoder({})
        incarnation, loop = 0, asyncio.get_running_loop()
        while True:
            began = loop.time()
            try:
                ready = front.ready
                if ready.incarnation != incarnation:
                    incarnation, encoder = ready.incarnation, FrameEncoder(_about(front))
                reply = await front.client.call("watch", s_max=_ANSWER_S_MAX)
                delta = encoder.take(reply.body, front.clock.unix(), ready.page_size)
            except (PeerError, msgspec.DecodeError) as error:
                loading = front.client.ready is None and not front.client.down
                for each in self._pages:
                    each.say(down_event(str(error), loading=loading))
                await asyncio.sleep(_RETRY_S)
                continue
            whole = encoder.whole() if any(each.lost for each in self._pages) else b""
            for each in self._pages:
                each.put(delta, whole)
            await asyncio.sleep(max(PERIOD_S / 2, began + PERIOD_S - loop.time()))


def _about(front: Front) -> dict[str, Any]:
    ready = front.ready
    return {
        "version": package_version(), "engine": ready.engine, "role": ready.role, "model": front.settings.model_name,
        "incarnation": str(ready.incarnation), "info": dict(ready.info), "context_length": ready.context_length,
    }  # fmt: skip


def down_event(why: str, *, loading: bool = False) -> bytes:
    """Says that there is no news of an engine, and why; `loading`: it has begun to start, and is on its way."""
    return b"data: " + msgspec.json.encode({"kind": "down", "why": why[:500], "loading": loading}) + b"\n\n"


@cache
def page_html() -> tuple[bytes, bytes]:
    """The whole page, markup, styles and scripts as one text that needs no other; and its Content-Security-Policy: the
    one script that it has, and nothing from anywhere else. Cost: reads some files, once."""
    folder = files("serinus.front") / _ASSETS
    read = {each.name: each.read_text("utf-8") for each in folder.iterdir() if each.name != "LICENSE-uPlot"}
    script = "\n".join((read["uPlot.iife.min.js"], *(read[name] for name in _SCRIPTS)))
    assert "</script" not in script, "front: a script of the page ends its element"
    whole = read["page.html"]
    for mark, text in (("/*styles*/", read["uPlot.min.css"] + read["page.css"]), ("/*scripts*/", script)):
        assert whole.count(mark) == 1, f"front: {mark} stands {whole.count(mark)} times in page.html, expected once"
        whole = whole.replace(mark, text)
    digest = b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; connect-src 'self';"
        " img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return whole.encode(), policy.encode()


async def answer_page(exchange: HttpExchange) -> None:
    """The page; it holds no data."""
    html, policy = page_html()
    exchange.headers += [
        (b"content-security-policy", policy), (b"cache-control", b"no-cache"), (b"referrer-policy", b"no-referrer"),
        (b"x-content-type-options", b"nosniff"),
    ]  # fmt: skip
    await exchange.reply(200, html, b"text/html; charset=utf-8")


def _looked_at(query: str) -> dict[str, str | int]:
    """What a query asks to look at, as the engine takes it. Raises BadRequest."""
    order: dict[str, str | int] = {}
    for name, (text, *_) in parse_qs(query).items():
        if name in _NUMBERS:
            if not (text.isdecimal() and len(text) < 10):
                raise BadRequest(name, text, "a number from 0 to 999999999")
            order[name] = int(text)
        elif name in _TEXTS:
            order[name] = text
        elif name != "engine":  # of a router
            raise BadRequest(name, text, f"no field but {', '.join((*_TEXTS, *_NUMBERS))}")
    if "what" not in order:
        raise BadRequest("what", None, "page or node")
    return order


def _shown_text(tokenizer: Tokenizer, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False)
