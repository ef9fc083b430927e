"""One chat on its way to the engine and back, the same for every endpoint that has chats: /v1/chat/completions,
/v1/responses and /v1/messages are translated to a ChatBody, and render the deltas of its answers each in their form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from serinus.core.errors import BadRequest, PromptTooLong
from serinus.core.ids import new_rid
from serinus.core.request import FinishReason
from serinus.front.calls import Ask, Event, SequenceState
from serinus.front.grammars import grammar_field
from serinus.front.parse import fields_as
from serinus.front.sampling import check_chars, from_chat
from serinus.front.schemas import ChatBody
from serinus.front.state import Front
from serinus.front.thinking import thinking_budget, thoughts_first
from serinus.front.tools import ToolUse, tool_use
from serinus.text import (
    AnswerDelta,
    AnswerParser,
    AnswerStyle,
    DeltaKind,
    PlainAnswer,
    ReasoningFormat,
    Tokenizer,
    ToolCall,
    WholeAnswer,
    answer_of,
    answer_style,
    checked_messages,
    parts_of,
)

_MESSAGE_CHARS = 64
"""A message costs as much as so many characters, however short it is."""


async def render_chat(
    front: Front,
    messages: Sequence[dict[str, Any]],
    *,
    tokens_max: int,
    is_context: bool = True,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    extra: dict[str, Any] | None = None,
) -> str:
    """The text of a conversation that may have so many tokens (`is_context`: by the model's bound); a long one is
    rendered in a thread.

    Raises BadRequest, PromptTooLong (more messages than tokens, or more characters than these can have).
    """
    tokenizer = await front.tokenizer("messages")
    template = tokenizer.template_of(extra)
    if template is None:
        raise BadRequest("messages", "a chat", "a prompt at /v1/completions: this checkpoint has no chat template")
    if len(messages) > tokens_max:
        expected = f"at most {tokens_max}, as each is at least one token of the context"
        context = tokens_max if is_context else None
        raise PromptTooLong("messages", f"{len(messages)} messages", expected, context=context)

    def work() -> str:
        checked = checked_messages(messages, template.source)
        chars = sum(len(message["content"] or "") for message in checked)
        check_chars("messages", chars, tokenizer, tokens_max, is_context=is_context)
        return template.render(
            checked,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            extra=extra,
        )

    return await front.threads.run(sum(map(_weight, messages)), work)


def _weight(message: dict[str, Any]) -> int:
    """Characters that take about as long to tokenize as this message takes to check and render."""
    content = message.get("content")
    return _MESSAGE_CHARS + (len(content) if isinstance(content, (str, list)) else 0)


@dataclass(slots=True)
class AnswerReader:
    """Reads one answer as its text grows: what is shown of it, the ids of its calls, the tokens of its thoughts."""

    _parser: AnswerParser
    _form: ReasoningFormat | None
    """The marks of thoughts; None = others, or none."""
    _calls_max: int | None
    _shows_reasoning: bool
    called: bool = False
    """Whether a call was shown."""
    _ids: dict[int, str] = field(default_factory=dict)
    _thoughts: list[str] = field(default_factory=list)
    _answers: bool = False
    """Whether there was anything but thoughts."""

    def feed(self, event: Event) -> list[AnswerDelta]:
        """What one event adds to the answer."""
        deltas = self._parser.feed(event.text) if event.text else []
        shown = self._shown(deltas + self._parser.end() if event.finish is not None else deltas)
        if self._calls_max is not None:
            shown = [delta for delta in shown if delta.index < self._calls_max]
        self.called = self.called or any(delta.kind is DeltaKind.CALL for delta in shown)
        return shown

    def whole(self, text: str) -> WholeAnswer:
        """The whole answer at once; a broken call is content, and counts as none."""
        return answer_of(self.parts(text))

    def parts(self, text: str) -> list[AnswerDelta | ToolCall]:
        """The same, in the order in which it was written."""
        parts = list(parts_of(self._shown(self._parser.feed(text) + self._parser.end())))
        calls = [part for part in parts if isinstance(part, ToolCall)][: self._calls_max]
        self.called = bool(calls)
        return [part for part in parts if part in calls or not isinstance(part, ToolCall)]

    def _shown(self, deltas: list[AnswerDelta]) -> list[AnswerDelta]:
        self._thoughts += [delta.text for delta in deltas if delta.kind is DeltaKind.REASONING]
        self._answers = self._answers or any(delta.kind is not DeltaKind.REASONING for delta in deltas)
        return [delta for delta in deltas if self._shows_reasoning or delta.kind is not DeltaKind.REASONING]

    def call_id(self, index: int) -> str:
        """The id of a call: the same each time, and of no other call anywhere."""
        return self._ids.setdefault(index, new_rid("call").replace("-", "_"))

    def thought_tokens(self, ids: list[int], tokenizer: Tokenizer) -> int:
        """How many of the tokens of this answer are thoughts: those before their end, without the marks. Where the
        marks are no tokens it is about as many: the thoughts are tokenized again."""
        if not self._thoughts:
            return 0
        marks = (self._form.begin, self._form.end) if self._form is not None else ("", "")
        begin, end = map(tokenizer.token_id, marks)
        begun = int(begin is not None and ids[0] == begin)
        if end is not None and end in ids:
            return ids.index(end) - begun
        if not self._answers:
            return len(ids) - begun
        return min(len(ids), len(tokenizer.encode("".join(self._thoughts), add_special_tokens=False)))

    def finish(self, reason: FinishReason) -> str:
        """OpenAI's finish_reason: an answer that ended by itself and has calls ended for them."""
        return "tool_calls" if self.called and reason is FinishReason.STOP else reason.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """One chat, rendered and tokenized."""

    asks: list[Ask]
    style: AnswerStyle
    use: ToolUse | None
    body: ChatBody
    said: str
    """The message that the answer goes on with; empty = it is a message of its own."""
    thinks: bool
    """Whether the answer may begin with thoughts that are to be told apart."""

    def reader(self, sequence: SequenceState) -> AnswerReader | None:
        """What reads this answer; None = all of it is content."""
        use, body = self.use, self.body
        parser = self.style.parser(
            prompt=sequence.ask.text or "",
            tools=None if use is None else use.schemas,
            reasoning=self.thinks,
            forced=use is not None and bool(use.must),
            said=self.said,
        )
        if parser is None:
            return None
        calls_max = use.calls_max if use else None
        return AnswerReader(parser, self.style.reasoning, calls_max, body.include_reasoning is not False)

    def any_reader(self, sequence: SequenceState) -> AnswerReader:
        """...or one by which all is content."""
        return self.reader(sequence) or AnswerReader(PlainAnswer(), None, None, True)


async def prepare(front: Front, body: ChatBody, *, limit_field: str, field: str = "messages") -> Conversation:
    """Render and tokenize a chat. `limit_field`, `field`: what the client calls max_tokens and messages.

    Raises BadRequest, PromptTooLong, BadSampling, UnknownModel, EngineDown.
    """
    front.check_model(body.model)
    use = tool_use(body)
    params = from_chat(body, front.ready.sampling_defaults)
    tokenizer = await front.tokenizer("messages")
    extra = dict(body.chat_template_kwargs or {})
    if use is not None:
        extra["tools"] = use.tools
    template = tokenizer.template_of(extra)
    source = template.source if template is not None else ""
    model = front.settings.model
    style = answer_style(source, tool_call_parser=model.tool_call_parser, reasoning_parser=model.reasoning_parser)
    if body.reasoning_effort is not None:
        extra.setdefault("reasoning_effort", body.reasoning_effort)
    grammar_name = grammar_field(body)
    if use is not None:
        if use.must:
            if params.grammar is not None:
                raise BadRequest("tool_choice", body.tool_choice, f"none or auto beside {grammar_name}")
            params = replace(params, grammar=use.forced(style))
            grammar_name = "tool_choice"
        if "tools" not in source:
            raise BadRequest("tools", list(use.schemas), "none: the chat template of this model shows no tools to it")
        if not use.must and not style.reads_tools:
            raise BadRequest(
                "tools", list(use.schemas), "a server with --tool-call-parser: its form of calls is unknown"
            )
    marks = style.marks(tools=use is not None, reasoning=body.separate_reasoning is not False)
    if marks & tokenizer.special_texts.keys():
        params = replace(params, skip_special_tokens=bool(body.skip_special_tokens))
    text = await render_chat(
        front,
        body.messages,
        tokens_max=front.ready.context_length,
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
        extra=extra,
    )
    said = checked_messages(body.messages[-1:])[0]["content"] if body.continue_final_message else ""
    then, budget = params.grammar, thinking_budget(body, style, tokenizer)
    separates = body.separate_reasoning is not False
    with fields_as({r"^grammar": grammar_name}):
        grammar = thoughts_first(style, text, then, budget, tokenizer, said=said, shown=separates)
    params = replace(params, grammar=grammar)
    special = bool(body.add_special_tokens)  # templates write their own
    asks = await front.asks(
        field,
        [text],
        [params],
        limit_fields=[limit_field],
        add_special_tokens=special,
        grammar_fields=[grammar_name],
    )
    thinks = separates and (then is None or params.grammar is not then)
    return Conversation(asks=asks, style=style, use=use, body=body, said=said, thinks=thinks)
