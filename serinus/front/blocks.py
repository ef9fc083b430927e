"""Answers as blocks (thoughts, text, calls), one after the other: what /v1/responses and /v1/messages have in common.

A renderer says what the beginning, the growth and the end of a block look like in its endpoint.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from serinus.core.errors import BadRequest, SerinusError
from serinus.core.ids import new_rid
from serinus.core.request import FinishReason
from serinus.front.calls import Call, Event, RequestFailed
from serinus.front.conversation import Conversation
from serinus.front.exchange import ClientGone, HttpExchange, error_of
from serinus.front.render import encode, stream
from serinus.front.schemas import ChatBody, OpenAiBody, refuse_unsupported
from serinus.front.state import Front
from serinus.text import AnswerDelta, DeltaKind, Tokenizer, ToolCall

_KINDS = {DeltaKind.CALL: DeltaKind.CALL, DeltaKind.ARGUMENTS: DeltaKind.CALL}


def fresh_id(prefix: str) -> str:
    """An id as agents know them: `prefix`, an underscore, 24 hexadecimal digits."""
    return new_rid(prefix).replace("-", "_")


@dataclass(slots=True)
class Block:
    """One of an answer."""

    kind: DeltaKind
    """REASONING, CONTENT or CALL."""
    place: int
    """Among the blocks of the answer, from 0 on."""
    item_id: str
    call_id: str = ""
    name: str = ""
    """Of the function, in a call."""
    parts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """What it holds: a text, or the arguments of a call."""
        return "".join(self.parts)


class BlockRenderer(ABC):
    """Renders the one answer to one request."""

    def __init__(self, front: Front, call: Call, chat: Conversation, tokenizer: Tokenizer) -> None:
        self.front = front
        self.tokenizer = tokenizer
        self.call = call
        self.chat = chat
        self.sequence = call.sequences[0]
        self.blocks: list[Block] = []
        self._reader = chat.any_reader(self.sequence)
        self.cut = False
        """Whether the answer has ended at its limit."""
        self._is_open = False
        self._begun = False

    # ---- what an endpoint says ----------------------------------------------------------------------------------

    @abstractmethod
    def begin(self) -> bytes:
        """The events before the first block."""

    @abstractmethod
    def opened(self, block: Block) -> bytes:
        """A block begins, empty."""

    @abstractmethod
    def grew(self, block: Block, text: str) -> bytes:
        """It has more text."""

    @abstractmethod
    def closed(self, block: Block) -> bytes:
        """The block has ended."""

    @abstractmethod
    def finished(self, reason: str) -> bytes:
        """The events after the last block; `reason`: OpenAI's finish_reason."""

    @abstractmethod
    def failed(self, error: dict[str, Any]) -> bytes:
        """The events by which a stream that has begun says what went wrong; `error`: in OpenAI's form."""

    @abstractmethod
    def whole(self, reason: str) -> dict[str, Any]:
        """The answer at once."""

    # ---- the answer ---------------------------------------------------------------------------------------------

    async def answer(self, exchange: HttpExchange, *, streamed: bool) -> None:
        """Answer the request. Raises what Call.events raises, as long as nothing was sent."""
        if not streamed:
            await self.call.run()
            self._take_whole(self._reader.parts(self.sequence.output.text))
            await exchange.json(self.whole(self._reason()))
            return
        try:
            keep_alive_s = self.front.settings.keep_alive_s
            await stream(self.call, exchange, self._rendered, keep_alive_s=keep_alive_s, done=b"")
        except ClientGone:
            raise
        except SerinusError as err:
            if not exchange.started:
                raise
            exchange.status, body = error_of(err)
            await exchange.end(self.failed(msgspec.json.decode(body)["error"]))

    def _reason(self) -> str:
        finish = self.sequence.finish
        assert finish is not None, "front: an answer that has not ended"
        if finish is FinishReason.ABORT:
            raise RequestFailed(self.sequence.error or "front: the request was aborted", 500)
        return self._reader.finish(finish)

    def _take_whole(self, parts: Sequence[AnswerDelta | ToolCall]) -> None:
        for part in parts:
            if isinstance(part, ToolCall):
                block = self._add(DeltaKind.CALL, part.index)
                block.name = part.name
                block.parts.append(part.arguments)
            else:
                same = bool(self.blocks) and self.blocks[-1].kind is part.kind
                (self.blocks[-1] if same else self._add(part.kind)).parts.append(part.text)
        if not self.blocks:
            self._add(DeltaKind.CONTENT)

    def _add(self, kind: DeltaKind, index: int = 0) -> Block:
        prefix = {DeltaKind.REASONING: "rs", DeltaKind.CONTENT: "msg", DeltaKind.CALL: "fc"}[kind]
        block = Block(kind, len(self.blocks), fresh_id(prefix))
        if kind is DeltaKind.CALL:
            block.call_id = self._reader.call_id(index)
        self.blocks.append(block)
        return block

    def _rendered(self, events: Sequence[Event]) -> bytes:
        out: list[bytes] = []
        for event in events:
            if not self._begun:
                self._begun = True
                out.append(self.begin())
            for delta in self._reader.feed(event):
                self._render(delta, out)
            if event.finish is not None:
                self.cut = event.finish is FinishReason.LENGTH
                if not self.blocks:
                    out.append(self._open(AnswerDelta(DeltaKind.CONTENT, "")))
                self._close(out)
                out.append(self.finished(self._reason()))
        return b"".join(out)

    def _render(self, delta: AnswerDelta, out: list[bytes]) -> None:
        kind = _KINDS.get(delta.kind, delta.kind)
        if delta.kind is DeltaKind.CALL_END:
            self._close(out)
            return
        if delta.kind is DeltaKind.CALL or not self._is_open or self.blocks[-1].kind is not kind:
            self._close(out)
            out.append(self._open(delta))
        if delta.kind is not DeltaKind.CALL:
            self.blocks[-1].parts.append(delta.text)
            out.append(self.grew(self.blocks[-1], delta.text))

    def _open(self, delta: AnswerDelta) -> bytes:
        block = self._add(_KINDS.get(delta.kind, delta.kind), delta.index)
        block.name = delta.text if delta.kind is DeltaKind.CALL else ""
        self._is_open = True
        return self.opened(block)

    def _close(self, out: list[bytes]) -> None:
        if self._is_open:
            self._is_open = False
            out.append(self.closed(self.blocks[-1]))

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of the thoughts."""
        return self._reader.thought_tokens(self.sequence.output.token_ids, self.tokenizer)


def chat_body(body: OpenAiBody, **fields: Any) -> ChatBody:
    """The chat that this body asks for: its own sampling fields, and `fields`. Raises BadRequest: more than one answer,
    or what chats do not support either."""
    if body.n not in (None, 1):
        raise BadRequest("n", body.n, "1 or nothing: there is one answer")
    shared = {name: getattr(body, name) for name in OpenAiBody.__struct_fields__}
    chat = ChatBody(**{**shared, **fields})
    refuse_unsupported(chat)
    return chat


def named_event(name: str, fields: dict[str, Any]) -> bytes:
    """A server-sent event with a name, which its data repeats as `type`."""
    return b"event: " + name.encode() + b"\ndata: " + encode({"type": name, **fields}) + b"\n\n"
