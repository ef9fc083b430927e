"""Everything but generation: models, tokenize, health, metrics, server_info, flush, abort."""

from __future__ import annotations

from itertools import chain
from typing import Any, cast
from urllib.parse import parse_qs

import msgspec

from serinus.core.errors import BadRequest, PeerError, RequestError
from serinus.core.ids import new_rid
from serinus.core.sampling import SamplingParams
from serinus.core.version import package_version
from serinus.front.calls import NAME_MAX
from serinus.front.client import EngineDown
from serinus.front.conversation import render_chat
from serinus.front.exchange import HttpExchange
from serinus.front.exposition import answer_scrape
from serinus.front.openapi import openapi
from serinus.front.parse import parse_body
from serinus.front.schemas import AbortBody, DetokenizeBody, GenerateBody, TokenizeBody
from serinus.front.state import Front, prompts_of

_LOOK_S_MAX = 2.0
"""Seconds /server_info and /metrics wait for the engine's own part."""


_CACHE_NODES = 100
"""Nodes that /cache shows without `limit`."""
CACHE_NODES_MAX = 10_000
"""The highest number that `limit` may be."""
_TOKENIZED_MAX = 1 << 19
"""A text or chat that surely has more tokens is not tokenized by /tokenize."""
_SWITCHES = {"true": True, "1": True, "false": False, "0": False}
"""Texts of a query that say yes or no."""
_TEXTS_MAX = 4096
"""Texts of one request to /tokenize."""


class NotFlushed(RequestError):
    """The cache is in use (or its engine refused): nothing was flushed."""


async def health(front: Front, exchange: HttpExchange) -> None:
    """200 while requests can be served. Raises EngineDown, ConfigError (503 and 500, with the reason)."""
    front.check_tokenizer()
    _ = front.ready
    if front.client.draining:
        raise EngineDown("front: draining, this server is about to stop")
    if front.client.degraded:
        raise EngineDown(f"front: degraded, requests are still answered: {front.client.degraded}")
    await exchange.text("")


async def health_generate(front: Front, exchange: HttpExchange) -> None:
    """200 after the engine has generated one token."""
    await exchange.body()
    start = front.clock.now()
    params = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
    asks = await front.asks("prompt", [[0]], [params], limit_fields=["max_tokens"])
    apart = GenerateBody(cache_salt="health")
    async with front.calling(exchange, asks, apart, request_id=new_rid("health"), start=start) as call:
        assert call.queue is not None, "front: a call without a queue"
        late = front.client.fail_later(call.queue, front.settings.health_generate_s_max, "no token in time")
        try:
            await call.run()
        finally:
            late.cancel()
    await exchange.text("")


def _model_card(front: Front) -> dict[str, Any]:
    return {
        "id": front.settings.model_name,
        "object": "model",
        "created": front.created,
        "owned_by": "serinus",
        "root": front.settings.model.model_path or front.settings.model_name,
        "parent": None,
        "max_model_len": front.ready.context_length,
    }


async def models(front: Front, exchange: HttpExchange) -> None:
    """OpenAI's list of models: the one served."""
    await exchange.json({"object": "list", "data": [_model_card(front)]})


async def model(front: Front, exchange: HttpExchange) -> None:
    """OpenAI's card of one model."""
    front.check_model(exchange.scope["path_params"]["name"])
    await exchange.json(_model_card(front))


async def model_info(front: Front, exchange: HttpExchange) -> None:
    """Where the model lies, as SGLang's /get_model_info says it."""
    settings = front.settings
    ready = front.client.ready
    info = {
        "model_path": settings.model.model_path,
        "tokenizer_path": settings.model.tokenizer_path or settings.model.model_path,
        "is_generation": True,
        "preferred_sampling_params": None if ready is None else ready.sampling_defaults,
    }
    await exchange.json(info)


async def _load(front: Front) -> dict[str, Any]:
    """What the engine says of its load; where its answer does not come (a long step), the reason in words."""
    try:
        reply = await front.client.call("load", s_max=_LOOK_S_MAX)
        value = msgspec.json.decode(reply.body) if reply.ok and reply.body else {}
    except (PeerError, msgspec.DecodeError) as err:
        return {"error": str(err)}
    return value if isinstance(value, dict) else {}


async def server_info(front: Front, exchange: HttpExchange) -> None:
    """What this server is and serves, how it is set up, how loaded it is. The router reads it every second."""
    ready = front.ready
    settings = front.settings
    load = await _load(front)
    ranks = load.pop("ranks", [])
    info: dict[str, Any] = {
        "version": package_version(),
        "engine": ready.engine,
        "role": ready.role,
        "incarnation": str(ready.incarnation),
        "model_path": settings.model.model_path,
        "served_model_name": settings.model_name,
        "context_length": ready.context_length,
        "vocab_size": ready.vocab_size,
        "max_total_tokens": ready.max_total_tokens,
        "page_size": ready.page_size,
        "pd_address": ready.pd_address,
        "eos_ids": ready.eos_ids,
        "sampling_defaults": ready.sampling_defaults,
        "startup_seconds": ready.seconds,
        "draining": front.client.draining,
        "degraded": load.pop("degraded", ""),
        "open_requests": front.client.open_count,
        "ranks": ranks,
        "load": load,
        "info": dict(ready.info),
    }
    await exchange.json(info)


async def version(front: Front, exchange: HttpExchange) -> None:
    """The version of this package, as vLLM's /version says it."""
    await exchange.json({"version": package_version()})


async def load(front: Front, exchange: HttpExchange) -> None:
    """How many requests are being answered, as vLLM's /load says it."""
    await exchange.json({"server_load": front.open_count})


async def metrics(front: Front, exchange: HttpExchange) -> None:
    """Prometheus text or OpenMetrics: the front's own and, while it answers, the engine's."""
    texts = [front.metrics.exposition()]
    if front.client.ready is not None and not front.client.down:
        try:
            reply = await front.client.call("metrics", s_max=_LOOK_S_MAX)
            if reply.ok:
                texts.insert(0, reply.body.decode())
        except PeerError as err:
            texts.append(f"# engine: {err}\n")
    await answer_scrape(exchange, texts)


async def flush_cache(front: Front, exchange: HttpExchange) -> None:
    """Empty the engine's prefix cache. Raises NotFlushed while requests use it."""
    await exchange.body()
    reply = await front.client.call("flush_cache", s_max=front.settings.call_s_max)
    if not reply.ok:
        raise NotFlushed(f"flush_cache: {reply.body.decode('utf-8', errors='replace') or 'the engine refused'}")
    await exchange.text("Cache flushed.\n")


def cache_limit(exchange: HttpExchange) -> int:
    """`limit` of the query: how many nodes to show. Raises BadRequest."""
    text = next(iter(parse_qs(exchange.query, keep_blank_values=True).get("limit", ())), str(_CACHE_NODES))
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= CACHE_NODES_MAX):
        raise BadRequest("limit", text, f"a number from 1 to {CACHE_NODES_MAX}")
    return int(text)


async def cache_tree(front: Front, exchange: HttpExchange) -> None:
    """What is cached where: pools by tier and part, and the first nodes of the tree."""
    await _pass_on(front, exchange, "cache", cache_limit(exchange))


async def canary(front: Front, exchange: HttpExchange) -> None:
    """What the KV canary checked and found, incident by incident."""
    await _pass_on(front, exchange, "canary")


async def _pass_on(front: Front, exchange: HttpExchange, what: str, limit: int = 0) -> None:
    """Answer with the engine's own JSON."""
    reply = await front.client.call(what, s_max=front.settings.call_s_max, limit=limit)
    if not reply.ok:
        raise EngineDown(f"{what}: {reply.body.decode('utf-8', errors='replace') or 'the engine refused'}")
    await exchange.json(reply.body)


async def description(front: Front, exchange: HttpExchange) -> None:
    """The OpenAPI description of the endpoints."""
    await exchange.json(openapi(package_version(), of_router=False))


async def abort_request(front: Front, exchange: HttpExchange) -> None:
    """Abort one request by the id its answer carries (or its `rid`), or all. Unknown ids change nothing.

    Raises BadRequest: neither an id nor abort_all.
    """
    raw = await exchange.body()
    body = parse_body(raw, AbortBody) if raw.strip() else AbortBody()
    query = parse_qs(exchange.query, keep_blank_values=True)
    rid = body.rid or next(iter(query.get("rid", ())), "")
    asked = query.get("abort_all", ["false"])[0]
    if asked not in _SWITCHES:
        raise BadRequest("abort_all", asked, f"one of {', '.join(_SWITCHES)}")
    everything = bool(body.abort_all) or _SWITCHES[asked]
    if not rid and not everything:
        raise BadRequest("rid", rid, "the id of a request, or abort_all: true")
    if len(rid) > NAME_MAX:
        raise BadRequest("rid", rid, f"an id of at most {NAME_MAX} characters")
    _ = front.ready
    rids = [] if everything else front.client.rids_of(rid)
    count = front.client.open_count if everything else len(rids)
    if everything:
        front.client.abort(everything=True)
    for engine_rid in rids:
        front.client.abort(engine_rid)
    await exchange.json({"aborted": count})


async def tokenize(front: Front, exchange: HttpExchange) -> None:
    """Token ids of a text, of several, or of a chat. Raises BadRequest, UnknownModel."""
    body = await front.read(exchange, TokenizeBody)
    front.check_model(body.model)
    given = [name for name in ("prompt", "text", "messages") if getattr(body, name) is not None]
    if len(given) != 1:
        raise BadRequest("prompt", given, "one of prompt, text and messages")
    field = given[0]
    special = body.add_special_tokens
    tokens_max = _TOKENIZED_MAX
    if body.messages is not None:
        generation = body.add_generation_prompt is not False
        texts = [
            await render_chat(
                front, body.messages, tokens_max=tokens_max, is_context=False, add_generation_prompt=generation
            )
        ]
        special = bool(special)
        single = True
    else:
        value = body.prompt if body.prompt is not None else body.text
        assert value is not None, "front: a field that was given is missing"
        texts = [value] if isinstance(value, str) else list(value)
        special = special is not False
        single = isinstance(value, str)
        if not 0 < len(texts) <= _TEXTS_MAX:
            raise BadRequest(field, f"{len(texts)} texts", f"at least one text, at most {_TEXTS_MAX}")
    lists = await front.encode(field, texts, tokens_max=tokens_max, add_special_tokens=special)
    context = front.client.ready.context_length if front.client.ready is not None else None
    counts = [len(ids) for ids in lists]
    await exchange.json(
        {"tokens": lists[0] if single else lists, "count": counts[0] if single else counts, "max_model_len": context}
    )


async def detokenize(front: Front, exchange: HttpExchange) -> None:
    """The text of token ids, one list or several. Raises BadRequest, UnknownModel."""
    body = await front.read(exchange, DetokenizeBody)
    front.check_model(body.model)
    tokenizer = await front.tokenizer("tokens")
    lists = cast(list[list[int]], prompts_of("tokens", body.tokens) if body.tokens else [[]])
    skip = body.skip_special_tokens is True

    def work() -> list[str]:
        for token_id in chain.from_iterable(lists):
            if not 0 <= token_id < tokenizer.vocab_size:
                raise BadRequest("tokens", token_id, f"token ids from 0 to {tokenizer.vocab_size - 1}")
        return tokenizer.decode_many(lists, skip_special_tokens=skip)

    texts = await front.threads.run(sum(map(len, lists)), work)
    single = not body.tokens or isinstance(body.tokens[0], int)
    text = texts[0] if single else texts
    await exchange.json({"text": text, "prompt": text})
