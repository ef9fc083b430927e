"""Whether the grammars of a request compile: looked at before the engine gets it, in threads beside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from serinus.core.clock import Clock
from serinus.core.errors import BadRequest
from serinus.core.grammar import Grammar
from serinus.core.sampling import SamplingParams
from serinus.front.metrics import FrontMetrics
from serinus.text import GrammarCompiler, Tokenizer
from serinus.wire.messages import Ready

_COMPILE_S_MAX = 5.0
"""Seconds that a grammar may take, those that it waits for others included."""
_THREADS = 2


class GrammarCheck:
    """Compiles each grammar once, without the vocabulary: masks are made by engines."""

    def __init__(
        self, tokenizer: Callable[[], Awaitable[Tokenizer | None]], metrics: FrontMetrics, clock: Clock, *,
        enabled: bool = True, compile_s_max: float = _COMPILE_S_MAX,
    ) -> None:  # fmt: skip
        """`tokenizer`: that of the front; None = it has none. `enabled`: whether the engine has grammars. `metrics`
        count what came of each grammar."""
        self._enabled = enabled
        self._metrics = metrics
        self._clock = clock
        self._tokenizer = tokenizer
        self._compile_s_max = compile_s_max
        self._threads = ThreadPoolExecutor(_THREADS, "grammars")
        self._compiler: asyncio.Future[GrammarCompiler] | None = None

    async def check(self, params: Sequence[SamplingParams], fields: Sequence[str], ready: Ready) -> None:
        """Compile the grammars of these parameters; `fields`: as the client names them, empty = all `grammar`.

        Raises BadRequest, by the field: one is wrong, takes too long, or the tokenizer is not for grammars.
        """
        checked: set[Grammar] = set()
        for each, field in zip(params, fields or ["grammar"] * len(params), strict=True):
            grammar = each.grammar
            if grammar is None or grammar in checked:
                continue
            checked.add(grammar)
            if not self._enabled:
                raise BadRequest(field, grammar.kind, "nothing: this server runs with --grammar-backend none")
            tokenizer = await self._tokenizer()
            if tokenizer is None:
                raise BadRequest(field, grammar.kind, "nothing: this server runs without a tokenizer")
            try:
                await self._compile(grammar, tokenizer, ready)
            except TimeoutError:
                self._metrics.grammar("timeout")
                expected = f"a {grammar.kind} that compiles in {self._compile_s_max:g} s"
                raise BadRequest(field, grammar.text, expected) from None
            except BadRequest as error:
                self._metrics.grammar("aborted")
                raise BadRequest(field + error.field.removeprefix("grammar"), error.value, error.expected) from error

    async def _compile(self, grammar: Grammar, tokenizer: Tokenizer, ready: Ready) -> None:
        loop = asyncio.get_running_loop()

        def made() -> GrammarCompiler:
            return GrammarCompiler(tokenizer, width=ready.vocab_size, eos_ids=ready.eos_ids)

        if self._compiler is None:
            self._compiler = loop.run_in_executor(self._threads, made)
        known = await asyncio.shield(self._compiler)
        hit, began = known.knows(grammar), self._clock.now()
        await asyncio.wait_for(loop.run_in_executor(self._threads, known.compile, grammar), self._compile_s_max)
        self._metrics.grammar("cache_hit" if hit else "compiled", self._clock.now() - began)

    def stop(self) -> None:
        """Begin nothing more; what runs ends by itself."""
        self._threads.shutdown(wait=False, cancel_futures=True)
