"""What the endpoints answer that generate nothing, as types: models, state, control."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from serinus.front.answer_schemas import HttpAnswer

# ---- models and state ------------------------------------------------------------------------------------------------


class ModelCard(HttpAnswer, kw_only=True):
    """A model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int


class ModelList(HttpAnswer, kw_only=True):
    """The whole answer of /v1/models."""

    object: Literal["list"]
    data: list[ModelCard]


class ModelInfo(HttpAnswer, kw_only=True):
    """The whole answer of /get_model_info."""

    model_path: str
    tokenizer_path: str
    is_generation: bool
    preferred_sampling_params: dict[str, Any] | None


class Version(HttpAnswer, kw_only=True):
    """The whole answer of /version."""

    version: str


class ServerLoad(HttpAnswer, kw_only=True):
    """The whole answer of /load."""

    server_load: int
    """Requests that are being answered."""


class Description(msgspec.Struct, kw_only=True):
    """The description of this server."""

    openapi: str
    info: dict[str, Any]
    paths: dict[str, Any]


class EngineInfo(HttpAnswer, kw_only=True):
    """Answer of an engine's /server_info."""

    version: str
    engine: str
    role: str
    incarnation: str
    model_path: str
    served_model_name: str
    context_length: int
    vocab_size: int
    max_total_tokens: int
    page_size: int
    pd_address: str
    eos_ids: list[int]
    sampling_defaults: dict[str, Any]
    startup_seconds: dict[str, float]
    draining: bool
    degraded: str
    open_requests: int
    ranks: list[Any]
    load: dict[str, Any]
    info: dict[str, Any]


class EngineState(HttpAnswer, kw_only=True):
    """An engine as its router saw it last."""

    url: str
    kind: Literal["prefill", "decode"]
    alive: bool
    why: str
    load: float
    server_info: dict[str, Any]


class RouterInfo(HttpAnswer, kw_only=True):
    """Answer of a router's /server_info."""

    version: str
    role: Literal["router"]
    engines: list[EngineState]
    model_path: str | UnsetType = UNSET
    served_model_name: str | UnsetType = UNSET
    context_length: int | UnsetType = UNSET


class CacheView(msgspec.Struct, kw_only=True):
    """Answer of an engine's /cache: pools by tier and part, and the first nodes of the tree."""


class CanaryView(msgspec.Struct, kw_only=True):
    """Answer of an engine's /canary."""

    engine: str
    role: str
    mode: Literal["none", "log", "raise", "heal"]


class FaultsView(msgspec.Struct, kw_only=True):
    """Answer of an engine's /canary/perturb: what is planted now."""


class LookView(msgspec.Struct, kw_only=True):
    """Answer of /dashboard/look: a page with owner, users, history and stamps; or a node of the tree with its text."""


class ByEngine(HttpAnswer, kw_only=True):
    """A router's answer where each engine has one of its own."""

    engines: list[dict[str, Any]]


class Aborted(HttpAnswer, kw_only=True):
    """The whole answer of /abort_request."""

    aborted: int


class WorkerView(HttpAnswer, kw_only=True):
    """An engine of a router."""

    url: str
    worker_type: Literal["prefill", "decode"]
    model_id: str
    is_healthy: bool
    why: str
    draining: bool
    circuit: str
    load: float
    open_requests: int


class WorkerList(HttpAnswer, kw_only=True):
    """The whole answer of /workers."""

    workers: list[WorkerView]
