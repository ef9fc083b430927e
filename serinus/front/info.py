"""Everything but generation: models, tokenize, health, metrics, server_info, flush, abort."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any
from urllib.parse import parse_qs

import msgspec

from serinus.core.errors import BadRequest, PeerError, RequestError
from serinus.core.ids import new_rid
from serinus.core.sampling import SamplingParams
from serinus.front.chat import render_chat
from serinus.front.client import EngineDown
from serinus.front.exchange import Exchange
from serinus.front.metrics import merge_expositions
from serinus.front.parse import parse_body
from serinus.front.schemas import AbortBody, DetokenizeBody, TokenizeBody
from serinus.front.state import Front, prompts_of

__all__ = [
    "CACHE_NODES_MAX",
    "NotFlushed",
    "abort_request",
    "cache_limit",
    "cache_tree",
    "canary",
    "detokenize",
    "flush_cache",
    "health",
    "health_generate",
    "metrics",
    "model",
    "model_info",
    "models",
    "serinus_version",
    "server_info",
    "tokenize",
]

_LOOK_S_MAX = 2.0
"""Seconds /server_info and /metrics wait for the engine's own part."""


_CACHE_NODES = 100
CACHE_NODES_MAX = 10_000
"""Nodes that /cache shows when nobody says how many, and at most."""


class NotFlushed(RequestError):
    """The cache is in use (or its engine refused): nothing was flushed."""


@cache
def serinus_version() -> str:
    """Version of the installed package."""
    try:
        return version("serinus")
    except PackageNotFoundError:
        return "unknown"


async def health(front: Front, exchange: Exchange) -> None:
    """200 while requests can be served, else 503 with the reason."""
    front.check_tokenizer()
    _ = front.ready
    if front.client.draining:
        raise EngineDown("front: draining, this server is about to stop")
    await exchange.text("")


async def health_generate(front: Front, exchange: Exchange) -> None:
    """200 after the engine has generated one token."""
    await exchange.body()
    start = front.clock.now()
    params = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
    ask = await front.ask("prompt", [0], params, limit_field="max_tokens")
    async with front.calling(exchange, [ask], request_id=new_rid("health"), cache_salt="health", start=start) as call:
        assert call.mailbox is not None, "front: a call without a mailbox"
        late = front.client.fail_later(call.mailbox, front.settings.health_generate_s_max, "no token in time")
        try:
            await call.run()
        finally:
            late.cancel()
    await exchange.text("")


def _model_card(front: Front) -> dict[str, Any]:
    return {
        "id": front.settings.model_name,
        "object": "model",
        "created": front.born,
        "owned_by": "serinus",
        "root": front.settings.model_path or front.settings.model_name,
        "parent": None,
        "max_model_len": front.ready.context_length,
    }


async def models(front: Front, exchange: Exchange) -> None:
    """OpenAI's list of models: the one served."""
    await exchange.json({"object": "list", "data": [_model_card(front)]})


async def model(front: Front, exchange: Exchange) -> None:
    """OpenAI's card of one model."""
    front.check_model(exchange.scope["path_params"]["name"])
    await exchange.json(_model_card(front))


async def model_info(front: Front, exchange: Exchange) -> None:
    """SGLang's /get_model_info."""
    settings = front.settings
    tokenizer_path = settings.tokenizer_path or settings.model_path
    await exchange.json({"model_path": settings.model_path, "tokenizer_path": tokenizer_path, "is_generation": True})


async def _load(front: Front) -> dict[str, Any]:
    """The engine's own word on its load; where it does not come (a long step), the reason in words."""
    try:
        reply = await front.client.call("load", s_max=_LOOK_S_MAX)
        value = msgspec.json.decode(reply.body) if reply.ok and reply.body else {}
    except (PeerError, msgspec.DecodeError) as err:
        return {"error": str(err)}
    return value if isinstance(value, dict) else {}


async def server_info(front: Front, exchange: Exchange) -> None:
    """Who this is, what it serves, how it is set up, how loaded it is. The router reads it every second."""
    ready = front.ready
    settings = front.settings
    load = await _load(front)
    ranks = load.pop("ranks", [])
    info: dict[str, Any] = {
        "version": serinus_version(),
        "engine": ready.engine,
        "role": ready.role,
        "incarnation": str(ready.incarnation),
        "model_path": settings.model_path,
        "served_model_name": settings.model_name,
        "context_length": ready.context_length,
        "vocab_size": ready.vocab_size,
        "max_total_tokens": ready.max_total_tokens,
        "page_size": ready.page_size,
        "pd_address": ready.pd_address,
        "startup_seconds": ready.seconds,
        "draining": front.client.draining,
        "open_requests": front.client.open_count,
        "ranks": ranks,
        "load": load,
        "info": dict(ready.info),
    }
    await exchange.json(info)


async def metrics(front: Front, exchange: Exchange) -> None:
    """Prometheus text: the front's own and, while it answers, the engine's."""
    texts = [front.metrics.exposition()]
    if front.client.ready is not None and not front.client.down:
        try:
            reply = await front.client.call("metrics", s_max=_LOOK_S_MAX)
            if reply.ok:
                texts.insert(0, reply.body.decode())
        except PeerError as err:
            texts.append(f"# engine: {err}\n")
    body = merge_expositions(texts).encode()
    await exchange.reply(200, body, b"text/plain; version=0.0.4; charset=utf-8")


async def flush_cache(front: Front, exchange: Exchange) -> None:
    """Empty the engine's prefix cache; refused while requests use it."""
    await exchange.body()
    reply = await front.client.call("flush_cache", s_max=front.settings.call_s_max)
    if not reply.ok:
        raise NotFlushed(f"flush_cache: {reply.body.decode('utf-8', errors='replace') or 'the engine refused'}")
    await exchange.text("Cache flushed.\n")


def cache_limit(exchange: Exchange) -> int:
    """`limit` of the query: how many nodes to show. Raises BadRequest."""
    text = next(iter(parse_qs(exchange.query, keep_blank_values=True).get("limit", ())), str(_CACHE_NODES))
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= CACHE_NODES_MAX):
        raise BadRequest("limit", text, f"a number from 1 to {CACHE_NODES_MAX}")
    return int(text)


async def cache_tree(front: Front, exchange: Exchange) -> None:
    """What is cached where: pools by tier and part, and the first nodes of the tree."""
    await _engines_word(front, exchange, "cache", cache_limit(exchange))


async def canary(front: Front, exchange: Exchange) -> None:
    """What the KV canary checked and found, and the latest violations."""
    await _engines_word(front, exchange, "canary")


async def _engines_word(front: Front, exchange: Exchange, what: str, limit: int = 0) -> None:
    """The engine's own JSON, passed on as it is."""
    reply = await front.client.call(what, s_max=front.settings.call_s_max, limit=limit)
    if not reply.ok:
        raise EngineDown(f"{what}: {reply.body.decode('utf-8', errors='replace') or 'the engine refused'}")
    await exchange.json(reply.body)


async def abort_request(front: Front, exchange: Exchange) -> None:
    """Abort one request by the id its answer carries (or its `rid`), or all. Unknown ids change nothing."""
    raw = await exchange.body()
    body = parse_body(raw, AbortBody) if raw.strip() else AbortBody()
    query = parse_qs(exchange.query)
    rid = body.rid or next(iter(query.get("rid", ())), "")
    everything = bool(body.abort_all) or query.get("abort_all", [""])[0] in ("true", "1")
    if not rid and not everything:
        raise BadRequest("rid", rid, "the id of a request, or abort_all: true")
    _ = front.ready
    rids = [] if everything else front.client.rids_of(rid)
    count = front.client.open_count if everything else len(rids)
    if everything:
        front.client.abort(everything=True, reason="aborted by /abort_request")
    for engine_rid in rids:
        front.client.abort(engine_rid, reason="aborted by /abort_request")
    await exchange.json({"aborted": count})


async def tokenize(front: Front, exchange: Exchange) -> None:
    """Token ids of a text, of several, or of a chat."""
    body = parse_body(await exchange.body(), TokenizeBody)
    front.check_model(body.model)
    given = [name for name in ("prompt", "text", "messages") if getattr(body, name) is not None]
    if len(given) != 1:
        raise BadRequest("prompt", given, "one of prompt, text and messages")
    field = given[0]
    tokenizer = await front.tokenizer(field)
    special = body.add_special_tokens
    if body.messages is not None:
        generation = body.add_generation_prompt is not False
        prompt = render_chat(tokenizer, body.messages, add_generation_prompt=generation)
        prompts: list[str] = [prompt]
        special = bool(special)
        single = True
    else:
        value = body.prompt if body.prompt is not None else body.text
        assert value is not None, "front: a field that was given is missing"
        prompts = [value] if isinstance(value, str) else list(value)
        special = special is not False
        single = isinstance(value, str)
        if not prompts:
            raise BadRequest(field, value, "at least one text")
    lists = await front.encode(field, prompts, add_special_tokens=special)
    context = front.client.ready.context_length if front.client.ready is not None else None
    counts = [len(ids) for ids in lists]
    await exchange.json(
        {"tokens": lists[0] if single else lists, "count": counts[0] if single else counts, "max_model_len": context}
    )


async def detokenize(front: Front, exchange: Exchange) -> None:
    """The text of token ids, one list or several."""
    body = parse_body(await exchange.body(), DetokenizeBody)
    front.check_model(body.model)
    tokenizer = await front.tokenizer("tokens")
    prompts = prompts_of("tokens", body.tokens) if body.tokens else [[]]
    skip = body.skip_special_tokens is True
    texts: list[str] = []
    for ids in prompts:
        assert not isinstance(ids, str), "front: texts among token ids"
        for token_id in ids:
            if not 0 <= token_id < tokenizer.vocab_size:
                raise BadRequest("tokens", token_id, f"token ids from 0 to {tokenizer.vocab_size - 1}")
        texts.append(tokenizer.decode(ids, skip_special_tokens=skip))
    single = not body.tokens or isinstance(body.tokens[0], int)
    text = texts[0] if single else texts
    await exchange.json({"text": text, "prompt": text})
