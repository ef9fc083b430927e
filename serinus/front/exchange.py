"""One HTTP request and its answer over plain ASGI: bodies with a limit, JSON, server-sent events.

Also the OpenAI form of every error. Knows nothing of models or engines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, Literal, TypeVar

import msgspec
from starlette.types import Message, Receive, Scope, Send

from serinus.core.errors import CapacityError, PeerError, RequestError, SerinusError
from serinus.core.ids import new_rid
from serinus.core.json_line import one_line
from serinus.core.request import Share
from serinus.front.proofs import TOKENS_HEADER
from serinus.front.tracing import RequestSpan

_ENCODER = msgspec.json.Encoder()
_T = TypeVar("_T")

REQUEST_ID_HEADER = "x-request-id"
"""Names a request in its answer and in the logs of all that it passed through; the client's own, or one made here."""
_REQUEST_ID_MAX = 128
UNAVAILABLE: Final = "service_unavailable"
"""The `code` of errors with status 503; of those of a stream nothing else says the status."""
CHUNK_WRITER = "serinus.write_chunk"
"""In a connection's ASGI state: what sends a piece of an answer in chunks, and says whether it could. A shorter way."""


class ClientGone(SerinusError):
    """The client hung up before its answer was complete."""


class BodyTooLarge(RequestError):
    """The request body is larger than the server takes (413)."""

    status = 413


class ErrorInfo(msgspec.Struct):
    """What went wrong, in OpenAI's form."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(msgspec.Struct):
    """The body of every error."""

    error: ErrorInfo
    type: Literal["error"] | msgspec.UnsetType = msgspec.UNSET
    """Of /v1/messages, as Anthropic has it."""


def error_json(message: str, kind: str, *, param: str | None = None, code: str | None = None) -> bytes:
    """{"error": {"message", "type", "param", "code"}}."""
    return _ENCODER.encode(ErrorAnswer(ErrorInfo(message, kind, param, code)))


def error_of(err: SerinusError) -> tuple[int, bytes]:
    """HTTP status and JSON of an error."""
    status, kind = 500, "internal_server_error"
    if isinstance(err, (RequestError, CapacityError)):
        status, kind = err.status, err.kind
    elif isinstance(err, PeerError):
        status, kind = 503, "service_unavailable_error"
    code = getattr(err, "code", UNAVAILABLE if status == 503 else None)
    return status, error_json(str(err), kind, param=getattr(err, "field", None), code=code)


def error_at(path: str, error: bytes) -> bytes:
    """An error in the form of its endpoint: those of Anthropic's begin with a type."""
    return b'{"type":"error",' + error[1:] if path.startswith("/v1/messages") else error


def flat_error(error: dict[str, Any]) -> dict[str, Any]:
    """The fields of the event `error` of /v1/responses but for its number: flat, as OpenAI documents them, and the
    object itself, which its package raises."""
    code = error["code"] or error["type"]
    return {"type": "error", "code": code, "message": error["message"], "param": error["param"], "error": error}


def header_of(scope: Scope, name: str) -> str:
    """A request header (`name` in lower case); empty where it is missing."""
    wanted = name.encode("latin-1")
    return next((str(value, "latin-1") for key, value in scope["headers"] if key == wanted), "")


def request_id_of(scope: Scope) -> str:
    """The client's x-request-id; a new one where it sent none, or none that belongs into a log."""
    given = header_of(scope, REQUEST_ID_HEADER)
    fits = given.isascii() and given.isprintable() and len(given) <= _REQUEST_ID_MAX
    return given if given and fits else new_rid()


class HttpExchange:
    """One request. Handlers read it with `body`, answer once with `json`, `text` or `open_stream` + `push` + `end`."""

    __slots__ = (
        "_receive",
        "_send",
        "_write_chunk",
        "answered",
        "body_bytes_max",
        "headers",
        "path",
        "request_id",
        "rid",
        "scope",
        "share",
        "span",
        "started",
        "status",
        "tells_tokens",
        "tokens",
        "watcher",
    )

    def __init__(self, scope: Scope, receive: Receive, send: Send, *, body_bytes_max: int) -> None:
        self.scope = scope
        self._receive = receive
        self._send = send
        self._write_chunk: Callable[[bytes], bool] | None = None
        self.body_bytes_max = body_bytes_max
        self.path: str = scope["path"]
        self.status = 0
        """Status that was sent; 0 before."""
        self.started = False
        """Whether the answer has begun: from then on an error can only end a stream."""
        self.answered = False
        """Whether more of it was sent than a stream's head and what keeps the connection alive."""
        self.request_id = request_id_of(scope)
        self.rid = ""
        """Id of the request in the engine; empty while there is none."""
        self.share = Share()
        """The API key that it came with."""
        self.span: RequestSpan | None = None
        """Its part of a trace; None where nothing is traced."""
        self.tokens: Callable[[], int] | None = None
        """Tokens of prompt and answer so far; None where there are none, or they are not known."""
        self.tells_tokens = False
        """Whether the answer says them: to a router of ours."""
        self.watcher: asyncio.Task[None] | None = None
        self.headers: list[tuple[bytes, bytes]] = []
        """Headers of the answer, besides those that every answer has."""
        self.headers.append((REQUEST_ID_HEADER.encode(), self.request_id.encode()))

    def header(self, name: str) -> str:
        """A request header (`name` in lower case); empty where it is missing."""
        return header_of(self.scope, name)

    @property
    def query(self) -> str:
        """The raw query string."""
        return str(self.scope.get("query_string", b""), "latin-1")

    async def body(self) -> bytes:
        """The whole request body. Raises BodyTooLarge, ClientGone."""
        limit = self.body_bytes_max
        declared = self.header("content-length")
        if declared.isdigit() and int(declared) > limit:
            raise BodyTooLarge(f"body: got {declared} bytes, expected at most {limit}")
        parts: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone("front: the client hung up while sending its request")
            part: bytes = message.get("body", b"")
            size += len(part)
            if size > limit:
                raise BodyTooLarge(f"body: got more than {limit} bytes, expected at most {limit}")
            parts.append(part)
            if not message.get("more_body", False):
                return parts[0] if len(parts) == 1 else b"".join(parts)

    def watch(self, gone: Callable[[], None]) -> None:
        """Call `gone` when the client hangs up; to be called after the body was read. Ends with `unwatch`."""
        self.watcher = asyncio.get_running_loop().create_task(self._watch(gone))

    async def _watch(self, gone: Callable[[], None]) -> None:
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                gone()
                return

    def unwatch(self) -> None:
        """Stop watching the client."""
        if self.watcher is not None:
            self.watcher.cancel()
            self.watcher = None

    async def reply(self, status: int, body: bytes, content_type: bytes) -> None:
        """The whole answer at once."""
        self.status, self.started, self.answered = status, True, True
        if self.tells_tokens and self.tokens is not None:
            self.headers.append((TOKENS_HEADER.encode(), str(self.tokens()).encode()))
        sized = [(b"content-type", content_type), (b"content-length", str(len(body)).encode()), *self.headers]
        await self._send({"type": "http.response.start", "status": status, "headers": sized})
        await self._send({"type": "http.response.body", "body": body})

    async def json(self, value: Any, status: int = 200) -> None:
        """Answer with JSON; bytes are taken as encoded already."""
        body = value if isinstance(value, bytes) else _ENCODER.encode(value)
        await self.reply(status, body, b"application/json")

    async def text(self, text: str) -> None:
        await self.reply(200, text.encode(), b"text/plain; charset=utf-8")

    async def open_stream(self) -> None:
        """Begin a stream of server-sent events."""
        self.status, self.started = 200, True
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
            *self.headers,
        ]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        if self.scope["http_version"] == "1.1" and self.scope["method"] != "HEAD":  # then the body is sent in chunks
            self._write_chunk = self.scope.get("state", {}).get(CHUNK_WRITER)

    def pushed(self, events: bytes) -> bool:
        """Send events that are framed already (`data: ...` and a blank line each) where that needs no waiting; False:
        they are left to `push`."""
        self.answered = True
        return self._write_chunk is not None and self._write_chunk(events)

    async def push(self, events: bytes) -> None:
        """Send events, when the client has taken what came before."""
        self.answered = True
        await self.keep_alive(events)

    async def keep_alive(self, comment: bytes) -> None:
        """Send lines of a stream that are no event."""
        if self._write_chunk is None or not self._write_chunk(comment):
            message: Message = {"type": "http.response.body", "body": comment, "more_body": True}
            await self._send(message)

    async def kept_alive(self, news: Awaitable[_T], every_s: float, comment: bytes) -> _T:
        """What `news` brings; while that takes long, a stream is opened and `comment` sent every so many seconds."""
        task = asyncio.ensure_future(news)
        try:
            while not (await asyncio.wait((task,), timeout=every_s))[0]:
                if not self.started:
                    await self.open_stream()
                await self.keep_alive(comment)
            return task.result()
        finally:
            task.cancel()

    async def end(self, last: bytes = b"") -> None:
        """End the stream, with `last` as its last bytes."""
        if self.tells_tokens and self.tokens is not None:
            last += f": {TOKENS_HEADER} {self.tokens()}\n\n".encode()
        await self._send({"type": "http.response.body", "body": last})

    async def fail(self, err: SerinusError) -> None:
        """Answer with an error; where the answer has begun, end the stream with an error event."""
        status, body = error_of(err)
        if not self.started:
            if status == 401:
                self.headers.append((b"www-authenticate", b"Bearer"))
            self.headers.extend(getattr(err, "headers", ()))
            await self.reply(status, error_at(self.path, body), b"application/json")
        else:
            await self.end_failed(status, error_at(self.path, body))

    async def end_failed(self, status: int, body: bytes) -> None:
        """End a stream that has begun with an error; clients of Anthropic's skip events that have no name, those of
        /v1/responses go by the type."""
        self.status, body = status, one_line(body)
        if self.path.startswith("/v1/messages"):
            await self.end(b"event: error\ndata: " + body + b"\n\n")
        elif self.path.startswith("/v1/responses"):
            data = one_line(_ENCODER.encode(flat_error(msgspec.json.decode(body)["error"])))
            await self.end(b"event: error\ndata: " + data + b"\n\n")
        else:
            await self.end(b"data: " + body + b"\n\ndata: [DONE]\n\n")
