"""`serinus cache`: the tree of a running engine, as text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from serinus.cli import main
from serinus.cli.cache import cache_lines
from serinus.testing.fake_engine import FakeEngine
from serinus.testing.running_front import front_settings, running_front
from serinus.testing.small_tokenizers import make_byte_tokenizer


def node(depth: int, start: int, end: int, *, namespace: str = "", **more: Any) -> dict[str, Any]:
    pages = {"device": (end - start) // 16}
    plain: dict[str, Any] = {"id": 17, "head_start": start, "head": [1, 2, 3], "pages": pages}
    plain |= {"pins": 0, "swa_pins": 0, "hits": 4, "idle": 9, "busy": 0}
    return {"depth": depth, "namespace": namespace, "start": start, "end": end, **plain, **more}


def pool(tier: str, part: str, pages: int, **more: int) -> dict[str, Any]:
    return {
        "tier": tier, "part": part, "pages": pages, "cached": 0, "evictable": 0, "free": 0, "request": 0, "copy": 0,
        **more,
    }  # fmt: skip


VIEW = {
    "engine": "decode-0",
    "role": "decode",
    "page_size": 16,
    "pools": [
        pool("device", "full", 100, cached=60, evictable=50, free=30, request=9, copy=1),
        pool("host", "swa", 2000, cached=5, free=1993, quarantined=2, retired=1),
    ],
    "storage": {"pages": 12, "bytes": 3_500_000_000, "removed": 2, "bad": 1},
    "tree": {
        "total": 9,
        "nodes": [
            node(0, 0, 1024, pins=2, head=list(range(100000, 100008))),
            node(1, 1024, 1056, pages={"device": 2, "host": 2, "device_swa": 1}, busy=1),
            node(2, 1056, 1072, pages={"host": 1}),
            node(1, 1024, 1040, pages={}),
            node(0, 0, 16, namespace="tenant\x1b[31m"),
        ],
    },
}


def test_the_tree_says_what_lies_where() -> None:
    assert list(cache_lines(VIEW, where="http://x")) == [
        "decode-0 (decode) at http://x, pages of 16 tokens",
        "  device full        1,600 tokens: 960 cached (800 evictable), 144 of requests, 16 in copies, 480 free",
        "  host swa          32,000 tokens: 80 cached (0 evictable), 0 of requests, 0 in copies, 31,888 free,"
        " 32 in quarantine, 16 retired",
        "  storage               12 pages, 3.500 GB; removed for room 2, found bad 1",
        "  tree: 9 nodes, the first 5 of them",
        "    [0, 1024) node 17: 1,024 tokens, pages device 64; hits 4, idle 9 operations, pins 2; from 0: 100000 100001"
        " 100002 100003 100004 100005 100006 100007",
        "    ├─ [1024, 1056) node 17: 32 tokens, pages device 2+1 swa, host 2; hits 4, idle 9 operations, copies 1;"
        " from 1024: 1 2 3",
        "    │  └─ [1056, 1072) node 17: 16 tokens, pages host 1; hits 4, idle 9 operations; from 1056: 1 2 3",
        "    └─ [1024, 1040) node 17: 16 tokens, pages nowhere; hits 4, idle 9 operations; from 1024: 1 2 3",
        "  namespace 'tenant\\x1b[31m'",
        "    [0, 16) node 17: 16 tokens, pages device 1; hits 4, idle 9 operations; from 0: 1 2 3",
    ]


@pytest.mark.slow
def test_the_command_asks_a_running_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine(endpoint=f"ipc://{tmp_path}/e", vocab_size=267, engine="fake-0")
    settings = front_settings(model_path=str(make_byte_tokenizer(tmp_path)), admin_api_key="secret")
    with running_front(settings, engine) as front:
        assert main(["cache", front.url, "--limit", "5", "--api-key", "secret", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["tree"]["limit"] == 5
        assert main(["cache", front.url.removeprefix("http://") + "/", "--api-key", "secret"]) == 0
        assert capsys.readouterr().out.startswith("fake-0 (unified), pages of")
        assert main(["cache", front.url]) == 2
        assert "give the admin key" in capsys.readouterr().err
        port = front.url.rsplit(":", 1)[1]
    assert main(["cache", f"http://127.0.0.1:{port}"]) == 2
    assert "expected a running engine or router" in capsys.readouterr().err
    assert main(["cache", "--limit", "0"]) == 2
    assert main(["cache", "--nodes", "3"]) == 2
