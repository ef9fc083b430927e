"""What all endpoints of one front share: engine client, tokenizer, metrics, keys; how a request becomes a call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar, cast
from urllib.parse import quote

import msgspec
import xxhash

from serinus.core.clock import Clock
from serinus.core.errors import BadRequest, ConfigError, UnknownModel
from serinus.core.ids import new_incarnation
from serinus.core.log import get_logger
from serinus.core.rng import Rng
from serinus.core.sampling import SamplingParams
from serinus.core.version import package_version
from serinus.front.calls import Ask, Call
from serinus.front.client import EngineClient, EngineDown
from serinus.front.exchange import HttpExchange
from serinus.front.grammar_check import GrammarCheck
from serinus.front.keys import Keys
from serinus.front.metrics import FrontMetrics
from serinus.front.parse import VALUES_MAX, parse_body, unknown_fields
from serinus.front.proofs import PREFILL_HEADER, PROOF_HEADER, SuggestionCheck
from serinus.front.sampling import check_limits, check_text, token_row
from serinus.front.schemas import GenerateBody, OpenAiBody, refuse_unsupported
from serinus.front.settings import FrontSettings
from serinus.front.threads import TextThreads
from serinus.front.tracing import call_attributes, make_tracing
from serinus.text import EmbeddingUse, Tokenizer, load_embedding_use, load_tokenizer
from serinus.wire.messages import Ready

_BodyT = TypeVar("_BodyT", bound=msgspec.Struct)
_log = get_logger("front")

IGNORED_HEADER = "x-serinus-ignored"
"""In an answer: the fields of its request that this server does not know."""
_WARNED_MAX = 100
"""Unknown fields that the log names in the life of a front, each once."""
_PARSED_PER_CHAR = 8
"""Bytes of a body that are parsed in the time that one character takes to tokenize."""

_ANSWER_DEPENDS_ON = (
    "model_signature",
    "architecture",
    "dtype",
    "kv_cache_dtype",
    "device",
    "tp_size",
    "pp_size",
    "ep_size",
)
"""Of what an engine says of itself."""

Prompt = str | list[int]


def prompts_of(field: str, value: str | list[Any]) -> list[Prompt]:
    """The prompts in OpenAI's four forms: a text, texts, one list of ids, lists of ids. Raises BadRequest."""
    expected = "a text, texts, token ids, or lists of token ids (one kind only, none empty)"
    if isinstance(value, str):
        if not value:
            raise BadRequest(field, value, "a text that is not empty")
        return [value]
    kinds = set(map(type, value))  # in C: there may be a million
    if not value or len(kinds) != 1:
        raise BadRequest(field, value, expected)
    if kinds == {int}:
        return [value]
    if not all(value):
        raise BadRequest(field, value, expected)
    return list(value)


class Front:
    """The state behind the endpoints of one front."""

    def __init__(self, settings: FrontSettings, client: EngineClient, clock: Clock) -> None:
        self.settings = settings
        self.client = client
        self.clock = clock
        self.metrics = FrontMetrics(engine=settings.engine, role=settings.role)
        self.metrics.serves(settings.model_name)
        self.created = int(clock.unix())
        seed = settings.model.random_seed
        self._rng = Rng(new_incarnation() if seed is None else seed)
        self._tokenizer: asyncio.Task[Tokenizer] | None = None
        self._embedding_use: EmbeddingUse | None = None
        self.keys = Keys(
            user=settings.server.api_key, admin=settings.server.admin_api_key, file=settings.server.api_keys_file,
            secrets=settings.router_secrets,
        )  # fmt: skip
        self.threads = TextThreads()
        """Where long texts are parsed, rendered and tokenized."""
        self.grammars = GrammarCheck(
            self.tokenizer_or_none, self.metrics, clock, enabled=settings.model.grammar_backend != "none"
        )
        """Compiles the grammars of requests, so that a wrong one is refused."""
        self.tracing = make_tracing(
            settings.server.otlp_traces_endpoint, role=settings.role, name=settings.engine, clock=clock
        )
        """Sends traces; None = there are none."""
        if self.tracing is not None:
            client.on_spans = self.tracing.export
        self.open_count = 0
        """Requests that the engine is answering."""
        self._suggestions = SuggestionCheck(
            secrets=(self.keys.operator, *settings.router_secrets), addresses=settings.prefill_addresses
        )
        self._warned_of_suggestion = False
        self._warned_of: set[str] = set()
        self._fingerprint = ""
        client.on_bad_frame = self.metrics.bad_frame

    # ---- engine and tokenizer -----------------------------------------------------------------------------------

    @property
    def ready(self) -> Ready:
        """What the engine said it serves. Raises EngineDown while it is not there, or stands still."""
        if self.client.down or self.client.hung:
            raise EngineDown(self.client.down or self.client.hung)
        if self.client.ready is None:
            raise EngineDown("front: the engine is still loading, expected requests after /health answers 200")
        return self.client.ready

    @property
    def fingerprint(self) -> str:
        """OpenAI's system_fingerprint: equal where the same request with the same seed has the same answer, as far as
        version, checkpoint, types and layout decide. Raises EngineDown."""
        if not self._fingerprint:
            info = self.ready.info
            path = self.settings.model.model_path
            about = [package_version(), path, *(str(info.get(name)) for name in _ANSWER_DEPENDS_ON)]
            self._fingerprint = f"fp_{xxhash.xxh3_64_hexdigest(chr(10).join(about).encode())}"
        return self._fingerprint

    def start_tokenizer(self) -> asyncio.Task[Tokenizer]:
        """Begin to load the tokenizer in a thread (once)."""
        if self._tokenizer is None:
            model = self.settings.model
            path = model.tokenizer_path or model.model_path
            loading = asyncio.to_thread(
                load_tokenizer,
                path,
                chat_template=model.chat_template,
                revision=model.revision,
                clock=self.clock,
            )
            self._tokenizer = asyncio.get_running_loop().create_task(loading)
        return self._tokenizer

    async def tokenizer(self, field: str) -> Tokenizer:
        """The tokenizer, for a request that needs it because of `field`. Raises BadRequest where there is none."""
        if self.settings.model.skip_tokenizer_init:
            raise BadRequest(field, "text", "token ids: this server runs without a tokenizer")
        task = self.start_tokenizer()
        if task.done():
            return task.result()
        return await asyncio.shield(task)

    async def tokenizer_or_none(self) -> Tokenizer | None:
        """The tokenizer, or None on a server without one."""
        return None if self.settings.model.skip_tokenizer_init else await self.tokenizer("text")

    async def embedding_use(self) -> EmbeddingUse:
        """How the checkpoint makes embeddings; read once, in a thread. Raises BadRequest: its files are wrong."""
        if self._embedding_use is None:
            settings = self.settings
            try:
                self._embedding_use = await asyncio.to_thread(
                    load_embedding_use, settings.model.model_path, settings.model.revision
                )
            except ConfigError as error:
                raise BadRequest("model", settings.model_name, f"an embedding model ({error})") from error
        return self._embedding_use

    async def encode(
        self, field: str, texts: Sequence[str], *, tokens_max: int, add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Token ids of texts. Raises PromptTooLong: one has far more than `tokens_max`; it is not encoded."""
        tokenizer = await self.tokenizer(field)

        def work() -> list[list[int]]:
            lists: list[list[int]] = []
            for text in texts:
                check_text(field, text, tokenizer, tokens_max, is_context=False)
                lists.append(tokenizer.encode(text, add_special_tokens=add_special_tokens))
            return lists

        return await self.threads.run(sum(map(len, texts)), work)

    # ---- requests -----------------------------------------------------------------------------------------------

    async def read(self, exchange: HttpExchange, body_type: type[_BodyT]) -> _BodyT:
        """A request's body, checked as far as it can be by itself.

        Fields that it has besides are ignored; a header of the answer names them, and once each the log. Raises
        BadRequest, BodyTooLarge, ClientGone.
        """
        raw = await exchange.body()
        context = self.client.ready.context_length if self.client.ready is not None else 0

        def work() -> tuple[_BodyT, list[str]]:
            body = parse_body(raw, body_type, values_max=max(VALUES_MAX, 2 * context))
            refuse_unsupported(body)
            return body, unknown_fields(raw, body_type)

        body, ignored = await self.threads.run(len(raw) // _PARSED_PER_CHAR, work)
        if ignored:
            names = ", ".join(quote(name, safe="") for name in ignored)  # a space at an end would be no header
            exchange.headers.append((IGNORED_HEADER.encode(), names.encode()))
        for field in ignored:
            if field not in self._warned_of and len(self._warned_of) < _WARNED_MAX:
                self._warned_of.add(field)
                _log.warning("front: %s ignores the field %r, which is none of its own", exchange.path, field)
        return body

    def check_model(self, model: str | None) -> None:
        """Raise UnknownModel unless `model` is the one served (or not given)."""
        name = self.settings.model_name
        if model is not None and model != name:
            raise UnknownModel(f"model: got {model[:200]!r}, expected {name!r}")

    def check_count(self, field: str, count: int) -> None:
        """Raise BadRequest where one request asks for so many sequences, by `field`. Called before its prompts are
        tokenized."""
        if count > self.settings.n_max:
            raise BadRequest(field, count, f"at most {self.settings.n_max} sequences (n times prompts)")

    def seed(self, params: SamplingParams) -> int:
        """The client's seed, or one drawn for it."""
        return self._rng.getrandbits(63) if params.seed is None else params.seed

    async def asks(
        self,
        field: str,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        *,
        limit_fields: Sequence[str],
        add_special_tokens: bool = True,
        rids: Sequence[str] = (),
        grammar_fields: Sequence[str] = (),
    ) -> list[Ask]:
        """Prompts and what is asked for each, tokenized and checked; in a thread where they are long together.

        `limit_fields`, `grammar_fields`: as the client names limit and grammar of each; empty where it has none.

        Raises BadRequest, PromptTooLong, BadSampling, EngineDown.
        """
        ready = self.ready
        if any(each.stop for each in params) and self.settings.model.skip_tokenizer_init:
            raise BadRequest("stop", params[0].stop, "nothing: this server runs without a tokenizer")
        await self.grammars.check(params, grammar_fields, ready)
        tokenizer = await self.tokenizer(field) if any(isinstance(prompt, str) for prompt in prompts) else None

        def ask(prompt: Prompt, wanted: SamplingParams, limit_field: str, rid: str) -> Ask:
            text = prompt if isinstance(prompt, str) else None
            if text is None:
                ids = cast(list[int], prompt)
            else:
                assert tokenizer is not None, "front: a text without a tokenizer"
                if not text:
                    raise BadRequest(field, text, "a text that is not empty")
                check_text(field, text, tokenizer, ready.context_length)
                ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
            check_limits(field, len(ids), wanted, ready, limit_field=limit_field)
            return Ask(prompt=token_row(field, ids, ready), text=text, sampling=wanted, rid=rid)

        def work() -> list[Ask]:
            names = rids or [""] * len(prompts)
            return [ask(*each) for each in zip(prompts, params, limit_fields, names, strict=True)]

        return await self.threads.run(sum(map(len, prompts)), work)

    @asynccontextmanager
    async def calling(
        self,
        exchange: HttpExchange,
        asks: Sequence[Ask],
        body: OpenAiBody | GenerateBody,
        *,
        request_id: str,
        start: float,
        fail_alone: bool = False,
    ) -> AsyncIterator[Call]:
        """Run these prompts of `body` for this client; whatever ends it, nothing is left running in the engine.

        Raises BadRequest, EngineDown, CapacityError.
        """
        exchange.rid = request_id
        count = sum(ask.sampling.n for ask in asks)
        self.check_count("n", count)
        call = Call(
            asks,
            request_id=request_id,
            client=self.client,
            tokenizer=await self.tokenizer_or_none(),
            metrics=self.metrics,
            clock=self.clock,
            start=start,
            fail_alone=fail_alone,
        )
        queue = call.submit(
            seeds=[self.seed(ask.sampling) for ask in asks],
            cache_salt=body.salt,
            priority=body.priority or 0,
            share=exchange.share,
            timeout=body.timeout,
            streamed=bool(body.stream),
            prefill_address=self._suggested_prefill(exchange),
            traceparent=exchange.span.traceparent if exchange.span is not None else "",
        )
        exchange.watch(queue.leave)
        self.open_count += 1
        exchange.tokens = lambda: call.prompt_tokens + call.completion_tokens
        try:
            yield call
        finally:
            self.open_count -= 1
            exchange.unwatch()
            queue.close()
            if exchange.span is not None:
                model, now = self.settings.model_name, self.clock.now()
                exchange.span.set(call_attributes(call, path=exchange.path, model=model, start=start, now=now))

    def _suggested_prefill(self, exchange: HttpExchange) -> str:
        """The prefill engine that the router suggests; suggestions without its proof are ignored."""
        address = exchange.header(PREFILL_HEADER)
        if not address or self._suggestions.accepts(address, exchange.header(PROOF_HEADER)):
            return address
        if not self._warned_of_suggestion:
            self._warned_of_suggestion = True
            _log.warning(
                "front: ignored %s: %.200r without a router's proof; expected a router of the same user and machine,"
                " the same SERINUS_CLUSTER_SECRET or --admin-api-key there and here, or that address in"
                " --disaggregation-prefill-addresses",
                PREFILL_HEADER, address,
            )  # fmt: skip
        return ""

    def check_tokenizer(self) -> None:
        """Raise ConfigError where loading the tokenizer has failed."""
        task = self._tokenizer
        if task is not None and task.done() and not task.cancelled():
            err = task.exception()
            if err is not None:
                raise ConfigError(f"front: the tokenizer did not load: {err}") from err

    def stop(self) -> None:
        """Give up loading the tokenizer, where that has not ended, and begin no more work on long texts."""
        self.threads.stop()
        self.grammars.stop()
        if self._tokenizer is not None:
            self._tokenizer.cancel()
