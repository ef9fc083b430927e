"""Grammars of answers that begin with thoughts: a budget of tokens for them, and what must follow them."""

from __future__ import annotations

import json
from typing import Any

from serinus.core.errors import BadRequest
from serinus.core.grammar import Grammar
from serinus.front.schemas import ChatBody
from serinus.text import AnswerStyle, Tokenizer, tag_rules

_SPACE = r"[\x20\x0A\x0D\x09]{1,32}"
"""Whitespace between tokens of JSON: more is of no use, and a model could write it for ever."""


def thinking_budget(body: ChatBody, style: AnswerStyle, tokenizer: Tokenizer) -> int | None:
    """Tokens that thoughts may have; None = any number. Raises BadRequest: wrong, or their end is no token."""
    name = "thinking_token_budget" if body.thinking_token_budget is not None else "thinking_budget"
    budget = body.thinking_token_budget if body.thinking_token_budget is not None else body.thinking_budget
    if budget is None:
        return None
    if budget < 0:
        raise BadRequest(name, budget, "tokens, at least 0")
    form = style.reasoning
    if form is None or tokenizer.token_id(form.begin) is None or tokenizer.token_id(form.end) is None:
        raise BadRequest(name, budget, "nothing: the thoughts of this model do not stand between two tokens")
    return budget


def thoughts_first(
    style: AnswerStyle, prompt: str, then: Grammar | None, budget: int | None, tokenizer: Tokenizer
) -> Grammar | None:
    """The grammar of an answer to `prompt` that begins with thoughts, of `budget` tokens at most, if the prompt opens
    them or the model does; it goes on as `then` says, None = as it likes.

    `then` itself, where no other is needed, or none can be made: it is no JSON and no structural tag, or the marks are
    no tokens. Raises BadRequest: a budget beside such a grammar.
    """
    form = style.reasoning
    is_open = form is not None and form.is_open(prompt)
    if form is None or (budget is None and (then is None or not is_open)):
        return then
    begin, end = tokenizer.token_id(form.begin), tokenizer.token_id(form.end)
    rest = _rest(then, tokenizer)
    if end is None or begin is None or rest is None:
        if budget is None:
            return then
        raise BadRequest("thinking_token_budget", budget, "a JSON schema, or no grammar, beside it")
    thoughts = f"<[^{end}]>*" if budget is None else f"<[^{end}]>{{0,{budget}}}" if budget else ""
    start = f"{thoughts} <[{end}]> rest"
    if not is_open:
        start = f"<[{begin}]> {start} | " + ("rest" if then is not None else f"<[^{begin}]>*")
    return Grammar.of("lark", "\n".join(["%llguidance {}", f"start: {start}", rest]))


def _rest(then: Grammar | None, tokenizer: Tokenizer) -> str | None:
    """The rule `rest`; None = it cannot be said in one grammar with thoughts."""
    if then is None:
        return "rest: <[*]>*"
    if then.kind == "structural_tag":
        return f"rest: SPACE? calls\nSPACE: /\\s{{1,4}}/\n{tag_rules(then.text, tokenizer.special_texts, 'calls')}"
    if then.kind not in ("json_object", "json_schema"):
        return None
    schema: Any = {"type": "object"} if then.kind == "json_object" else json.loads(then.text)
    if not isinstance(schema, dict):
        schema = {"allOf": [schema]}
    schema = {"x-guidance": {"whitespace_pattern": _SPACE}, **schema}
    return f"rest: SPACE? json\nSPACE: /\\s{{1,4}}/\njson: %json {json.dumps(schema, ensure_ascii=False)}"
