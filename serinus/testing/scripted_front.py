"""A front whose engine says what a test has written: for answers that a small random model never gives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from serinus.front import FrontSettings
from serinus.testing.fake_engine import FakeEngine
from serinus.testing.running_front import RunningFront, front_settings, running_front
from serinus.text import Tokenizer, load_tokenizer

TOOL_TEMPLATE = (
    "{% for t in tools or [] %}<|tool|>{{ t | tojson }}{% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>{% if m.tool_call_id %}({{ m.tool_call_id }}){% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if enable_thinking %}<think>\n{% endif %}{% endif %}"
)
"""Shows tools, calls and what they gave; thinks where `enable_thinking` is asked for."""


@dataclass(slots=True)
class Script:
    """What the engine says next, to any prompt; then it ends the answer."""

    tokenizer: Tokenizer
    text: str = ""
    _ids: dict[str, list[int]] = field(default_factory=dict)

    def token(self, prompt: Sequence[int], seed: int, place: int, vocab_size: int) -> int:
        """The rule that a FakeEngine takes."""
        if self.text not in self._ids:
            self._ids[self.text] = [*self.tokenizer.encode(self.text, add_special_tokens=False), self.end]
        return self._ids[self.text][place]

    @property
    def end(self) -> int:
        """The token that ends an answer."""
        return self.tokenizer.encode("<eos>", add_special_tokens=False)[0]


@contextmanager
def scripted_front(
    tokenizer_folder: Path, endpoint: str, settings: FrontSettings | None = None
) -> Iterator[tuple[RunningFront, Script]]:
    """A front, and the script of its engine."""
    given = settings or front_settings(chat_template=TOOL_TEMPLATE)
    given = replace(given, model=replace(given.model, model_path=str(tokenizer_folder), served_model_name="canary"))
    script = Script(load_tokenizer(str(tokenizer_folder)))
    engine = FakeEngine(
        endpoint=endpoint,
        vocab_size=script.tokenizer.vocab_size,
        context_length=4096,
        max_total_tokens=8192,
        token=script.token,
        eos_ids=(script.end,),
    )
    with running_front(given, engine) as running:
        yield running, script
