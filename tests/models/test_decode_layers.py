"""A decode step by whole layers computes, stores, digests and refuses what the ops one by one do, to the bit."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from serinus.canary import CanaryRank, CheckSettings
from serinus.canary.hook import CanaryHook
from serinus.core.parts import Part
from serinus.core.rng import Rng
from serinus.kernels import AttentionBatch, load
from serinus.kernels.cpu import paged_attention
from serinus.kernels.cpu.calls import Calls
from serinus.kernels.cpu.decode_attention import UNIT_FIELDS
from serinus.kernels.cpu.decode_layers import _Steps
from serinus.kernels.cpu.decode_units import Lay, run_lay
from serinus.kernels.cpu.rms_norm import norm_call
from serinus.kernels.cpu.scalar import host_has
from serinus.kernels.ref.canary_watch import canary_watch
from serinus.models import load_model, load_spec
from serinus.models.small_checkpoints import FAMILIES, make_checkpoint
from serinus.parallel import Mesh
from serinus.testing.direct import DirectEngine, DirectSeq
from serinus.testing.ranked import ranked_engine
from tests.models.parity import GREEDY, Recorder, random_ids
from tests.models.test_parity import LOADED, MIXTURES, OP_BY_OP

SIZES = {"hidden": 128, "intermediate": 256, "heads": 4, "kv_heads": 2, "head_size": 64, "layers": 2}
LENGTHS = (5, 40, 17)
PAGE = 8
OLD = [name for name in FAMILIES if name not in (*LOADED, *MIXTURES, *OP_BY_OP)]
"""Layers with experts, and those whose norms stand elsewhere than before both halves, always go op by op."""
HAS = host_has("avx512bf16")
"""Without it every step goes op by op, and gives the same."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("layers")
    return {
        name: make_checkpoint(root / name, name, tokenizer=False, dtype="bfloat16", **SIZES)  # type: ignore[arg-type]
        for name in FAMILIES
    }


class Layers:
    """Whole layers as the column makes them, and how many steps they have run."""

    def __init__(self, make: Any) -> None:
        self._make, self.steps = make, 0

    def __call__(self, *args: Any) -> Layers | None:
        self._layers = self._make(*args)
        return None if self._layers is None else self

    def begin(self, *args: Any) -> Any:
        steps = self._layers.begin(*args)
        self.steps += steps is not None
        return steps


def engine_of(path: Path, *, whole: bool, ops: bool = False, **canary: Any) -> tuple[DirectEngine, Recorder, Layers]:
    """`ops`: under a watch that is made of the canary's ops."""
    kernels = load("cpu")
    if ops:
        kernels = replace(kernels, canary_watch=canary_watch)
    layers = Layers(kernels.decode_layers)
    spec = load_spec(path)
    model = Recorder(load_model(spec, path, torch.bfloat16, replace(kernels, decode_layers=layers if whole else None)))

    def watch(engine: DirectEngine) -> CanaryRank:
        settings = CheckSettings(page_size=PAGE, window=spec.window, **canary)
        ids = {part: spec.layers_of(part) for part in spec.parts}
        return CanaryRank(settings, engine.pools, engine.tables, ids, kernels)

    direct = DirectEngine(model, kernels, page_size=PAGE, page_count=128, canary=watch if canary else None)
    return direct, model, layers


def decoded(direct: DirectEngine, steps: int = 10) -> list[DirectSeq]:
    """Sequences of several lengths together, then the first one alone."""
    seqs = [direct.start(random_ids(i, length), GREEDY, tokens=64) for i, length in enumerate(LENGTHS)]
    direct.generate(seqs, steps)
    for _ in range(3):
        direct.step([(seqs[0], 1)])
    return seqs


def bytes_of(direct: DirectEngine) -> list[torch.Tensor]:
    return [half.view(torch.int16) for pool in direct.pools.values() for pair in pool.layers for half in pair]


@pytest.mark.slow
@pytest.mark.parametrize("family", [*OLD, *(pytest.param(name, marks=pytest.mark.proof) for name in LOADED)])
def test_whole_layers_give_the_logits_and_the_kv_of_the_ops_one_by_one(
    checkpoints: dict[str, Path], family: str
) -> None:
    found = []
    for whole in (True, False):
        direct, model, layers = engine_of(checkpoints[family], whole=whole)
        decoded(direct)
        assert layers.steps == (12 if whole and HAS else 0), "steps of one token a sequence, all of them"
        found.append((model.seen, bytes_of(direct)))
    for one, other in zip(found[0], found[1], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [{"real_data": "all"}, {"real_data": "all", "stride": 4}, {"real_data": "partial"}]
)
@pytest.mark.parametrize("family", ["qwen3", "mistral_swa", "gemma2"])
def test_under_a_canary_they_stamp_and_find_the_same(
    checkpoints: dict[str, Path], family: str, settings: dict[str, Any]
) -> None:
    found = []
    for whole in (True, False):
        direct, _, layers = engine_of(checkpoints[family], whole=whole, **settings)
        seqs = decoded(direct)
        assert not direct.violations
        part = Part.FULL if direct.pool.layers else Part.SWA
        pool, slots = direct.pools[part], seqs[0].slots if part is Part.FULL else seqs[0].swa_slots
        assert slots is not None
        pool.layers[-1][1].view(torch.int16)[int(slots[seqs[0].done - 2])] ^= 1  # within the window, all heads
        for _ in range(5):
            direct.step([(seq, 1) for seq in seqs])
        assert direct.violations, "a flipped bit that nobody found"
        assert layers.steps == (17 if whole and HAS else 0)
        stamps = [pool.stamps_LS4 for pool in direct.pools.values() if pool.stamps_LS4 is not None]
        found.append((direct.violations, stamps))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(a, b) for a, b in zip(found[0][1], found[1][1], strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_layers_are_told_at_once_what_they_are_told_one_by_one(
    checkpoints: dict[str, Path], family: str, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And by the same object where nothing differs: of layers that see all, decode steps then ask no layer. So it is
    where layers run op by op."""
    direct, model, _ = engine_of(checkpoints[family], whole=whole, real_data="all")
    at_once, told = CanaryHook.layer_digests, []

    def both(hook: CanaryHook, attention: AttentionBatch) -> Any:
        digests = at_once(hook, attention)
        for layer, (written, digest) in enumerate(digests):
            assert written is hook.writes(layer) is not None
            assert digest is hook.reads(layer, attention) is not None
        assert len(digests) == model.spec.layer_count
        told.append(digests)
        return digests

    monkeypatch.setattr(CanaryHook, "layer_digests", both)
    decoded(direct, steps=6)
    assert not direct.violations
    assert len(told) == 8
    if family == "qwen3":
        assert told[1] is told[2]
        assert told[-1] is told[-2] is not told[2], "of one sequence alone"


def test_a_layer_is_made_once_whatever_is_due_in_a_step(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From step to step pages of a sequence are due and are not: attention alone is another call then, made once, and
    again where there is more to digest than before."""
    made: list[tuple[str, int, bool]] = []

    def counted(name: str, call: Any) -> Any:
        def make(steps: Any, layer: int, *given: Any) -> Any:
            made.append((name, layer, given[-1] is not None))
            return call(steps, layer, *given)

        return make

    for name in ("_make", "_attend"):
        monkeypatch.setattr(_Steps, name, counted(name, getattr(_Steps, name)))
    direct, model, _ = engine_of(checkpoints["qwen3"], whole=True, real_data="all", stride=16)
    lengths = 300, 70, 70, 70, 70
    seqs = [direct.start(random_ids(i, length), GREEDY, tokens=44) for i, length in enumerate(lengths)]
    direct.generate(seqs, 40)
    assert not direct.violations
    counts = Counter(made)
    assert bool(counts) == HAS
    for layer in range(model.spec.layer_count if HAS else 0):
        assert counts["_make", layer, False] + counts["_make", layer, True] == 1
        assert counts["_attend", layer, False] == 1
        assert 1 <= counts["_attend", layer, True] <= 2


@pytest.mark.slow
def test_a_watch_of_ops_tells_whole_layers_the_same(checkpoints: dict[str, Path]) -> None:
    found = []
    for ops in (True, False):
        direct, model, layers = engine_of(checkpoints["qwen3"], whole=True, ops=ops, real_data="all")
        decoded(direct, steps=3)
        assert layers.steps == (5 if HAS else 0)
        assert not direct.violations
        found.append([*model.seen, *bytes_of(direct), direct.pool.stamps_LS4])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.slow
def test_slices_sum_between_their_halves_of_a_layer(checkpoints: dict[str, Path]) -> None:
    found = []
    for whole in (True, False):
        direct, runner = ranked_engine(checkpoints["gemma2"], Mesh(tp=2, pp=2), torch.bfloat16)
        for rank in runner.ranks:
            model: Any = rank.model
            assert (model._decode_layers is not None) or not HAS
            if not whole:
                model._decode_layers = None
        found.append([seq.output for seq in decoded(direct)])
        runner.close()
    assert found[0] == found[1]


def test_steps_of_several_tokens_of_a_sequence_go_op_by_op(checkpoints: dict[str, Path]) -> None:
    direct, _, layers = engine_of(checkpoints["qwen3"], whole=True)
    seqs = [direct.start(random_ids(i, 2), GREEDY, tokens=2) for i in range(3)]
    direct.step([(seq, 2) for seq in seqs])
    assert layers.steps == 0
    direct.step([(seq, 1) for seq in seqs])
    assert layers.steps == HAS


def test_a_row_that_names_no_slot_is_refused_as_by_the_op(checkpoints: dict[str, Path]) -> None:
    direct, _, _ = engine_of(checkpoints["qwen3"], whole=True)
    seqs = decoded(direct)
    direct.table.table[seqs[1].row, 3] = 1 << 20
    with pytest.raises(ValueError, match=rf"row {seqs[1].row} of req_to_token holds a slot out of 0 \.\. 1023"):
        direct.step([(seq, 1) for seq in seqs])


def test_a_token_without_a_slot_in_the_pool_is_refused_as_by_the_op(checkpoints: dict[str, Path]) -> None:
    direct, _, _ = engine_of(checkpoints["qwen3"], whole=True)
    seqs = decoded(direct)
    seqs[1].slots[seqs[1].done] = 1 << 20
    with pytest.raises(ValueError, match=r"slot of token 1 is out of range: .* slot 1048576, expected below 1024"):
        direct.step([(seq, 1) for seq in seqs])


def test_a_call_that_refuses_is_the_last_one() -> None:
    x, weight = torch.randn(3, 2, 64).bfloat16(), torch.ones(64).bfloat16()
    out = torch.zeros(3, 2, 64).bfloat16()
    calls = [norm_call(x[i], None, weight, out[i], 1e-6) for i in range(3)]
    calls[1].refusal = "rows"  # never 0: stands for an argument that says that something is wrong
    chain = Calls(3)
    chain.put(0, calls)
    assert chain.run(0, 3) == (1, 2)
    assert out[1].any()
    assert not out[2].any()
    assert chain.run(2, 3) is None
    assert torch.equal(out[2], load("cpu").rms_norm(x[2], weight, 1e-6))
    out.zero_()
    assert chain.run(0, 1) is None
    assert out[0].any(), "a second run begins anew"


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_batches_are_laid_out_as_paged_attention_does(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    rng, kv_heads, width = Rng(7), 4, 512
    for count in (1, 2, 3, 5, 16, 32):
        for window in (None, 40):
            contexts = torch.tensor([1 + rng.randrange(width) for _ in range(count)])
            rows = torch.tensor([rng.randrange(64) for _ in range(count)])
            batch = AttentionBatch(rows_B=rows, q_starts_B1=torch.arange(count + 1), context_B=contexts)
            q, pool = torch.zeros(count, 8, 64).bfloat16(), torch.zeros(8, kv_heads, 64).bfloat16()
            wanted = paged_attention._lay_out(batch, q, pool, (64, width), window)
            units = np.zeros((count * kv_heads, UNIT_FIELDS), np.int64)
            lay = Lay(
                0, rows.data_ptr(), contexts.data_ptr(), units.ctypes.data, count, 64, width, window or width, threads,
                kv_heads, 0, 0, 0, paged_attention.UNEVEN,
            )  # fmt: skip
            run_lay(lay)
            assert (lay.bad, lay.work) == (0, wanted.work)
            assert units[: lay.unit_count].tolist() == wanted.units_UF.tolist()
            contexts[-1] = width + 1
            run_lay(lay)
            assert lay.bad
    torch.set_num_threads(before)
