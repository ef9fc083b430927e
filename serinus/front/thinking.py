"""Grammars of answers that begin with thoughts: a budget of tokens for them, and what must follow them."""

from __future__ import annotations

from serinus.core.errors import BadRequest
from serinus.core.grammar import Grammar
from serinus.front.schemas import ChatBody
from serinus.text import AnswerStyle, Tokenizer, grammar_rules


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
    style: AnswerStyle,
    prompt: str,
    then: Grammar | None,
    budget: int | None,
    tokenizer: Tokenizer,
    *,
    said: str,
    shown: bool,
) -> Grammar | None:
    """The grammar of an answer to `prompt` that begins with thoughts, of `budget` tokens at most, if the prompt opens
    them or the model does; it goes on as `then` says, None = as it likes. `said`: the message at the end of the prompt
    that the answer goes on with. `shown`: thoughts are told apart from the content, so the model may open some before
    `then`.

    `then` itself, where no other is needed, or the marks are no tokens. Raises BadRequest, by the name `grammar`.
    """
    form = style.reasoning
    if form is None:
        return then
    is_open = form.is_open(prompt, said)
    if budget is None and (then is None or not (is_open or (shown and not form.is_closed(prompt, said)))):
        return then
    begin, end = tokenizer.token_id(form.begin), tokenizer.token_id(form.end)
    if end is None or begin is None:
        return then  # and there is no budget
    thoughts = f"<[^{end}]>*" if budget is None else f"<[^{end}]>{{0,{budget}}}" if budget else ""
    start = f"{thoughts} <[{end}]> rest"
    if not is_open:
        start = f"<[{begin}]> {start} | " + ("rest" if then is not None else f"<[^{begin}]>*")
    rest = "rest: <[*]>*"
    if then is not None:
        rules = grammar_rules(then, tokenizer.special_texts, "then")
        rest = f"rest: SPACE? then\nSPACE: /\\s{{1,4}}/\n{rules}"
    return Grammar.of("lark", "\n".join(["%llguidance {}", f"start: {start}", rest]))
