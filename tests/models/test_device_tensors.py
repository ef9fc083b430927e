"""Weights read to a device by several threads: what the mapped files hold, in whole and in spans, and the same digests.
The threads are those of a GPU's; the device is a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from serinus.core.errors import ConfigError
from serinus.kernels import load
from serinus.models import TensorDigests, load_model, load_spec, make_checkpoint
from serinus.models.device_reader import DeviceReader
from serinus.models.weight_digests import PIECE_BYTES
from serinus.models.weights import SafetensorsSource
from serinus.parallel.comm import SoloComm

LARGE = PIECE_BYTES // 2 * 5 // 2 + 33
"""Elements of two bytes that are two pieces and a half."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tensors of several sizes, types and shapes, in two files."""
    path, chance = tmp_path_factory.mktemp("tensors"), torch.Generator().manual_seed(1)

    def some(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape, generator=chance).to(dtype)

    one = {f"model.layers.{i}.w": some(33, 40) for i in range(12)} | {"model.scale": some(), "model.none": some(0, 4)}
    save_file(one, path / "a.safetensors")
    save_file(
        {"model.large": some(LARGE // 33, 33), "model.fp32": some(7, 3, dtype=torch.float32)}, path / "b.safetensors"
    )
    return path


def source(
    folder: Path, *, threaded: bool, ahead: bool = False, digests: TensorDigests | None = None
) -> SafetensorsSource:
    reader = DeviceReader("cpu", threads=3) if threaded else None
    return SafetensorsSource(folder, torch.bfloat16, digests=digests, reader=reader, ahead=ahead)


def names_and_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            found |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    return found


@pytest.mark.parametrize("ahead", [False, True])
def test_several_threads_read_what_the_mapped_files_hold(folder: Path, *, ahead: bool) -> None:
    shapes, said = names_and_shapes(folder), []
    for order in (sorted(shapes), sorted(shapes, reverse=True)):
        digests = [TensorDigests(), TensorDigests()]
        plain = source(folder, threaded=False, digests=digests[0])
        threaded = source(folder, threaded=True, ahead=ahead, digests=digests[1])
        for name in order:
            expected, found = (each.take(name, shapes[name]) for each in (plain, threaded))
            assert torch.equal(found, expected), name
            assert found.is_contiguous()
        threaded.finish(lambda _: False)
        assert threaded.bytes_taken == plain.bytes_taken
        said += [each.of_model(SoloComm()) for each in digests]
    assert len(set(said)) == 1


@pytest.mark.parametrize("digested", [False, True])
def test_a_span_of_rows_or_columns_is_that_of_the_whole(folder: Path, *, digested: bool) -> None:
    shape = names_and_shapes(folder)["model.large"]
    for dim, span in ((0, range(5, shape[0] // 3)), (1, range(11, 30))):
        plain = source(folder, threaded=False)
        threaded = source(folder, threaded=True, digests=TensorDigests() if digested else None)
        expected, found = (each.take("model.large", shape, span, dim) for each in (plain, threaded))
        assert torch.equal(found, expected)
        assert found.is_contiguous()


def test_of_rows_of_a_rank_nothing_else_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    begin = DeviceReader.begin

    def watched(self: DeviceReader, file: Path, offset: int, count: int, *, digested: bool = False) -> object:
        asked.append(count)
        return begin(self, file, offset, count, digested=digested)

    monkeypatch.setattr(DeviceReader, "begin", watched)
    source(folder, threaded=True).take("model.layers.1.w", (33, 40), range(3, 8))
    assert asked == [5 * 40 * 2]


def test_a_file_that_ends_while_it_is_read_and_another_shape_are_refused(folder: Path, tmp_path: Path) -> None:
    for file in folder.glob("*.safetensors"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    begun = source(tmp_path, threaded=True)
    begun.take("model.fp32", (7, 3))
    with (tmp_path / "b.safetensors").open("r+b") as opened:
        opened.truncate(PIECE_BYTES)
    with pytest.raises(ConfigError, match=r"b\.safetensors cannot be read for tensor 'model.large' \(it ends"):
        begun.take("model.large", (LARGE // 33, 33))
    with pytest.raises(ConfigError, match=r"has shape \[33, 40\], expected \[40, 33\]"):
        begun.take("model.layers.1.w", (40, 33))


def test_a_load_that_fails_leaves_nothing_on_its_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was read ahead goes to memory that another tensor gets after it."""
    path = make_checkpoint(tmp_path, "llama", tokenizer=False, tie_word_embeddings=False)
    state = load_file(path / "model.safetensors")
    del state["model.layers.1.mlp.down_proj.weight"]
    save_file(state, path / "model.safetensors")
    readers: list[DeviceReader] = []
    begin = SafetensorsSource.__init__

    def threaded(self: SafetensorsSource, *words: Any, **more: Any) -> None:
        readers.append(DeviceReader("cpu", threads=3))
        begin(self, *words, reader=readers[-1], **more)

    monkeypatch.setattr(SafetensorsSource, "__init__", threaded)
    with pytest.raises(ConfigError, match="down_proj"):
        load_model(load_spec(path), path, torch.float32, load("cpu", "ref"))
    with pytest.raises(RuntimeError, match="after shutdown"):
        readers[0].begin(path / "config.json", 0, 1)


def test_a_model_that_threads_have_read_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused, cut and normalised weights, of a dense model, a mixture and MXFP4."""
    kernels, begin = load("cpu", "ref"), SafetensorsSource.__init__
    for family in ("gemma2", "qwen3_moe", "phi3"):
        path = make_checkpoint(tmp_path / family, family, tokenizer=False, shards=2)
        spec = load_spec(path)
        plain = load_model(spec, path, torch.float32, kernels)
        with monkeypatch.context() as patch:
            patch.setattr(
                SafetensorsSource, "__init__",
                lambda self, *words, **more: begin(self, *words, reader=DeviceReader("cpu", threads=3), **more),
            )  # fmt: skip
            threaded = load_model(spec, path, torch.float32, kernels)
        hidden = torch.randn(3, spec.hidden_size)
        for one, other in zip(plain._layers, threaded._layers, strict=True):  # type: ignore[attr-defined]
            assert torch.equal(kernels.linear(hidden, one.qkv), kernels.linear(hidden, other.qkv))
        one, other = (model.logits(hidden.clone()) for model in (plain, threaded))
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)
