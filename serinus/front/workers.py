"""A router's engines as its clients and its operator see them: /v1/models of all of them, and /workers, by which they
come and go at run time.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final
from urllib.parse import parse_qs

import msgspec

from serinus.core.errors import BadRequest, ConfigError, RequestError, UnknownModel
from serinus.core.log import get_logger
from serinus.core.shown import shown
from serinus.front.exchange import HttpExchange
from serinus.front.fleet import Fleet, FleetEngine
from serinus.front.keys import Keys
from serinus.front.parse import parse_body
from serinus.front.schemas import WorkerBody
from serinus.front.settings import RouterSettings, split_alias
from serinus.front.upstream import UpstreamBroken, fetch

_ENGINES_MAX: Final = 1024
"""Engines of one router: each is looked at every second or so."""
_KINDS: Final = {"decode": "decode", "regular": "decode", "unified": "decode", "prefill": "prefill"}
_S_MAX: Final = 10.0
_log = get_logger("front")


class NoKey(RequestError):
    """Engines cannot be added or drained: this router asks for no key, so any client could."""

    status = 403


class NoWorker(RequestError):
    """The router has no engine at this address."""

    status = 404
    kind = "not_found_error"


# ---- models ---------------------------------------------------------------------------------------------------------


def renamed(body: bytes, model: str) -> bytes:
    """A body that asks for this model instead: the engine knows it by its own name. Others are left as they are."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except msgspec.DecodeError:
        return body  # the engine says what is wrong with it
    if "model" not in fields:
        return body
    return msgspec.json.encode({**fields, "model": model})


async def _models_of(fleet: Fleet, settings: RouterSettings) -> list[dict[str, Any]]:
    """The entries of all models of which an engine is alive. Raises NoEngineAlive."""
    headers = [("authorization", f"Bearer {settings.api_key}")] if settings.api_key else []
    asked: dict[str, FleetEngine] = {}
    for member in fleet.ready():
        asked.setdefault(member.model, member)

    async def entry(name: str, member: FleetEngine) -> list[dict[str, Any]]:
        try:
            status, body = await fetch(
                member.url, "GET", "/v1/models", headers=headers, s_max=_S_MAX, ca_certs=settings.ssl_ca_certs
            )
            found = msgspec.json.decode(body).get("data", []) if status == 200 else []
        except (UpstreamBroken, msgspec.DecodeError, AttributeError):
            return []  # it died just now: the next look says so
        return [{**each, "id": name} for each in found[:1]] if member.alias else found

    told = await asyncio.gather(*(entry(name, member) for name, member in asked.items()))
    return [each for entries in told for each in entries]


async def list_models(fleet: Fleet, settings: RouterSettings, exchange: HttpExchange) -> None:
    """OpenAI's list of models: those of all engines. Raises NoEngineAlive."""
    await exchange.json({"object": "list", "data": await _models_of(fleet, settings)})


async def one_model(fleet: Fleet, settings: RouterSettings, exchange: HttpExchange) -> None:
    """One of them. Raises NoEngineAlive, UnknownModel."""
    name: str = exchange.scope["path_params"]["name"]
    entries = await _models_of(fleet, settings)
    for each in entries:
        if each.get("id") == name:
            await exchange.json(each)
            return
    known = ", ".join(str(each.get("id")) for each in entries)
    raise UnknownModel(f"model: got {shown(name)}, expected one of {known}")


# ---- engines --------------------------------------------------------------------------------------------------------


def _about(fleet: Fleet, member: FleetEngine) -> dict[str, Any]:
    return {
        "url": member.url,
        "worker_type": member.kind,
        "model_id": member.model,
        "is_healthy": member.alive,
        "why": member.why,
        "draining": member.draining,
        "circuit": fleet.circuit_of(member),
        "load": member.load,
        "open_requests": len(member.open),
    }


async def workers(fleet: Fleet, keys: Keys, exchange: HttpExchange) -> None:
    """GET: all engines; POST: one comes, or comes back; DELETE ?url=: one gets no new requests, and leaves once it has
    none. Raises BadRequest, NoKey, NoWorker.
    """
    method = exchange.scope["method"]
    if method != "GET" and not keys.operator:
        raise NoKey("workers: this router asks for no key, expected one started with --admin-api-key or --api-key")
    if method == "GET":
        await exchange.json({"workers": [_about(fleet, member) for member in fleet.members]})
        return
    if method == "POST":
        member = _added(fleet, parse_body(await exchange.body(), WorkerBody))
        _log.info("front: %s engine %s was added", member.kind, member.url)
        await exchange.json(_about(fleet, member), 202)
        return
    await exchange.body()
    url = parse_qs(exchange.query).get("url", [""])[0].rstrip("/")
    found = fleet.find(url)
    if found is None:
        known = ", ".join(member.url for member in fleet.members)
        raise NoWorker(f"url: got {shown(url)}, expected one of {known}")
    fleet.drain(found)
    _log.info("front: %s engine %s is drained: %d requests are open", found.kind, found.url, len(found.open))
    await exchange.json(_about(fleet, found), 202)


def _added(fleet: Fleet, body: WorkerBody) -> FleetEngine:
    if body.worker_type not in _KINDS:
        raise BadRequest("worker_type", body.worker_type, f"one of {', '.join(_KINDS)}")
    try:
        alias, url = split_alias(body.url)
    except ConfigError:
        raise BadRequest("url", body.url, "http://host:port or https://host:port") from None
    if len(fleet.members) >= _ENGINES_MAX and fleet.find(url) is None:
        raise BadRequest("url", body.url, f"at most {_ENGINES_MAX} engines")
    name = body.model_id or alias
    return fleet.add(f"{name}={url}" if name else url, _KINDS[body.worker_type])
