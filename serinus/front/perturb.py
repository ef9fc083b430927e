"""/canary/perturb of an engine: which faults are planted on purpose; a POST plants some. For a router: perturb_all."""

from __future__ import annotations

from typing import Any

import msgspec

from serinus.core.errors import BadRequest, RequestError
from serinus.front.exchange import HttpExchange
from serinus.front.fleet import Fleet
from serinus.front.parse import parse_body
from serinus.front.state import Front
from serinus.wire.fault_order import FaultOrder

_ROLES = ("", "prefill", "decode")
_ALL_S_MAX = 60.0


class PerturbRefused(RequestError):
    """The engine does not plant these faults; it says why."""


async def perturb(front: Front, exchange: HttpExchange) -> None:
    """What is planted now; a POST has faults planted. Raises BadRequest, PerturbRefused."""
    order = b""
    if exchange.scope["method"] == "POST":
        order = await exchange.body()
        role = parse_body(order, FaultOrder).role
        own = "prefill" if front.settings.role == "prefill" else "decode"
        if role not in ("", own):
            raise BadRequest("role", role, f"{own}, or none: this engine is one")
    reply = await front.client.call("perturb", s_max=front.settings.call_s_max, body=order)
    if not reply.ok:
        raise PerturbRefused(f"perturb: {reply.body.decode(errors='replace')}")
    await exchange.json(reply.body)


async def perturb_all(fleet: Fleet, key: str, exchange: HttpExchange) -> None:
    """The same of every engine behind a router, or of those of one `role`: an answer each, or why there is none. 200
    where all did it, else 400. Raises BadRequest."""
    method, body, role = exchange.scope["method"], b"", ""
    if method == "POST":
        body = await exchange.body()
        role = parse_body(body, FaultOrder).role
        if role not in _ROLES:
            raise BadRequest("role", role, "prefill, decode, or none")
    answers = await fleet.ask_all(
        exchange.scope["method"], "/canary/perturb", key=key, body=body, s_max=_ALL_S_MAX, kind=role
    )
    engines: list[dict[str, Any]] = []
    for member, status, text in answers:
        about = {"url": member.url, "kind": member.kind}
        told = {"perturb": msgspec.Raw(text)} if status == 200 else {"error": f"{status}: {text.decode()[:500]}"}
        engines.append({**about, **told})
    await exchange.json({"engines": engines}, 200 if all(status == 200 for _, status, _ in answers) else 400)
