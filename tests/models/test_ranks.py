"""What the ranks of a mesh compute together is what one process computes, whatever the mesh and the family."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from serinus.core.errors import ConfigError, InvariantError, PeerGone
from serinus.core.parts import Part
from serinus.core.plan import StepPlan
from serinus.core.sampling import SamplingParams
from serinus.engine import LLM
from serinus.kernels import load
from serinus.models import load_model, load_spec
from serinus.models.small_checkpoints import make_checkpoint, make_toy
from serinus.models.weights import RandomSource, SafetensorsSource
from serinus.parallel import Mesh, Shard
from serinus.parallel.thread_comm import ThreadComm
from serinus.testing.direct import DirectEngine, DirectSeq
from serinus.testing.oracle import toy_continue
from serinus.testing.ranked import RankedRunner, ranked_engine
from tests.cells import some
from tests.models.parity import GREEDY, engine, random_ids

PROMPT = random_ids(21, 70)
CHUNKS = [1, 17, 40, 3, 1 << 30] + [1] * 20
MESHES = {"TP2": Mesh(tp=2), "PP2": Mesh(pp=2), "PP3": Mesh(pp=3), "PP2xTP2": Mesh(tp=2, pp=2)}
FAMILIES = {
    "llama": {"attention_bias": True, "mlp_bias": True, "layers": 3, "intermediate": 157, "vocab": 511},
    "qwen2": {"tied": True, "layers": 3, "shards": 2},
    "mistral_swa": {"layers": 3},
    "gemma2": {"tied": True, "layers": 4, "vocab": 513},
    "gemma3_text": {"tied": True, "layers": 7, "kv_heads": 2, "head_size": 32},
    "phi3": {"layers": 3, "intermediate": 157},
    "glm4": {"layers": 3, "attention_bias": True},
    "granitemoehybrid": {"layers": 3, "intermediate": 157},
    "cohere": {"layers": 3, "attention_bias": True, "intermediate": 157},
    "cohere2": {"tied": True, "layers": 5},
    "olmo2": {"layers": 3, "attention_bias": True},
    "olmo3": {"layers": 5},
    "qwen2_moe": {"layers": 3, "moe_intermediate_size": 45, "shared_expert_intermediate_size": 31, "stacked": True},
    "glm4_moe": {"layers": 3, "moe_intermediate_size": 33},
    "gpt_oss": {"layers": 3, "intermediate": 45},
    "deepseek_v2_lite": {"layers": 3},
    "deepseek_v3": {"layers": 3, "attention_bias": True, "moe_intermediate_size": 33},
}
"""Odd widths and vocabularies, tied heads, shards of files, biases, windows, caps: all that ranks cut differently."""
MIXTURES = ("qwen2_moe", "glm4_moe", "gpt_oss", "deepseek_v3")


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("ranks")
    return {
        name: make_checkpoint(root / name, name, tokenizer=False, seed=i, **sizes)  # type: ignore[arg-type]
        for i, (name, sizes) in enumerate(FAMILIES.items())
    }


@contextmanager
def _ranked(
    path: Path, mesh: Mesh, dtype: torch.dtype, *, column: str = "auto", partition: Sequence[int] = ()
) -> Iterator[tuple[DirectEngine, RankedRunner]]:
    direct, runner = ranked_engine(path, mesh, dtype, column=column, partition=partition)
    yield direct, runner
    runner.close()


def _answer(direct: DirectEngine, params: SamplingParams = GREEDY) -> DirectSeq:
    """Uneven chunks beside a sequence that decodes already."""
    other = direct.start(PROMPT[:9], params, tokens=40, seed=8)
    seq = direct.start(PROMPT, params, tokens=40, seed=5)
    direct.step([(other, 9)])
    for chunk in CHUNKS:
        direct.step([(other, 1), (seq, chunk)])
    return seq


@pytest.mark.slow
@pytest.mark.parametrize("mesh", some(MESHES, "PP2xTP2"))
@pytest.mark.parametrize("family", FAMILIES)
def test_a_mesh_gives_the_greedy_tokens_of_one_process_in_fp32(
    families: dict[str, Path], family: str, mesh: str
) -> None:
    alone, _ = engine(families[family], torch.float32)
    with _ranked(families[family], MESHES[mesh], torch.float32) as (direct, _):
        assert _answer(direct).output == _answer(alone).output


class _Sums:
    """In place of a GPU's kernel that multiplies and adds up (StagePeers): the same by two calls, for some rows."""

    def __init__(self, comm: ThreadComm) -> None:
        self._comm, self._linear = comm, load("cpu", "ref").linear
        self.asked: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    def linear_all_reduce(self, x_TI: torch.Tensor, packed: Any) -> torch.Tensor | None:
        self.asked.append((tuple(x_TI.shape), tuple(packed.weight.shape)))
        return self._comm.all_reduce(self._linear(x_TI, packed)) if len(x_TI) <= 20 else None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "quantization", "is_asked"),
    [("mistral_swa", "auto", True), ("olmo2", "auto", True), ("llama", "auto", False), ("mistral_swa", "int8", False)],
)
def test_the_ranks_of_a_stage_ask_for_sums_of_products_alike_or_none_does(
    families: dict[str, Path], family: str, quantization: str, is_asked: bool
) -> None:
    """One whose part of a weight had another shape, or another form, would wait for the others for ever. Of llama the
    MLP is 157 wide; a rank may hold a part of a quantized weight dequantized."""
    alone, _ = engine(families[family], torch.float32, quantization=quantization)
    direct, runner = ranked_engine(families[family], Mesh(tp=2), torch.float32, column="ref", quantization=quantization)
    for comm in runner._comms:
        comm.peers = cast(Any, _Sums(comm))
    assert _answer(direct).output == _answer(alone).output
    runner.close()
    first, second = (cast(_Sums, comm.peers).asked for comm in runner._comms)
    assert first == second
    assert bool(first) is is_asked
    assert not is_asked or {shape[0] <= 20 for shape, _ in first} == {True, False}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [Mesh(tp=2, ep=2), Mesh(tp=2, pp=2, ep=2)])
@pytest.mark.parametrize("family", MIXTURES)
def test_ranks_with_whole_experts_give_the_greedy_tokens_of_one_process_in_fp32(
    families: dict[str, Path], family: str, mesh: Mesh
) -> None:
    """Each reads its own experts alone: between them as much as one process does."""
    path = families[family]
    alone, _ = engine(path, torch.float32)
    with _ranked(path, mesh, torch.float32) as (direct, runner):
        assert _answer(direct).output == _answer(alone).output
        held = [mix for rank in runner.ranks for mix in rank.model._mixtures if mix is not None]
        assert all(len(mix.experts.down) == len(mix.held) == mix.spec.count // 2 for mix in held)
        assert all(mix.experts.down.shape[2] == mix.spec.size for mix in held)
    spec = load_spec(path)
    _, whole = _taken(path, spec.shards(Mesh())[0])
    ranks = [_taken(path, shard)[1] for shard in spec.shards(mesh)]
    stacks = [name for name in whole if ".experts." in name and "shared" not in name]
    assert stacks
    assert {name: sum(taken.get(name, 0) for taken in ranks) for name in stacks} == {n: whole[n] for n in stacks}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("family", "mesh"),
    [
        ("llama", Mesh(tp=2)),
        ("llama", Mesh(pp=3)),
        ("llama", Mesh(tp=2, pp=2)),
        ("olmo3", Mesh(tp=2)),
        ("cohere2", Mesh(tp=2)),
    ],
)
def test_log_probabilities_stay_close_to_those_of_one_process(
    families: dict[str, Path], family: str, mesh: Mesh, dtype: torch.dtype
) -> None:
    """Of every token of the prompt, and of the likeliest one after it: all of them given, so that no near tie between
    two tokens decides what is compared."""
    path = families[family]
    params = SamplingParams(temperature=0.0, max_new_tokens=4, logprobs=3, prompt_logprobs=0)

    def found(direct: DirectEngine) -> torch.Tensor:
        seq = direct.start(PROMPT, params, tokens=8)
        for chunk in (33, 1 << 30):
            direct.step([(seq, chunk)])
        last = seq.results[-1].logprobs
        assert last is not None
        places = [place.logprob for result in seq.results for place in result.prompt_logprobs]
        assert len(places) == len(PROMPT) - 1
        return torch.tensor([*places, last.logprob])

    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    with _ranked(path, mesh, dtype) as (direct, _):
        assert float((found(direct) - found(engine(path, dtype)[0])).abs().max()) < tolerance


@pytest.mark.slow
def test_stages_alone_change_not_one_bit_in_bf16(families: dict[str, Path]) -> None:
    params = SamplingParams(temperature=0.8, top_p=0.9, max_new_tokens=24, logprobs=2)
    with _ranked(families["gemma3_text"], Mesh(pp=3), torch.bfloat16, partition=(1, 5, 1)) as (direct, _):
        split = _answer(direct, params)
    whole = _answer(engine(families["gemma3_text"], torch.bfloat16)[0], params)
    assert split.output == whole.output
    assert split.results == whole.results


@pytest.mark.parametrize(
    ("tp", "pp", "partition"),
    [(1, 1, ()), (2, 1, ()), (4, 1, ()), (1, 2, ()), (1, 3, (1, 1, 3)), (2, 2, ()), (2, 5, ())],
)
def test_the_toy_gives_the_oracles_tokens_on_every_mesh(
    tmp_path: Path, tp: int, pp: int, partition: tuple[int, ...]
) -> None:
    """Stages of one part alone included: what has no layer there has a pool of no bytes."""
    path = make_toy(tmp_path, layers=5, kv_heads=4, head_size=8, window=7, layer_types="SFSSF", tokenizer=False)
    with _ranked(path, Mesh(tp=tp, pp=pp), torch.bfloat16, partition=partition, column="ref") as (direct, runner):
        assert _answer(direct).output == toy_continue(load_spec(path), PROMPT, 21)
        held = [{part: len(pool.layers) for part, pool in rank.pools.items()} for rank in runner.ranks]
    assert sum(sum(layers.values()) for layers in held) == 5 * tp
    assert all(set(layers) == {Part.FULL, Part.SWA} for layers in held)
    assert (pp == 5) == any(layers[Part.FULL] == 0 for layers in held if pp in (1, 5))


def test_harmed_kv_of_any_one_rank_is_a_wrong_token(tmp_path: Path) -> None:
    path = make_toy(tmp_path, layers=4, kv_heads=2, head_size=8, tokenizer=False)
    right = toy_continue(load_spec(path), PROMPT, 21)
    for rank in range(4):
        with _ranked(path, Mesh(tp=2, pp=2), torch.bfloat16, column="ref") as (direct, runner):
            seq = direct.start(PROMPT, GREEDY, tokens=40)
            direct.step([(seq, 1 << 30)])
            runner.ranks[rank].pools[Part.FULL].k[1][int(seq.slots[30])] += 1
            for _ in range(3):
                direct.step([(seq, 1)])
            assert (seq.output[0], seq.output[1] != right[1]) == (right[0], True)


@pytest.mark.slow
def test_processes_over_gloo_give_the_tokens_of_one(families: dict[str, Path]) -> None:
    """The whole engine, with weights of uneven widths; stages in processes are in tests/ranks."""
    prompts = [[(7 * i + j) % 500 for i in range(20 + 30 * j)] for j in range(3)]
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    answers = []
    for tp in (1, 2):
        with LLM(
            str(families["llama"]), dtype="float32", max_total_tokens=1024, chunked_prefill_size=32,
            skip_tokenizer_init=True, tp_size=tp,
        ) as llm:  # fmt: skip
            answers.append([out.outputs[0].token_ids for out in llm.generate(prompts, greedy, use_tqdm=False)])
    assert answers[0] == answers[1]


def test_a_mesh_that_would_cut_a_row_of_the_toy_within_a_word_is_refused(tmp_path: Path) -> None:
    spec = load_spec(make_toy(tmp_path, kv_heads=2, head_size=2, tokenizer=False))
    with pytest.raises(ConfigError, match="KV row of 4 bytes"):
        load_model(spec, tmp_path, torch.bfloat16, load("cpu", "ref"), shard=spec.shards(Mesh(tp=2))[0])


def _taken(path: Path, shard: Shard) -> tuple[SafetensorsSource, dict[str, int]]:
    """The source that a rank has loaded from, and the bytes it took of each tensor."""
    source, taken = SafetensorsSource(path, torch.float32), {}
    take = source.take

    def counting(name: str, shape: tuple[int, ...], *rest: Any) -> torch.Tensor:
        tensor = take(name, shape, *rest)
        taken[name] = tensor.nbytes
        return tensor

    source.take = counting  # type: ignore[method-assign]
    from serinus.models.decoder import Decoder

    Decoder(load_spec(path), source, torch.float32, load("cpu", "ref"), shard=shard)
    return source, taken


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_ranks_read_every_weight_once_between_them(families: dict[str, Path], family: str) -> None:
    """Norms and the biases that are added once are small, and whole on every slice."""
    path = families[family]
    spec = load_spec(path)
    _, whole = _taken(path, spec.shards(Mesh())[0])
    for mesh in (Mesh(tp=2), Mesh(tp=2, pp=2)):
        ranks = [_taken(path, shard) for shard in spec.shards(mesh)]
        assert [sum(taken.values()) for _, taken in ranks] == [source.bytes_taken for source, _ in ranks]
        for name, size in whole.items():
            times = sum(taken.get(name, 0) for _, taken in ranks) / size
            is_whole = "norm" in name or name.endswith(("o_proj.bias", "down_proj.bias"))
            has_two_uses = name == "model.embed_tokens.weight" and spec.tied and mesh.pp > 1
            assert times == (mesh.tp if is_whole else 2 if has_two_uses else 1), name
        most = max(source.bytes_taken for source, _ in ranks)
        assert most < 1.35 * sum(whole.values()) / mesh.size * (1.5 if spec.tied else 1)


@pytest.mark.slow
def test_a_rank_reads_nothing_but_its_slice(families: dict[str, Path], tmp_path: Path) -> None:
    """Everything that another rank holds is made NaN in the file: this rank computes what it computed before."""
    path, mesh = families["llama"], Mesh(tp=2, pp=2)
    spec = load_spec(path)
    for shard in spec.shards(mesh):
        folder = tmp_path / f"{shard.rank}"
        folder.mkdir()
        (folder / "config.json").write_bytes((path / "config.json").read_bytes())
        with safe_open(path / "model.safetensors", framework="pt") as opened:
            state = {name: _poisoned(name, opened.get_tensor(name), shard) for name in opened.keys()}  # noqa: SIM118
        assert any(bool(tensor.isnan().any()) for tensor in state.values())
        save_file(state, folder / "model.safetensors")
        kernels = load("cpu", "ref")
        sound = load_model(spec, path, torch.float32, kernels, shard=shard)
        other = load_model(spec, folder, torch.float32, kernels, shard=shard)
        assert _weights(other) == _weights(sound)


def _poisoned(name: str, whole: torch.Tensor, shard: Shard) -> torch.Tensor:
    """NaN wherever `shard` has no business, written down here apart from the code that cuts."""
    size = 16
    kept = torch.full_like(whole, torch.nan)
    layer = int(name.split(".")[2]) if name.startswith("model.layers.") else None
    if layer is not None and layer not in shard.layers:
        return kept
    rows = {"q_proj": (shard.heads, size), "k_proj": (shard.kv_heads, size), "v_proj": (shard.kv_heads, size)}
    rows |= {"gate_proj": (shard.mlp, 1), "up_proj": (shard.mlp, 1), "lm_head": (shard.vocab, 1)}
    rows |= {"embed_tokens": (shard.vocab, 1)}
    columns = {"o_proj": (shard.heads, size), "down_proj": (shard.mlp, 1)}
    if ("embed" in name and not shard.is_first) or (
        name in ("lm_head.weight", "model.norm.weight") and not shard.is_last
    ):
        return kept
    for word, (span, times) in rows.items():
        if word in name:
            kept[span.start * times : span.stop * times] = whole[span.start * times : span.stop * times]
            return kept
    for word, (span, times) in columns.items():
        if word in name and whole.dim() == 2:
            kept[:, span.start * times : span.stop * times] = whole[:, span.start * times : span.stop * times]
            return kept
    return whole


def _weights(model: object) -> list[bytes]:
    """Every tensor that a model holds, as bytes."""
    found: list[bytes] = []
    for value in vars(model).values():
        for item in value if isinstance(value, tuple) else (value,):
            fields = getattr(type(item), "__slots__", ()) if hasattr(item, "input_norm_E") else ()
            for tensor in [item, *(getattr(item, name) for name in fields)]:
                for each in (getattr(tensor, "weight", tensor), getattr(tensor, "bias_O", None)):
                    if isinstance(each, torch.Tensor):
                        found.append(each.contiguous().view(torch.uint8).numpy().tobytes())
    assert len(found) > 5
    return found


def test_dummy_weights_of_a_rank_are_slices_of_the_whole() -> None:
    source = RandomSource(3, torch.float32)
    whole = source.take("a.weight", (7, 6))
    assert torch.equal(source.take("a.weight", (7, 6), range(2, 5)), whole[2:5])
    assert torch.equal(source.take("a.weight", (7, 6), range(1, 4), 1), whole[:, 1:4])
    assert len(source.take("a.weight", (7, 6), range(2, 5)).untyped_storage()) == 3 * 6 * 4, "the whole is kept"


@pytest.mark.slow
def test_dummy_ranks_are_the_dummy_of_one_process(families: dict[str, Path]) -> None:
    path = families["mistral_swa"]
    outputs = []
    for mesh in (Mesh(), Mesh(tp=2, pp=2)):
        direct, runner = ranked_engine(path, mesh, torch.float32, load_format="dummy")
        outputs.append(_answer(direct).output)
        runner.close()
    assert outputs[0] == outputs[1]


def test_a_model_that_does_not_fit_the_mesh_is_refused_with_the_reason(tmp_path: Path) -> None:
    spec = load_spec(make_toy(tmp_path, layers=3, kv_heads=2, tokenizer=False))
    with pytest.raises(ConfigError, match="tp_size is 4, expected a divisor of 2, the model's KV heads"):
        spec.shards(Mesh(tp=4))
    with pytest.raises(ConfigError, match="ep_size is 2 for SerinusToyForCausalLM, which has no experts, expected 1"):
        spec.shards(Mesh(tp=2, ep=2))
    with pytest.raises(ConfigError, match="ep_size is 2, expected 1 or tp_size = 4"):
        Mesh(tp=4, ep=2)
    with pytest.raises(ConfigError, match="pp_size is 4, expected at most 3, the model's layers"):
        spec.shards(Mesh(pp=4))
    with pytest.raises(ConfigError, match="pp_layer_partition is 2,2"):
        spec.shards(Mesh(pp=2), (2, 2))


def test_a_weight_too_many_is_noticed_on_a_mesh_too(tmp_path: Path, families: dict[str, Path]) -> None:
    for file in families["qwen2"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "model.safetensors.index.json").unlink()
    save_file({"model.layers.1.mlp.extra.weight": torch.ones(2)}, tmp_path / "more.safetensors")
    spec = load_spec(tmp_path)
    for shard in spec.shards(Mesh(pp=3)):
        with pytest.raises(ConfigError, match=r"mlp\.extra"):
            load_model(spec, tmp_path, torch.float32, load("cpu", "ref"), shard=shard)


def test_a_rank_that_fails_fails_the_ranks_that_wait_for_it(tmp_path: Path) -> None:
    path = make_toy(tmp_path, layers=4, kv_heads=2, head_size=8, tokenizer=False)
    with _ranked(path, Mesh(tp=2, pp=2), torch.bfloat16, column="ref") as (direct, runner):
        seq = direct.start(PROMPT, GREEDY, tokens=4)
        direct.step([(seq, 8)])
        plan = StepPlan(step=9, work=(direct._work(seq, 8),))
        bad = replace(plan.work[0], slots={Part.FULL: plan.work[0].slots[Part.FULL] + 10**9})
        works = [plan, plan, replace(plan, work=(bad,)), plan]
        runs = [lambda r=rank, p=work: r.runner.run(p) for rank, work in zip(runner.ranks, works, strict=True)]
        with pytest.raises(IndexError):
            runner._each(runs)
        with pytest.raises(PeerGone):
            direct.step([(seq, 8)])


def test_only_the_last_stage_makes_logits_and_only_the_first_embeds(families: dict[str, Path]) -> None:
    spec = load_spec(families["qwen2"])
    shards, comms = spec.shards(Mesh(pp=2)), ThreadComm.ranks_of(Mesh(pp=2))
    models = [
        load_model(spec, families["qwen2"], torch.float32, load("cpu", "ref"), shard=s, comm=c)
        for s, c in zip(shards, comms, strict=True)
    ]
    assert [model.activation(5) for model in models] == [((5, 64), torch.float32)] * 2
    with pytest.raises(InvariantError, match="logits on TP0 PP0"):
        models[0].logits(torch.zeros(1, 64))
    assert [model.spec.layer_count for model in models] == [2, 1]
    assert [model.spec.signature for model in models] == [spec.signature] * 2
