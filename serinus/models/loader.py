"""From a ModelSpec to a Model that runs: which class, which weights, which dtype."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import torch

from serinus.core.errors import ConfigError
from serinus.core.gguf_file import GGUF_LINK
from serinus.core.log import get_logger
from serinus.core.parts import Part
from serinus.kernels import Kernels, LayersKv, load
from serinus.models.batch import ForwardBatch
from serinus.models.decoder import Decoder
from serinus.models.expert_weights import multiplies_integers
from serinus.models.gguf_files import GgufSource
from serinus.models.hooks import ForwardHook
from serinus.models.interleaved import MXFP4
from serinus.models.layers import take_weights
from serinus.models.quantized import QuantizingSource
from serinus.models.quantized_files import QuantizedFiles
from serinus.models.spec import TOY_ARCHITECTURE, ModelSpec
from serinus.models.toy import ToyModel
from serinus.models.transformers_model import TransformersModel
from serinus.models.weight_digests import TensorDigests
from serinus.models.weight_files import file_of_each
from serinus.models.weights import RandomSource, SafetensorsSource, WeightSource
from serinus.parallel import Mesh, Shard
from serinus.parallel.comm import Comm

_log = get_logger("models")
_KV_DTYPES = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Model(Protocol):
    """What the runner asks of a model, or of one rank's share of it."""

    spec: ModelSpec
    """What this rank runs (ModelSpec.on)."""
    dtype: torch.dtype
    """Element type of activations, and of its KV where pools are not FP8."""
    has_kv_scales: bool
    """Whether its checkpoint has scales for KV in FP8."""

    def activation(self, token_count: int) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of what goes from stage to stage for so many tokens."""

    def forward(
        self,
        batch: ForwardBatch,
        kv: LayersKv,
        tables: Mapping[Part, torch.Tensor],
        hook: ForwardHook,
        inflow: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write the step's KV (kv[i] is that of layer i of this rank, whatever its part; tables by part,
        req_to_token). `inflow`: what the stage before returned. Returns what the next stage takes; on the last one
        hidden states [W, E] of the wanted rows (all T where batch.wanted_W is None)."""

    def logits(self, hidden_BE: torch.Tensor) -> torch.Tensor | None:
        """[B, V], fp32 or bf16, on slice 0 of the last stage; None on its other slices, which call it as well."""

    def final_hidden(self, hidden_BE: torch.Tensor) -> torch.Tensor | None:
        """[B, E] behind the final norm, on the last stage; None = this model does not give it out."""
        ...


def choose_dtype(spec: ModelSpec, name: str = "auto", device: str = "cpu") -> torch.dtype:
    """The element type of weights and activations.

    `auto` is bfloat16 wherever the device computes in it (and for the toy, which computes nothing). Elsewhere a GPU
    takes float16, and a CPU float32; Gemma models take float32 there too: float16 cannot hold their activations.
    Raises: ConfigError for another name, and for float16 on a CPU or with a Gemma.
    """
    is_gemma = spec.architecture.startswith("Gemma")
    if name == "float16" and (device == "cpu" or is_gemma):
        where = f"for {spec.architecture}, whose activations are too large for it" if is_gemma else "on a CPU"
        raise ConfigError(f"models: dtype 'float16' {where}, expected auto, float32 or bfloat16")
    if name in _DTYPES:
        return _DTYPES[name]
    if name != "auto":
        raise ConfigError(f"models: dtype {name!r}, expected auto, {', '.join(_DTYPES)}")
    if spec.architecture == TOY_ARCHITECTURE or _has_bf16(device):
        return torch.bfloat16
    return torch.float32 if device == "cpu" or is_gemma else torch.float16


def choose_kv_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """The element type of KV, by the setting, for a model computed in `dtype`."""
    return dtype if name == "auto" else _KV_DTYPES[name]


def _has_bf16(device: str) -> bool:
    """Whether a device computes in bfloat16: CPUs by their instructions, GPUs since compute capability 8.0."""
    if device == "cpu":
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return torch.cuda.get_device_capability(device) >= (8, 0)


def load_model(
    spec: ModelSpec,
    path: str | Path,
    dtype: torch.dtype,
    kernels: Kernels,
    *,
    load_format: str = "auto",
    seed: int = 0,
    positions: int | None = None,
    device: str = "cpu",
    shard: Shard | None = None,
    comm: Comm | None = None,
    digests: TensorDigests | None = None,
    tell: Callable[[int, int], object] = lambda done, total: None,
) -> Model:
    """Load a checkpoint's weights (or make them from a seed) and pack them for the kernels.

    Args:
        spec: from `load_spec(path)`.
        path: directory of the checkpoint.
        dtype: from `choose_dtype`.
        kernels: ops of the device.
        load_format: `auto` reads *.safetensors or a GGUF file, `safetensors` the first alone; `dummy` makes random
            weights from `seed`.
        positions: longest sequence that will run; None = spec.context_length.
        device: where the weights go; that of `kernels`.
        shard: what this rank holds, from `spec.shards(mesh)`; None = everything. Nothing else is read of the files.
        comm: to the other ranks of the mesh.
        digests: are made of the tensors of a checkpoint; dummy and toy models are known by their seed.
        tell: is told bytes of the files that were taken, and all that they have, at every tensor.
    Raises:
        ConfigError: missing or truncated files, missing, misshapen or unexpected tensors, pickle only.
    Cost: reads the weights of this rank once; resident afterwards: packed weights and what is touched of the mapped
    embedding.
    """
    if load_format not in ("auto", "safetensors", "dummy"):
        raise ConfigError(f"models: load_format {load_format!r}, expected auto, safetensors or dummy")
    if spec.architecture == TOY_ARCHITECTURE:
        return ToyModel(spec, dtype, shard=shard, comm=comm)
    dummy = load_format == "dummy"
    if spec.through_transformers:
        made = seed if dummy else None
        return TransformersModel(spec, Path(path), dtype, kernels, device=device, dummy_seed=made, digests=digests)
    whole = shard is None or (shard.tp == 1 and shard.is_first and shard.is_last)
    files: SafetensorsSource | RandomSource | GgufSource
    if dummy:
        mxfp4 = spec.quantization is not None and spec.quantization.method == MXFP4
        files = RandomSource(seed, dtype, device, norm_weight=0.0 if spec.norm_plus_one else 1.0, mxfp4=mxfp4)
    elif load_format == "auto" and (Path(path) / GGUF_LINK).exists():
        files = GgufSource(Path(path), spec, dtype, device, digests, tell)
    else:
        files = SafetensorsSource(Path(path), dtype, device, digests, spec.prefix, ahead=whole, tell=tell)
    try:
        source = _source(spec, files, kernels, dtype)
        return Decoder(spec, source, dtype, kernels, positions, shard=shard, comm=comm)
    finally:
        if isinstance(files, SafetensorsSource):
            files.close()  # also where it failed: what is read ahead is on its way to memory that others get then


def check_weights(spec: ModelSpec, path: Path, load_format: str = "auto") -> None:
    """Refuse weights that `load_model` would refuse by their files and by names, shapes and types of tensors; of those
    that are stored quantized, or run through transformers, by their files alone. Of a GGUF file the spec was made.

    Raises ConfigError as `load_model` does. Cost: headers are read; layers are made of tensors without memory.
    """
    if load_format == "dummy" or spec.architecture == TOY_ARCHITECTURE or (path / GGUF_LINK).exists():
        return
    if spec.through_transformers or (spec.quantization is not None and not spec.quantization.at_load):
        file_of_each(path)
    else:
        source = SafetensorsSource(path, torch.bfloat16, "meta", None, spec.prefix)
        take_weights(spec, source, load("cpu", "ref"), 1, spec.shards(Mesh())[0])


def _source(
    spec: ModelSpec, source: SafetensorsSource | RandomSource | GgufSource, kernels: Kernels, dtype: torch.dtype
) -> WeightSource:
    """Where the weights come from, on their way quantized, unpacked or dequantized."""
    quantized = spec.quantization
    if quantized is None:
        return source
    if quantized.bits < 16 and kernels.columns["linear"] == "ref" and kernels.device != "cpu":
        raise ConfigError(
            f"models: quantization {quantized.method} on {source.device} without a kernel, expected a CPU, or Triton"
        )
    if quantized.bits < 16 or quantized.at_load:
        is_too = quantized.expert_bits < 16 and multiplies_integers(kernels)
        experts = "" if spec.experts is None else "; experts too" if is_too else f"; experts in {dtype}"
        _log.info("weights are quantized, %s%s", quantized.text, experts)
    if isinstance(source, RandomSource):
        return source if quantized.bits == 16 else QuantizingSource(source, quantized)
    if quantized.at_load:
        return QuantizingSource(source, quantized)
    if isinstance(source, GgufSource):
        return source
    if quantized.bits == 16 and quantized.expert_bits < 16 and multiplies_integers(kernels):
        _log.info("experts in %s are multiplied with in %d bits", quantized.method, quantized.expert_bits)
    elif quantized.bits == 16:
        _log.info("weights in %s are dequantized to %s as they are loaded", quantized.method, dtype)
    return QuantizedFiles(source, quantized)
