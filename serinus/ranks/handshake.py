"""What the ranks of an engine must agree on before they work together, and the proof that one knows the secret."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import socket
from dataclasses import asdict
from typing import Any, Final

import msgspec

from serinus.core.config import ServeConfig, settings_in
from serinus.wire.messages import RankHello

_OWN_GROUPS: Final = frozenset({"server"})
_OWN_SETTINGS: Final = frozenset(
    {
        "model.model_path",
        "model.tokenizer_path",
        "kernels.threads",
        "parallel.node_rank",
        "cache.hicache_storage_dir",
        "cache.kv_events_config",
        "pd.bootstrap_host",
        "pd.bootstrap_port",
        "pd.prefill_addresses",
        "pd.cluster_secret",
    }
)
"""What may differ from machine to machine, or must not travel."""


def shared_settings(config: ServeConfig) -> str:
    """What all ranks must agree on, as JSON."""
    tree = {
        group: {name: value for name, value in values.items() if f"{group}.{name}" not in _OWN_SETTINGS}
        for group, values in asdict(config).items()
        if group not in _OWN_GROUPS
    }
    return json.dumps(tree, sort_keys=True)


def signed(secret: str, rank: int, settings: str) -> bytes:
    """Proof that a rank knows the cluster's secret; nothing where there is none."""
    if not secret:
        return b""
    return hmac.new(secret.encode(), f"{rank} {settings}".encode(), hashlib.sha256).digest()


def hello_of(config: ServeConfig, rank: int) -> RankHello:
    """What this process says to its leader first."""
    settings = shared_settings(config)
    mac = signed(config.pd.cluster_secret, rank, settings)
    return RankHello(rank=rank, pid=os.getpid(), host=socket.gethostname()[:256], settings=settings, mac=mac)


def difference(ours: str, theirs: str) -> str:
    """The first setting in which two trees of settings differ, by its flag, in words."""
    flags = {f"{group}.{setting.name}": setting.flag for group, setting in settings_in(ServeConfig)}
    try:
        one, other = (msgspec.json.decode(text, type=dict[str, dict[str, Any]]) for text in (ours, theirs))
    except (msgspec.MsgspecError, RecursionError):
        return "they cannot be read"
    for group in sorted({*one, *other}):
        left, right = one.get(group, {}), other.get(group, {})
        for name in sorted({*left, *right}):
            if left.get(name) != right.get(name):
                what = flags.get(f"{group}.{name}", f"{group}.{name}")
                return f"{what} is {right.get(name)!r}, expected {left.get(name)!r}"
    return "nothing that can be named"
