"""Each thing that can be wrong with a checkpoint is refused before anything starts, in words that say what."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from serinus.core.errors import ConfigError
from serinus.kernels import load
from serinus.models import Model, load_model, load_spec, resolve

WEIGHTS = "model.safetensors"


@pytest.fixture
def broken(checkpoints: dict[str, Path], tmp_path: Path) -> Path:
    """A good checkpoint in a place where it may be broken."""
    return Path(shutil.copytree(checkpoints["llama"], tmp_path / "broken"))


@pytest.fixture
def sharded(checkpoints: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoints["llama3"], tmp_path / "sharded"))


def load_it(path: Path) -> Model:
    return load_model(load_spec(path), path, torch.float32, load("cpu", "ref"))


def edit_config(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    config.update(changes)
    (path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v != "drop"}))


def edit_tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    with safe_open(path / WEIGHTS, framework="pt") as opened:
        tensors = {name: opened.get_tensor(name).clone() for name in opened.keys()}  # noqa: SIM118
    change(tensors)
    save_file(tensors, path / WEIGHTS)


def test_the_untouched_checkpoint_loads(broken: Path, sharded: Path) -> None:
    assert load_it(broken).spec.mlp_bias
    assert load_it(sharded).spec.rope.kind == "llama3"


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no checkpoint at .*nowhere.*expected a directory with a config.json"):
        load_spec(tmp_path / "nowhere")


def test_a_missing_config_is_named(broken: Path) -> None:
    (broken / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"config\.json is missing"):
        load_spec(broken)


@pytest.mark.parametrize("text", ["{", "[]", "\x00", '"llama"'])
def test_a_config_that_is_no_json_object_is_refused(broken: Path, text: str) -> None:
    (broken / "config.json").write_text(text)
    with pytest.raises(ConfigError, match="expected a JSON object"):
        load_spec(broken)


def test_an_unknown_architecture_is_refused_with_the_list_of_known_ones(broken: Path) -> None:
    edit_config(broken, architectures=["GPT3LMHeadModel"])
    with pytest.raises(ConfigError) as caught:
        load_spec(broken)
    for name in ("GPT3LMHeadModel", "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        assert name in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", "drop"),
        ("num_hidden_layers", "drop"),
        ("num_attention_heads", "drop"),
        ("intermediate_size", "drop"),
        ("vocab_size", "drop"),
        ("max_position_embeddings", "drop"),
        ("architectures", "drop"),
        ("architectures", []),
        ("hidden_size", 0),
        ("hidden_size", "64"),
        ("num_hidden_layers", -2),
        ("num_hidden_layers", 10**12),
        ("num_attention_heads", 1.5),
        ("num_key_value_heads", 3),
        ("vocab_size", True),
        ("head_dim", 15),
        ("hidden_act", "gelu"),
        ("rms_norm_eps", "small"),
        ("rms_norm_eps", float("nan")),
        ("tie_word_embeddings", "yes"),
        ("dtype", "int8"),
        ("quantization_config", {"bits": 4}),
        ("rope_parameters", [1]),
    ],
)
def test_a_missing_or_wrong_field_is_named_with_its_value(broken: Path, field: str, value: Any) -> None:
    edit_config(broken, **{field: value})
    with pytest.raises(ConfigError, match=f"field '{field}' is .*expected"):
        load_spec(broken)


@pytest.mark.parametrize("name", ["ntk", "alibi", ""])
def test_an_unknown_rope_type_is_refused(broken: Path, name: str) -> None:
    edit_config(broken, rope_parameters={"rope_type": name, "rope_theta": 1e4, "factor": 2.0})
    with pytest.raises(ConfigError, match=f"rope type '{name}' is not known, expected default, linear, llama3 or"):
        load_spec(broken)


def test_llama3_rope_without_its_factor_is_refused(broken: Path) -> None:
    edit_config(broken, rope_parameters={"rope_type": "llama3", "rope_theta": 1e4})
    with pytest.raises(ConfigError, match="field 'factor' is nothing, expected a positive number"):
        load_spec(broken)


def test_a_checkpoint_without_weights_is_refused(broken: Path) -> None:
    (broken / WEIGHTS).unlink()
    with pytest.raises(ConfigError, match=r"no weight file, expected model\.safetensors"):
        load_it(broken)


def test_a_pickle_is_never_loaded(broken: Path) -> None:
    (broken / WEIGHTS).unlink()
    (broken / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(ConfigError, match=r"only 'pytorch_model\.bin', which is pickle and never loaded"):
        load_it(broken)


@pytest.mark.parametrize("keep", [0, 4, 200, 0.5, 0.999])
def test_a_truncated_file_is_refused(broken: Path, keep: float) -> None:
    data = (broken / WEIGHTS).read_bytes()
    (broken / WEIGHTS).write_bytes(data[: int(keep if keep >= 4 else keep * len(data))])
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read .*expected a complete safetensors file"):
        load_it(broken)


def test_a_file_of_noise_is_refused(broken: Path) -> None:
    (broken / WEIGHTS).write_bytes(b"\xff" * 4096)
    with pytest.raises(ConfigError, match="expected a complete safetensors file"):
        load_it(broken)


def test_a_missing_tensor_is_named_with_the_shape_it_should_have(broken: Path) -> None:
    edit_tensors(broken, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"'model\.layers\.1\.mlp\.up_proj\.weight' is missing.*\[192, 64\]"):
        load_it(broken)


def test_a_misshapen_tensor_is_named_with_both_shapes(broken: Path) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    edit_tensors(broken, lambda t: t.update({name: t[name][:-1].clone()}))
    with pytest.raises(ConfigError, match=r"k_proj\.weight' has shape \[31, 64\], expected \[32, 64\]"):
        load_it(broken)


def test_an_integer_tensor_is_refused(broken: Path) -> None:
    edit_tensors(broken, lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int32)}))
    with pytest.raises(ConfigError, match=r"dtype torch\.int32, expected float32, bfloat16 or float16"):
        load_it(broken)


def test_a_tensor_the_config_has_no_place_for_is_refused(broken: Path) -> None:
    edit_config(broken, mlp_bias=False)  # the weights have MLP biases: leaving them out would be silently wrong
    with pytest.raises(ConfigError, match=r"6 tensors that its config\.json has no place for, e\.g\. .*proj\.bias"):
        load_it(broken)


def test_old_rotary_buffers_are_no_surprise(broken: Path) -> None:
    edit_tensors(broken, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    assert load_it(broken).spec.layer_count == 2


def test_an_untied_config_needs_its_own_head(broken: Path) -> None:
    edit_tensors(broken, lambda t: t.pop("lm_head.weight"))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"'lm_head\.weight' is missing"):
        load_it(broken)


def test_a_missing_shard_is_named(sharded: Path) -> None:
    (sharded / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model-00002-of-00003\.safetensors is missing, expected it as model"):
        load_it(sharded)


@pytest.mark.parametrize("text", ["{", "{}", '{"weight_map": [1]}', '{"weight_map": null}'])
def test_a_broken_index_is_refused(sharded: Path, text: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ConfigError, match=r"index\.json cannot be read .*expected a weight_map"):
        load_it(sharded)


@pytest.mark.parametrize("name", ["../elsewhere.safetensors", "model.bin"])
def test_an_index_cannot_point_outside_the_directory_or_to_a_pickle(sharded: Path, name: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    with pytest.raises(ConfigError, match=r"expected \*\.safetensors beside it"):
        load_it(sharded)


def test_an_index_that_names_the_wrong_shard_is_refused(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    names = json.loads(index.read_text())
    names["weight_map"]["lm_head.weight"] = "model-00003-of-00003.safetensors"
    index.write_text(json.dumps(names))
    with pytest.raises(ConfigError, match=r"cannot be read for tensor 'lm_head\.weight'"):
        load_it(sharded)


def test_an_unknown_load_format_is_refused(broken: Path) -> None:
    with pytest.raises(ConfigError, match="load_format 'pickle', expected auto, safetensors or dummy"):
        load_model(load_spec(broken), broken, torch.float32, load("cpu", "ref"), load_format="pickle")


def test_a_path_that_is_a_file_is_refused(broken: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"is a file, expected a directory with config.json, a GGUF file .* or a hub id"
    ):
        resolve(str(broken / "config.json"))


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/dir", "a/b/c", "org/na me", "none.gguf", ""])
def test_what_is_neither_directory_nor_hub_id_is_refused_without_asking_the_network(name: str) -> None:
    with pytest.raises(ConfigError, match=r"no (directory|file) .*expected a directory with config.json, .* hub id"):
        resolve(name)


def test_a_directory_resolves_to_itself(broken: Path) -> None:
    assert resolve(str(broken)) == str(broken)


@pytest.mark.slow
def test_what_is_no_part_of_the_checkpoint_is_not_read(broken: Path, sharded: Path) -> None:
    """As transformers does: beside an index what it does not name, else what is not model.safetensors."""
    for folder in (broken, sharded):
        (folder / "consolidated.safetensors").write_bytes(b"noise")
        save_file({"model.norm.weight": torch.zeros(64)}, folder / "zeros.safetensors")
        assert load_it(folder).spec.layer_count == 2


class Hub:
    """Stands for the hub: the files of one repository, and what was fetched of them."""

    def __init__(self, repository: Path, cache: Path) -> None:
        self._repository, self._cache = repository, cache

    def snapshot_download(
        self, hub_id: str, *, revision: str | None, allow_patterns: list[str], ignore_patterns: Sequence[str] = ()
    ) -> str:
        assert (hub_id, revision) == ("org/name", "main")
        self._cache.mkdir(exist_ok=True)
        for file in self._repository.iterdir():
            wanted, not_wanted = (
                any(fnmatch(file.name, pattern) for pattern in each) for each in (allow_patterns, ignore_patterns)
            )
            if wanted and not not_wanted:
                (self._cache / file.name).write_bytes(file.read_bytes())
        return str(self._cache)


@pytest.mark.parametrize("how", ["sharded", "one file", "one file of another name"])
def test_of_a_hub_id_only_the_weights_that_are_loaded_are_fetched(
    broken: Path, sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    repository = sharded if how == "sharded" else broken
    if how == "one file of another name":
        (repository / WEIGHTS).rename(repository / "weights.safetensors")
    wanted = {file.name for file in repository.glob("*.safetensors")}
    for name in ("consolidated.safetensors", "consolidated-00001-of-00002.safetensors", "model.bin", "code.py"):
        (repository / name).write_bytes(b"as large as the rest")
    hub = Hub(repository, tmp_path / "cache")
    monkeypatch.setattr("huggingface_hub.snapshot_download", hub.snapshot_download)
    folder = Path(resolve("org/name", "main"))
    assert {file.name for file in folder.iterdir() if file.suffix != ".json"} - {"tokenizer.model"} == wanted
    assert load_it(folder).spec.layer_count == 2


def test_a_hub_id_that_cannot_be_fetched_is_a_setting_that_is_wrong(tmp_path: Path) -> None:
    code = "from serinus.models import resolve; resolve('serinus-tests/no-such-model')"
    away = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=away)
    assert "serinus.core.errors.ConfigError: models: 'serinus-tests/no-such-model' is no local" in found.stderr
    assert "could not be fetched from the hub" in found.stderr
