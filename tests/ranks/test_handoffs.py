"""Prefill engines of several ranks hand over to decode engines of several: every rank moves its own share."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from serinus.core.errors import ConfigError
from serinus.core.rng import Rng
from serinus.models import load_spec
from serinus.models.small_checkpoints import make_checkpoint, make_toy
from serinus.ranks.layouts import data_backends
from serinus.testing.oracle import toy_continue
from tests.cells import some
from tests.ranks.crew import config_of, crew
from tests.ranks.pair import Pair, answers, count, pair, prompts_of, toy_answers

PREFILL = [(1, 2), (2, 1), (2, 2)]
DECODE = [(1, 1), (2, 1), (1, 2)]


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy(tmp_path_factory.mktemp("toy"), vocab=64, context=128, layers=4, kv_heads=4, tokenizer=False)


@pytest.mark.slow
@pytest.mark.parametrize("number", some(range(len(PREFILL) * len(DECODE)), 1, 3, 8))
def test_every_layout_hands_over_to_every_other(toy: Path, number: int) -> None:
    """shm and tcp in turn; `python -m tests.ranks.matrix` runs both for each."""
    prefill, decode = list(product(PREFILL, DECODE))[number]
    prompts = prompts_of(5)
    ours, theirs = ({"tp_size": tp, "pp_size": pp} for tp, pp in (prefill, decode))
    with pair(toy, ours, theirs, "shm" if number % 2 else "tcp") as engines:
        assert answers(engines, prompts, 7) == toy_answers(toy, prompts, 7)
        assert count(engines.decode, "num_transfer_failed_reqs") == 0
        pages = sum(-(-len(prompt) // 4) for prompt in prompts.values())
        assert pages - 10 <= count(engines.decode, "kv_transfer_pages") <= pages, "only what is cached here stays away"


@pytest.mark.slow
@pytest.mark.parametrize(("host", "shown"), [("::1", "tcp://[::1]:"), ("::", "tcp://[::]:")])
def test_a_prompt_is_handed_over_by_ipv6(toy: Path, host: str, shown: str) -> None:
    with pair(toy, {}, {}, "tcp", bootstrap_host=host, cluster_secret="both know it") as engines:
        assert engines.prefill.built.pd_address.startswith(shown)
        prompt = list(range(1, 38))
        engines.add("a", prompt, 6)
        engines.run()
        assert engines.tokens("a") == toy_continue(load_spec(toy), prompt, 6)
        assert count(engines.decode, "kv_transfer_pages") == 10


@pytest.mark.slow
def test_ranks_without_layers_of_a_part_hand_over_what_they_have(tmp_path: Path) -> None:
    """Of FSFS cut 1,1,2 stage 1 has no FULL layer and stage 0 no sliding one; decode has one stage."""
    path = make_toy(
        tmp_path, vocab=64, context=128, layers=4, kv_heads=2, tokenizer=False, window=8, layer_types="FSFS"
    )
    prompts = prompts_of(5, 11)
    ours, theirs = {"pp_size": 3, "pp_layer_partition": "1,1,2"}, {"tp_size": 2}
    with pair(path, ours, theirs, max_total_tokens=512) as engines:
        assert answers(engines, prompts, 12) == toy_answers(path, prompts, 12)
        assert count(engines.decode, "num_transfer_failed_reqs") == 0
        assert count(engines.decode, "kv_transfer_pages") > 0


@pytest.mark.slow
@pytest.mark.parametrize("canary", ["none", "raise"])
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        pytest.param(p, d, marks=() if (p, d) in (((2, 2), (1, 1)), ((1, 2), (2, 1))) else pytest.mark.proof)
        for p in [(1, 1), *PREFILL]
        for d in DECODE
    ],
)
def test_latent_rows_which_all_slices_hold_come_to_every_slice(
    tmp_path: Path, prefill: tuple[int, int], decode: tuple[int, int], canary: str
) -> None:
    path = make_toy(tmp_path, vocab=64, context=128, layers=4, head_size=16, tokenizer=False, latent=True)
    prompts = prompts_of(5)
    ours, theirs = ({"tp_size": tp, "pp_size": pp} for tp, pp in (prefill, decode))
    with pair(path, ours, theirs, kv_canary=canary) as engines:
        assert answers(engines, prompts, 7) == toy_answers(path, prompts, 7)
        assert count(engines.decode, "num_transfer_failed_reqs") == 0
        assert count(engines.decode, "kv_transfer_pages") > 20


@pytest.mark.parametrize(("prefill", "decode"), [(2, 2), (2, 1), (1, 2)])
def test_kv_of_one_byte_goes_between_equal_and_unequal_slices(toy: Path, prefill: int, decode: int) -> None:
    prompts = prompts_of(4)
    sizes = ({"tp_size": tp} for tp in (prefill, decode))
    with pair(toy, *sizes, "shm", kv_cache_dtype="fp8", kv_canary="raise", kv_canary_real_data="all") as engines:
        assert answers(engines, prompts, 7) == toy_answers(toy, prompts, 7, dtype="float8_e4m3fn")
        assert count(engines.decode, "num_transfer_failed_reqs") == 0
        assert count(engines.decode, "kv_transfer_pages") > 10


@pytest.mark.proof
@pytest.mark.parametrize("prefill", [1, 2])
@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_a_real_model_with_kv_in_fp8_answers_what_one_engine_of_its_slices_answers(
    tmp_path: Path, prefill: int, family: str
) -> None:
    path = make_checkpoint(tmp_path, family, layers=3, vocab=320, tokenizer=False)
    prompts = {f"r{i}": [(37 * i + 11 * j) % 320 for j in range(9 + 8 * i)] for i in range(4)}
    given = {"dtype": "float32", "kv_cache_dtype": "fp8"}
    with crew(path, tp_size=prefill, **given) as alone:
        expected = answers(alone, prompts, 8)
    with pair(path, {"tp_size": prefill}, {"tp_size": 2}, **given) as engines:
        assert answers(engines, prompts, 8) == expected
        assert count(engines.decode, "kv_transfer_pages") > 0


@pytest.mark.proof
@pytest.mark.parametrize(("prefill", "decode"), [((2, 2), (1, 2))])
@pytest.mark.parametrize(("family", "ep"), [("llama", 1), ("deepseek_v3", 1), ("deepseek_v3", 2), ("gpt_oss", 2)])
def test_a_real_model_answers_what_one_engine_answers(
    tmp_path: Path, prefill: tuple[int, int], decode: tuple[int, int], family: str, ep: int
) -> None:
    """`ep`: of the prefill engine. Engines whose ranks hold experts otherwise have the same weights."""
    path = make_checkpoint(tmp_path, family, layers=4, vocab=320, tokenizer=False)
    prompts = {f"r{i}": [(37 * i + 11 * j) % 320 for j in range(9 + 8 * i)] for i in range(4)}
    with crew(path, dtype="float32") as alone:
        expected = answers(alone, prompts, 8)
    ours, theirs = ({"tp_size": tp, "pp_size": pp} for tp, pp in (prefill, decode))
    with pair(path, ours | {"ep_size": ep}, theirs, dtype="float32") as engines:
        assert answers(engines, prompts, 8) == expected
        assert count(engines.decode, "kv_transfer_pages") > 0
        assert count(engines.decode, "num_transfer_failed_reqs") == 0


def _sent_and_left(engines: Pair) -> tuple[int, int]:
    """Pieces sent of the one handoff under way, and tokens of its prompt that no finished step has computed."""
    port: Any = engines.prefill.engine.handoffs
    states = engines.prefill.engine.scheduler._states
    for xid, order in port.port.machine._table.under_way.items():
        state = states.get(xid)
        computed = state.computed if state is not None else 0
        return order.sent_pieces, order.tokens - computed
    return 0, 0


@pytest.mark.slow
def test_a_handoff_begins_while_later_chunks_are_being_computed(toy: Path) -> None:
    """By the order of events: pages of all ranks have landed while steps with later chunks are under way."""
    prompt = [(5 * j) % 64 for j in range(110)]
    with pair(toy, {"pp_size": 2, "chunked_prefill_size": 8}, {}) as engines:
        engines.add("r", prompt, 4)
        timeline = []
        while not any(engines.deltas.values()):
            engines.turn()
            landed = engines.decode.engine.handoffs.port.machine.landed_pages("r")  # type: ignore[attr-defined]
            sent, left = _sent_and_left(engines)
            timeline.append((landed, sent, left, engines.prefill.line.under_way))
        engines.run()
        early = [moment for moment in timeline if moment[0] >= 2 and moment[2] > 8 and moment[3] > 0]
        assert early, f"nothing landed before the last chunk: {timeline}"
        assert max(landed for landed, _sent, _left, _open in early) >= 8, "several chunks of both stages were early"


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "pp"), [(1, 3), (2, 2)])
def test_requests_that_leave_while_they_wait_for_a_grant_leave_nothing(toy: Path, tp: int, pp: int) -> None:
    """Each counts once as failed while bootstrapping, however many ranks the engine has."""
    with pair(
        toy, {"tp_size": tp, "pp_size": pp}, {"max_total_tokens": 64, "optimistic_prefill": True}, park_tokens=1 << 12
    ) as engines:
        engines.add("stays", [1] * 30, 30)
        while not any(engines.deltas.values()):
            engines.turn()
        for i in range(3):
            engines.add(f"waits-{i}", [2 + i] * 40, 4)
        while engines.prefill.engine.handoffs.port.machine.ungranted_count != 3:
            engines.turn()
        before = count(engines.prefill, "num_bootstrap_failed_reqs")
        for i in range(3):
            engines.abort(f"waits-{i}")
        while engines.prefill.engine.handoffs.port.machine.ungranted_count:
            engines.turn()
        assert count(engines.prefill, "num_bootstrap_failed_reqs") - before == 3
        engines.run()
        assert engines.tokens("stays") == toy_continue(load_spec(toy), [1] * 30, 30)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["shm", pytest.param("tcp", marks=pytest.mark.proof)])
def test_requests_that_leave_at_any_time_leave_nothing_behind(toy: Path, backend: str) -> None:
    rng, spec = Rng(11), load_spec(toy)
    prompts = {f"r{i}": [rng.randrange(64) for _ in range(rng.randint(5, 60))] for i in range(24)}
    with pair(toy, {"pp_size": 2, "tp_size": 2}, {"tp_size": 2}, backend) as engines:
        going = list(prompts)
        stayed = []
        while going:
            rid = going.pop()
            engines.add(rid, prompts[rid], 5)
            for _ in range(rng.randrange(8)):
                engines.turn()
            if rng.random() < 0.6:
                engines.abort(rid)
            else:
                stayed.append(rid)
        engines.run()
        for rid in stayed:
            assert engines.tokens(rid) == toy_continue(spec, prompts[rid], 5)
        port: Any = engines.prefill.engine.handoffs
        while port.port.machine.staged_count:
            engines.turn()
        assert count(engines.decode, "num_transfer_failed_reqs") == 0
        assert not port.port.machine.rejects["unknown_piece"]


def test_a_library_that_writes_is_refused_by_name_where_pools_are_on_a_gpu(toy: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"mooncake writes .* on 'cuda', .* expected auto, cuda_ipc, nixl, shm or tcp"
    ):
        data_backends(config_of(toy, mode="decode", transfer_backend="mooncake"), 0, "cuda")


def test_ranks_on_several_hosts_share_no_memory(toy: Path) -> None:
    settings = {"mode": "decode", "pp_size": 2, "nnodes": 2, "dist_init_addr": "127.0.0.1:1"}
    names = [backend.name for backend in data_backends(config_of(toy, **settings), "t", "cpu")]
    assert names == ["tcp"]
    with pytest.raises(ConfigError, match="'shm' with 2 hosts"):
        data_backends(config_of(toy, **settings, transfer_backend="shm"), "t", "cpu")


@pytest.mark.parametrize(("settings", "tried"), [
    ({}, True), ({"tp_size": 2}, True), ({"tp_size": 2, "pp_size": 2}, True), ({"nnodes": 2, "tp_size": 2}, False),
    ({"kv_canary_perturb": "real_kv_used=0.1"}, False),
])  # fmt: skip
def test_auto_tries_memory_of_accelerators_first_whatever_the_ranks_of_one_host(
    toy: Path, settings: dict[str, Any], tried: bool, caplog: pytest.LogCaptureFixture
) -> None:
    given = {"dist_init_addr": "127.0.0.1:5000"} if "nnodes" in settings else {}
    with caplog.at_level("WARNING"):
        found = data_backends(config_of(toy, mode="decode", **settings, **given), 0, "meta")
    assert found[-1].name == "tcp"
    assert ("memory of a GPU is to be reached, the pools are on 'meta'" in caplog.text) is tried
