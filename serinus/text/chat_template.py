"""Renders a conversation to the text a model was trained on, with the checkpoint's own Jinja template, in a sandbox.

The environment (sandbox, trimming, `tojson`, `raise_exception`, `strftime_now`, loop controls) is the one that
published templates are written for, see https://huggingface.co/docs/transformers/chat_templating_writing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NoReturn

from serinus.core.clock import Clock
from serinus.core.errors import BadRequest, ConfigError

if TYPE_CHECKING:
    import jinja2

_CONTINUE_MARK = "\ue000serinus continues here\ue000"


class ChatTemplate:
    """One compiled template. Compiling costs milliseconds, rendering tens of microseconds. Raises ConfigError."""

    def __init__(self, source: str, *, special_tokens: Mapping[str, str], clock: Clock) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._clock = clock
        self._template = self._compile(source)

    def _compile(self, source: str) -> jinja2.Template:
        from jinja2.exceptions import TemplateError, TemplateSyntaxError
        from jinja2.ext import Extension, loopcontrols
        from jinja2.nodes import Node
        from jinja2.parser import Parser
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        class Generation(Extension):
            """`{% generation %}` marks what an assistant wrote, for training; here it only shows its inside."""

            tags = {"generation"}  # noqa: RUF012  (jinja2's own protocol)

            def parse(self, parser: Parser) -> list[Node]:
                next(parser.stream)
                return parser.parse_statements(("name:endgeneration",), drop_needle=True)

        def raise_exception(message: str) -> NoReturn:
            raise TemplateError(message)

        def tojson(
            value: Any,
            ensure_ascii: bool = False,
            indent: int | None = None,
            separators: tuple[str, str] | None = None,
            sort_keys: bool = False,
        ) -> str:
            return json.dumps(
                value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
            )

        def strftime_now(form: str) -> str:
            return datetime.fromtimestamp(self._clock.unix(), tz=UTC).astimezone().strftime(form)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
        )
        environment.filters["tojson"] = tojson
        environment.globals["raise_exception"] = raise_exception
        environment.globals["strftime_now"] = strftime_now
        try:
            return environment.from_string(source)
        except TemplateSyntaxError as err:
            raise ConfigError(f"text: chat template, line {err.lineno}: {err.message}, expected valid Jinja") from err

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of the conversation. Raises BadRequest where the template refuses it (roles out of order...)."""
        from jinja2.exceptions import TemplateError

        shown = [dict(message) for message in messages]
        if continue_final_message:
            shown[-1]["content"] = f"{shown[-1].get('content') or ''}{_CONTINUE_MARK}"
        variables = {**self._special_tokens, **(extra or {})}
        variables |= {"messages": shown, "add_generation_prompt": add_generation_prompt and not continue_final_message}
        variables.setdefault("tools", None)
        variables.setdefault("documents", None)
        try:
            text: str = self._template.render(**variables)
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError, RecursionError) as err:
            roles = [message.get("role") for message in messages]
            raise BadRequest("messages", roles, f"a conversation this model's chat template takes ({err})") from err
        if continue_final_message:
            head, mark, _ = text.rpartition(_CONTINUE_MARK)
            if not mark:
                raise BadRequest("continue_final_message", True, "a chat template that shows the last message")
            text = head
        return text
