"""`serinus up --ray` without a cluster: what is refused, what is asked for, what the planner is shown."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import pytest

from serinus.cli import main
from serinus.cli.on_ray.placement import actor_name, bundles_of, rank_config, why_unplaced
from serinus.cli.on_ray.seen import Looks
from serinus.core.config import ServeConfig, UpConfig, from_names
from serinus.core.errors import ConfigError
from serinus.front import RouterSettings
from serinus.parallel import Mesh
from serinus.scale import RoleSeen


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    for name in [name for name in sys.modules if name.startswith("serinus.cli.on_ray.")]:
        monkeypatch.delitem(sys.modules, name)
    assert main(["up", "model", "--ray"]) == 2
    assert "ray is not installed, expected it: pip install -e '.[ray]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_decode": 3}, "--max-decode is 3 without --ray"),
        ({"ray_address": "head:6379"}, "--ray-address is 'head:6379' without --ray"),
        ({"scale_down_s": 30.0}, "--scale-down-after is 30.0 without --ray"),
        ({"ray": True, "decode": 4, "max_decode": 3}, "--decode is 4, expected --min-decode to --max-decode: 4 to 3"),
        ({"ray": True, "prefill": 1, "min_prefill": 2}, "--prefill is 1, expected --min-prefill to"),
        ({"ray": True, "prefill": 0, "max_prefill": 2}, "--prefill is 0"),
        ({"ray": True, "ray_address": "ray://head:10001"}, "expected auto or host:port"),
    ],
)  # fmt: skip
def test_numbers_that_do_not_fit_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match="config: ") as refused:
        from_names(UpConfig, {"model_path": "model", **settings})
    assert said in str(refused.value)


def test_an_engine_asks_for_a_bundle_for_each_stage() -> None:
    config = from_names(ServeConfig, {"tp_size": 2, "pp_size": 3, "threads": 4})
    assert bundles_of(config, gpus=True) == [{"GPU": 2.0, "CPU": 2.0}] * 3
    assert bundles_of(config, gpus=False) == [{"CPU": 8.0}] * 3
    assert bundles_of(from_names(ServeConfig, {}), gpus=False) == [{"CPU": 1.0}]


def test_each_rank_is_an_actor_with_the_name_that_the_log_has() -> None:
    mesh = Mesh(tp=2, pp=2)
    names = [actor_name("decode-0", mesh, rank) for rank in range(mesh.size)]
    assert names == ["decode-0", "decode-0-TP1-PP0", "decode-0-TP0-PP1", "decode-0-TP1-PP1"]


NODES = [
    {"Alive": True, "NodeManagerAddress": "10.0.0.1", "Resources": {"CPU": 8.0, "GPU": 1.0, "memory": 1e9}},
    {"Alive": True, "NodeManagerAddress": "10.0.0.2", "Resources": {"CPU": 16.0}},
    {"Alive": False, "NodeManagerAddress": "10.0.0.3", "Resources": {"CPU": 64.0, "GPU": 8.0}},
]


def test_a_rank_serves_at_the_address_of_its_node() -> None:
    """Also that of an engine without a role, which hands nothing over."""
    for role, host in (("decode", "10.0.0.2"), ("unified", "127.0.0.1")):
        up = from_names(UpConfig, {"model": "m", "ray": True, "prefill": 0 if role == "unified" else 1, "pp_size": 2})
        engine = up.engine(role=role, name=role, port=1, threads=1)
        config = rank_config(engine, ["10.0.0.1", "10.0.0.2"], Mesh(tp=1, pp=2), 1, 8000, 9000)
        assert (config.server.host, config.server.port, config.pd.bootstrap_host) == ("10.0.0.2", 8000, host)
        assert (config.parallel.nnodes, config.parallel.dist_init_addr) == (2, "10.0.0.1:9000")


def test_a_bundle_that_no_node_can_hold_is_named_with_what_the_cluster_has() -> None:
    said = why_unplaced([{"GPU": 1.0, "CPU": 1.0}, {"GPU": 2.0, "CPU": 2.0}], NODES, {"CPU": 3.0})
    assert said == (
        "bundle 1 of 2 (2 GPU, 2 CPU on one node) is more than any node has: 2 nodes, 10.0.0.1 (1 GPU, 8 CPU),"
        " 10.0.0.2 (16 CPU); free in all: 3 CPU"
    )
    assert "bundle 0 of 1 (8 CPU on one node) finds no room: " in why_unplaced([{"CPU": 8.0}], NODES, {})


@dataclass
class Engine:
    url: str
    kind: str
    state: str = "ready"
    stays: bool = True


def info(url: str, load: dict[str, Any], *, alive: bool = True) -> dict[str, Any]:
    return {"url": url, "alive": alive, "server_info": {"load": load, "info": {"max_running_requests": 10}}}


def test_the_planner_sees_means_over_engines_that_answer() -> None:
    engines = [Engine("p", "prefill"), Engine("d", "decode"), Engine("e", "decode")]
    engines.append(Engine("", "decode", "waits for room"))
    engines.append(Engine("gone", "decode", "draining", stays=False))
    load = {"num_running_reqs": 4, "num_decode_transfer_queue_reqs": 2, "token_usage": 0.2, "num_queue_reqs": 3}
    more = {"num_running_reqs": 1, "token_usage": 0.8, "num_decode_prealloc_queue_reqs": 5}
    looks = Looks()
    for now, spent in ((100.0, 7.0), (105.0, 9.5)):
        told = [info("p", {"busy_seconds": spent, "token_usage": 0.0}), info("d", load), info("e", more)]
        told += [info("gone", load), info("other", load, alive=False)]
        seen = looks.look(now, engines, told)
    assert seen.prefill == RoleSeen(wanted=1, ready=1, busy=0.5)
    assert seen.decode == RoleSeen(
        wanted=3, ready=2, running_reqs=7, queue_reqs=8, usage=pytest.approx(0.7), unplaced=1
    )


def test_an_engine_that_does_not_tell_its_load_is_taken_for_full() -> None:
    seen = Looks().look(1.0, [Engine("d", "decode")], [info("d", {"error": "a long step"})])
    assert seen.decode.usage == 1.0


def test_a_router_may_begin_without_engines_where_a_key_lets_them_come() -> None:
    assert RouterSettings(decode_urls=(), admin_api_key="k").decode_urls == ()
    with pytest.raises(ConfigError, match="decode_urls is empty"):
        RouterSettings(decode_urls=())
