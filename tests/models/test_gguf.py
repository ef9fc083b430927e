"""A GGUF file is the model that its blocks stand for: weights, config and tokenizer; what is not read is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from serinus.core.errors import ConfigError
from serinus.models import load_spec, make_checkpoint, resolve
from serinus.parallel import Mesh
from serinus.testing.ranked import ranked_engine
from serinus.testing.small_gguf import write_gguf
from serinus.text import load_tokenizer
from serinus.text.generation import tokenizer_eos_ids
from tests.cells import some
from tests.models.parity import (
    GREEDY,
    check_handed_over_with_a_prefix,
    engine,
    equals_transformers,
    random_ids,
    reference,
)

WIDE = {"hidden": 256, "intermediate": 512, "heads": 4, "layers": 2}
"""Whole superblocks of 256."""
MIXED = {"o_proj": "Q6_K", "down_proj": "Q4_K", "embed_tokens": "Q6_K", "lm_head": "Q8_0", "gate_proj": "Q4_0"}
ROUTED = {"gate": "F32"}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, str] | str]] = {
    "llama of all types": ("llama", {**WIDE, "attention_bias": True}, {**MIXED, "v_proj": "BF16", "up_proj": "F16"}),
    "llama of 8 bits": ("llama", {"tied": True, "vocab": 511, "tokenizer": False}, "Q8_0"),
    "mistral of 4 bits": ("mistral", {"heads": 8, "kv_heads": 2}, "Q4_0"),
    "qwen2 with YaRN": ("qwen2_yarn", {"hidden": 256, "heads": 8}, "Q4_K"),
    "qwen3": ("qwen3", {"tied": True, "head_size": 32}, "F16"),
    "gemma": ("gemma", {"tied": True, "head_size": 32}, "Q8_0"),
    "gemma2": ("gemma2", {"tied": True, "layers": 4, "query_pre_attn_scalar": 32, "head_size": 32}, "Q4_0"),
    "mixtral": ("mixtral", {**WIDE, "spread": 1.5, "shards": 2}, {**MIXED, **ROUTED, "w2": "Q6_K", "w3": "Q4_K"}),
    "qwen2 with experts": (
        "qwen2_moe",
        {**WIDE, "layers": 3, "moe_intermediate_size": 256, "vocab": 511, "tokenizer": False},
        ROUTED,
    ),
    "qwen3 with experts": ("qwen3_moe", {"tied": True, "moe_intermediate_size": 96}, {**ROUTED, "up_proj": "Q4_0"}),
    "gemma3": (
        "gemma3_text",
        {"tied": True, "layers": 7, "kv_heads": 1, "head_size": 32, "query_pre_attn_scalar": 32},
        "F32",
    ),
}


@pytest.fixture(autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where folders of GGUF files are kept."""
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))


def written(tmp_path: Path, case: str, **metadata: Any) -> tuple[Path, Path]:
    """The file, and a checkpoint in transformers' form with the same weights."""
    family, size, kinds = CASES[case]
    made = make_checkpoint(tmp_path / "made", family, **size)
    file = tmp_path / "small.gguf"

    def kind_of(name: str) -> str:
        return kinds if isinstance(kinds, str) else kinds.get(name.split(".")[-2], "Q8_0")

    weights = write_gguf(made, file, kind_of, **metadata)
    plain = tmp_path / "plain"
    plain.mkdir()
    less = 1.0 if family.startswith("gemma") else 0.0
    tensors = {
        name: torch.from_numpy(values) - (less if name.endswith("norm.weight") else 0.0)
        for name, values in weights.items()
    }
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    (plain / "config.json").write_text((made / "config.json").read_text())
    return file, plain


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    some(CASES, "mistral of 4 bits", "gemma"),
)
def test_a_file_gives_the_logits_and_tokens_of_what_its_blocks_stand_for(tmp_path: Path, case: str) -> None:
    file, plain = written(tmp_path, case)
    equals_transformers(Path(resolve(str(file))), "auto", plain=plain)


@pytest.mark.slow
def test_wavelengths_that_a_file_stretches_one_by_one_are_those_of_llama_3(tmp_path: Path) -> None:
    """llama.cpp has no parameters of it, but the factors that they give."""
    import gguf
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.configuration_llama import LlamaConfig

    made = make_checkpoint(tmp_path / "made", "llama3", tokenizer=False)
    config = LlamaConfig.from_pretrained(made)
    stretched, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 500000.0 ** -(torch.arange(0, 16, 2) / 16)
    add = gguf.GGUFWriter.add_tensor

    def with_factors(writer: Any, name: str, *args: Any, **given: Any) -> None:
        if name == "token_embd.weight":
            add(writer, "rope_freqs.weight", (plain / stretched).numpy())
        add(writer, name, *args, **given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "add_tensor", with_factors)
        write_gguf(made, tmp_path / "small.gguf", lambda _: "F32")
    equals_transformers(Path(resolve(str(tmp_path / "small.gguf"))), "auto", plain=made)


@pytest.mark.slow
@pytest.mark.proof
def test_ranks_have_parts_of_a_file(tmp_path: Path) -> None:
    for case in ("llama of all types", "gemma2", "mixtral", "qwen2 with experts"):
        file, plain = written(tmp_path / case, case)
        tokens, prompt = [], random_ids(33, 60)
        for mesh in (Mesh(tp=2), Mesh(pp=2)):
            direct, runner = ranked_engine(Path(resolve(str(file))), mesh, torch.float32)
            tokens += direct.generate([direct.start(prompt, GREEDY, tokens=30)], 20)
            runner.close()
        expected = reference(plain, prompt + tokens[0][:-1], torch.float32)[len(prompt) - 1 :].argmax(-1).tolist()
        assert tokens == [expected, expected], case


@pytest.mark.slow
@pytest.mark.proof
@pytest.mark.parametrize("case", ["qwen3", "qwen3 with experts"])
def test_prompts_of_a_file_are_handed_over_behind_a_prefix(tmp_path: Path, case: str) -> None:
    file, plain = written(tmp_path, case)
    check_handed_over_with_a_prefix(file, plain=plain)


@pytest.mark.slow
def test_a_file_is_quantized_at_load_where_that_is_asked_for(tmp_path: Path) -> None:
    file, plain = written(tmp_path, "qwen2 with YaRN")
    prompt, found = random_ids(5, 80), []
    for path in (Path(resolve(str(file))), plain):
        direct, model = engine(path, torch.float32, quantization="int8")
        direct.generate([direct.start(prompt, GREEDY, tokens=20)], 10)
        found.append(torch.cat(model.seen))
    assert torch.equal(found[0], found[1])


def test_integers_are_kept_where_most_weights_are_of_such_a_type(tmp_path: Path) -> None:
    said = {}
    for case in ("llama of 8 bits", "mistral of 4 bits", "qwen2 with YaRN", "qwen3"):
        spec = load_spec(resolve(str(written(tmp_path / case, case)[0])))
        said[case] = None if spec.quantization is None else (spec.quantization.bits, spec.quantization.group)
    text = "gguf: linears of Q8_0 and Q4_0 as they are (most of 8 bits), others dequantized"
    spec = load_spec(resolve(str(tmp_path / "llama of 8 bits" / "small.gguf")))
    assert spec.quantization is not None
    assert spec.quantization.text == text
    assert said == {"llama of 8 bits": (8, 32), "mistral of 4 bits": (4, 32), "qwen2 with YaRN": (16, 0), "qwen3": None}


@pytest.mark.slow
@pytest.mark.parametrize("case", ["mistral of 4 bits", "mixtral", "qwen3 with experts"])
def test_the_tokenizer_of_a_file_is_that_of_the_checkpoint(tmp_path: Path, case: str) -> None:
    file, _ = written(tmp_path, case)
    ours, theirs = load_tokenizer(str(file)), load_tokenizer(str(tmp_path / "made"))
    text = "Le serin chante, {x: 1}. <|im_start|>user\n金丝雀 🐤<|im_end|><|endoftext|>"
    assert ours.vocab_size == theirs.vocab_size
    assert ours.added_texts == theirs.added_texts
    assert ours.encode(text) == theirs.encode(text)
    assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))
    messages = [{"role": "user", "content": "hello"}]
    assert ours.template is not None
    assert theirs.template is not None
    assert ours.template.render(messages) == theirs.template.render(messages)
    assert ours.texts == {name: theirs.texts[name] for name in ("bos_token", "eos_token", "pad_token")}
    folder = resolve(str(file))
    assert tokenizer_eos_ids(str(file)) == tokenizer_eos_ids(folder) == load_spec(folder).eos_ids == (2,)
    assert load_tokenizer(folder).encode(text) == theirs.encode(text)


def test_a_file_that_is_replaced_is_read_anew(tmp_path: Path) -> None:
    made = make_checkpoint(tmp_path / "made", "qwen3", tokenizer=False)
    found = []
    for length in (512, 1024):
        write_gguf(made, tmp_path / "small.gguf", lambda _: "F32", context_length=length)
        found.append(load_spec(resolve(str(tmp_path / "small.gguf"))).context_length)
    assert found == [512, 1024]


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"expert_count": 8}, r"no metadata llama.expert_used_count"),
        ({"expert_count": 8, "expert_used_count": 2}, r"no tensor 'blk.0.ffn_gate_exps.weight'"),
        ({"expert_count": 8, "expert_used_count": 2, "expert_gating_func": 2}, r"expert_gating_func is 2, expected 1"),
        ({"rope__dimension_count": 8}, r"llama.rope.dimension_count is 8, expected 16"),
        (
            {"rope__scaling__type": "longrope"},
            r"rope.scaling.type is 'longrope', expected 'none' or 'linear' or 'yarn'",
        ),
        ({"rope__scaling__type": "linear"}, r"has no metadata llama.rope.scaling.factor"),
        ({"attention__head_count": 3}, r"num_key_value_heads"),
        ({"attention__causal": 0}, r"llama.attention.causal is 0, expected True"),
    ],
)
def test_metadata_that_no_family_has_a_word_for_is_refused(tmp_path: Path, metadata: dict[str, Any], said: str) -> None:
    made = make_checkpoint(tmp_path / "made", "llama", tokenizer=False)
    write_gguf(made, tmp_path / "small.gguf", lambda _: "F32", **metadata)
    with pytest.raises(ConfigError, match=said):
        load_spec(resolve(str(tmp_path / "small.gguf")))


@pytest.mark.slow
def test_a_model_cut_into_parts_is_read_by_its_first_one(tmp_path: Path) -> None:
    made = make_checkpoint(tmp_path / "made", "qwen3_moe", tokenizer=False, spread=1.5)
    write_gguf(made, tmp_path / "small.gguf", lambda _: "F32", parts_of=9)
    first, second, *others = sorted(tmp_path.glob("small-0000*.gguf"))
    assert len(others) == 1
    (tmp_path / "cache").mkdir()
    for i, part in enumerate((first, second, *others)):  # as a hub keeps them: files by their digests, links by names
        part.rename(tmp_path / "cache" / str(i))
        part.symlink_to(tmp_path / "cache" / str(i))
    equals_transformers(Path(resolve(str(first))), "auto", plain=made)
    with pytest.raises(ConfigError, match=r"is part 2 of 3, expected the first, small-00001-of-00003.gguf"):
        resolve(str(second))
    whole = (tmp_path / "cache" / "1").read_bytes()
    (tmp_path / "cache" / "1").write_bytes((tmp_path / "cache" / "2").read_bytes())
    with pytest.raises(ConfigError, match=r"says it is part 3 of 3, expected 2 of 3"):
        resolve(str(first))
    (tmp_path / "cache" / "1").write_bytes(whole[:-5000])
    with pytest.raises(ConfigError, match=r"small-00002-of-00003.gguf cannot be read"):
        resolve(str(first))
    second.unlink()
    with pytest.raises(ConfigError, match=r"is part 1 of 3, expected small-00002-of-00003.gguf beside it"):
        resolve(str(first))
    alone = tmp_path / "alone.gguf"
    alone.write_bytes(first.read_bytes())
    with pytest.raises(ConfigError, match=r"says it is part 1 of 3, expected 1 of 1"):
        resolve(str(alone))


def test_types_architectures_and_damage_are_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "small.gguf"
    made = make_checkpoint(tmp_path / "made", "llama", tokenizer=False, layers=1)
    write_gguf(made, file, lambda name: "MXFP4" if "down_proj" in name else "F32")
    with pytest.raises(ConfigError, match=r"tensors of type MXFP4, expected F32, F16, BF16, Q8_0"):
        resolve(str(file))
    write_gguf(made, file, lambda _: "Q8_0")
    whole = file.read_bytes()
    for length in (0, 3, 100, 3000, len(whole) - 5000):
        file.write_bytes(whole[:length])
        with pytest.raises(ConfigError, match=r"small.gguf cannot be read .*expected a complete GGUF file"):
            resolve(str(file))
    write_gguf(made, file, lambda _: "Q8_0", block_count=2)
    with pytest.raises(ConfigError, match=r"tensor 'model.layers.1.* is missing from .*small.gguf"):
        engine(Path(resolve(str(file))), torch.float32)
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps({**config, "model_type": "phi2"}))
    (made / "model.safetensors").unlink()
    write_gguf(made, file, lambda _: "F32")
    with pytest.raises(ConfigError, match=r"of architecture 'phi2', expected one of gemma, gemma2"):
        resolve(str(file))
    with pytest.raises(ConfigError, match=r"has no tokenizer.ggml.tokens, expected a tokenizer in it"):
        load_tokenizer(str(file))


def test_a_tensor_that_the_architecture_has_no_place_for_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    made = make_checkpoint(tmp_path / "made", "qwen2", tokenizer=False)
    tensors = load_file(made / "model.safetensors")
    tensors["model.layers.1.self_attn.o_proj.bias"] = torch.ones(64)
    save_file(tensors, made / "model.safetensors")
    write_gguf(made, tmp_path / "small.gguf", lambda _: "F32")
    with pytest.raises(ConfigError, match=r"holds 1 tensors .* 'blk.1.attn_output.bias', expected none"):
        engine(Path(resolve(str(tmp_path / "small.gguf"))), torch.float32)


def test_a_folder_that_another_user_could_write_to_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    from serinus.core.gguf_file import gguf_folder

    file = tmp_path / "small.gguf"
    file.write_bytes(b"GGUF")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "other"))
    mine = Path.home() / ".cache" / "serinus" / f"serinus-{os.getuid()}-gguf"
    folder = gguf_folder(file)
    assert folder.parent == mine
    assert (folder / "model.gguf").resolve() == file
    assert gguf_folder(file) == folder
    mine.chmod(0o777)
    assert gguf_folder(file).parent.parent == tmp_path / "other"
    mine.rename(tmp_path / "elsewhere")
    mine.symlink_to(tmp_path / "elsewhere")
    assert gguf_folder(file).parent.parent == tmp_path / "other"
