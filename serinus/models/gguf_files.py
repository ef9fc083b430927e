"""GgufSource: the weights of a GGUF file, as integers with scales where kernels multiply with them, else dequantized.

Q8_0 and Q4_0 have a scale for 32 inputs, which is what the kernels for int8 and int4 read; all other types become
floats of the model's dtype by the `gguf` package's own functions. llama.cpp stores some weights otherwise than
transformers: rows of queries and keys of Llama in the order of its rotation, norms of Gemma with the 1 added, experts
as three stacks a layer, of which each expert is handed out by itself.
Shapes: O = output width, I = input width, G = blocks of 32 inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from serinus.core.errors import ConfigError
from serinus.core.gguf_file import GGUF_LINK, GgufFile
from serinus.core.log import get_logger
from serinus.kernels import QuantizedWeight
from serinus.models.gguf_config import INTEGER_BITS
from serinus.models.spec import ModelSpec
from serinus.models.weight_digests import TensorDigests

if TYPE_CHECKING:
    from gguf.gguf_reader import ReaderTensor

_log = get_logger("models")
_FLOATS: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_GROUP: Final = 32
"""Inputs that share a scale in the types of INTEGER_BITS."""
_PIECE: Final = 1 << 22
"""Numbers that are dequantized at once."""
_MODULES: Final = ("model.embed_tokens", "model.norm", "lm_head")
_OF_LAYERS: Final = (
    *(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
    *(f"{block}.{name}" for block in ("mlp", "mlp.shared_expert") for name in ("gate_proj", "up_proj", "down_proj")),
    *("mlp.gate", "mlp.shared_expert_gate"),
    *(f"{name}_layernorm" for name in ("input", "post_attention", "pre_feedforward", "post_feedforward")),
)
_STACKS: Final = tuple(f"mlp.experts.{name}" for name in ("gate_proj", "up_proj", "down_proj"))
"""Those of all experts of a layer."""
_NOT_WEIGHTS: Final = ("rope_freqs.weight",)
"""What config.json was made of."""


class GgufSource:
    """The tensors of a file by the names that transformers gives them."""

    def __init__(
        self, folder: Path, spec: ModelSpec, dtype: torch.dtype, device: str = "cpu",
        digests: TensorDigests | None = None, tell: Callable[[int, int], object] = lambda done, total: None,
    ) -> None:  # fmt: skip
        """`folder`: from `gguf_config.unpacked`; the others as of SafetensorsSource. Raises ConfigError as GgufFile."""
        self.dtype, self.device = dtype, device
        self._spec, self._digests, self._tell = spec, digests, tell
        self._file = GgufFile(folder / GGUF_LINK)
        self._path = (folder / GGUF_LINK).resolve()
        self._of_name = _names(self._file, spec.layer_count)
        self._left = set(self._file.tensors)
        self._total = sum(int(tensor.n_bytes) for tensor in self._file.tensors.values())
        self._taken = 0
        self._spans: dict[str, range | None] = {}
        """What was taken of each weight."""
        self._keeps = spec.quantization is not None and spec.quantization.method == "gguf"
        """Whether integers are handed out as such."""
        if digests is not None:
            digests.expect(self._file.tensors)
        floats = ", ".join(kind for kind in self._file.type_counts if not self._is_kept(kind) and kind not in _FLOATS)
        kept = ", ".join(kind for kind in self._file.type_counts if self._is_kept(kind))
        _log.info(
            "%s%s%s", self._path.name, f": {kept} as integers" if kept else "",
            f"{',' if kept else ':'} {floats} dequantized to {dtype} as it is loaded" if floats else "",
        )  # fmt: skip

    def take(
        self, name: str, shape: tuple[int, ...], span: range | None = None, dim: int = 0,
        dtype: torch.dtype | None = None,
    ) -> Tensor:  # fmt: skip
        """Dequantized. Raises ConfigError: the tensor is missing or misshapen."""
        tensor = self._tensor(name, shape)
        self._spans[name] = span
        rows_R, data = self._rows(name, shape[0], span if dim == 0 else None), _data(name, tensor)
        less = 1.0 if self._is_norm_plus_one(name) else 0.0
        found = _floats(tensor, data, rows_R, less, dtype or self.dtype)
        found = found if found.dim() == len(shape) else found.view(shape)
        if span is not None and dim:
            found = found.narrow(dim, span.start, len(span)).contiguous()
        return found.to(self.device)

    def linear(
        self, name: str, shape: tuple[int, int], span: range | None = None, dim: int = 0
    ) -> Tensor | QuantizedWeight:
        """Its integers where the type is one of those that are kept, else as `take`. Raises ConfigError as `take` does,
        and where groups would be cut too short."""
        full = f"{name}.weight"
        if full not in self._of_name or not self._is_kept(self._file.tensors[self._of_name[full]].tensor_type.name):
            return self.take(full, shape, span, dim)
        tensor = self._tensor(full, shape)
        whole = _integers(tensor, _data(full, tensor), self._rows(full, shape[0], span if dim == 0 else None))
        if span is None or dim == 0:
            return whole
        try:
            return whole.columns(span)
        except ValueError as error:
            raise ConfigError(f"models: {name} cannot be shared among ranks ({error})") from None

    def quantized(self, name: str, weight_OI: Tensor) -> Tensor | QuantizedWeight:
        """The integers of the embedding, where it serves as output head; what else is taken stays as it is."""
        stored = "model.embed_tokens.weight"
        tensor = self._file.tensors[self._of_name[stored]]
        if name != "lm_head" or not self._is_kept(tensor.tensor_type.name):
            return weight_OI
        return _integers(tensor, tensor.data, self._rows(stored, self._spec.vocab_size, self._spans[stored]))

    def names_of(self, name: str) -> Sequence[str]:
        """The weight, which is one tensor."""
        return (f"{name}.weight",)

    def has(self, name: str) -> bool:
        """Whether the file holds it."""
        return name in self._of_name

    def finish(self, ignore: Callable[[str], bool]) -> None:
        """Raise ConfigError where the file holds tensors that were not taken."""
        ours = {stored: name for name, stored in self._of_name.items()}
        odd = sorted(each for each in self._left if each not in _NOT_WEIGHTS and not ignore(ours.get(each, each)))
        if odd:
            raise ConfigError(
                f"models: {self._path} holds {len(odd)} tensors that its architecture has no place for, e.g."
                f" {odd[0]!r}, expected none"
            )

    def _is_kept(self, kind: str) -> bool:
        return self._keeps and kind in INTEGER_BITS

    def _is_norm_plus_one(self, name: str) -> bool:
        return self._spec.norm_plus_one and name.endswith("norm.weight")

    def _tensor(self, name: str, shape: tuple[int, ...]) -> ReaderTensor:
        """Checked, digested and counted."""
        stored = self._of_name.get(name)
        if stored is None:
            raise ConfigError(f"models: tensor {name!r} is missing from {self._path}, expected one of {list(shape)}")
        tensor = self._file.tensors[stored]
        found = [int(size) for size in reversed(tensor.shape)]
        if (
            ".experts." in name
            and len(found) == 3
            and found[0] == (self._spec.experts.count if self._spec.experts else 0)
        ):
            found = found[1:]  # of one of a stack
        if found != list(shape) and [1, *found] != list(shape):
            raise ConfigError(f"models: tensor {stored!r} has shape {found}, expected {list(shape)} from its metadata")
        if self._digests is not None:
            self._digests.add(stored, torch.from_numpy(tensor.data).reshape(-1).view(torch.uint8))
        if stored in self._left:
            self._left.discard(stored)
            self._taken += int(tensor.n_bytes)
            self._tell(self._taken, self._total)
        return tensor

    def _rows(self, name: str, count: int, span: range | None) -> Tensor | None:
        """Which rows of the file are those of the whole, or of a span, in our order; None = all, as they lie."""
        heads = {"q_proj": self._spec.head_count, "k_proj": self._spec.kv_head_count}.get(name.split(".")[-2])
        if heads is not None and self._file.architecture == "llama":  # neighbours rotate together there
            order_O = torch.arange(count).view(heads, -1, 2).transpose(1, 2).flatten()
            return order_O if span is None else order_O[span.start : span.stop]
        return None if span is None else torch.arange(span.start, span.stop)


def _names(file: GgufFile, layer_count: int) -> dict[str, str]:
    """The file's name of each tensor, by ours."""
    import gguf

    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    table = gguf.get_tensor_name_map(kinds[file.architecture], layer_count)
    modules = [*_MODULES, *(f"model.layers.{i}.{name}" for i in range(layer_count) for name in _OF_LAYERS)]
    found = {}
    for module in modules:
        for kind in ("weight", "bias"):
            stored = f"{table.get_name(module)}.{kind}"
            if stored in file.tensors:
                found[f"{module}.{kind}"] = stored
    for base, name in ((f"model.layers.{i}.", name) for i in range(layer_count) for name in _STACKS):
        stored = f"{table.get_name(base + name)}.weight"
        for expert in range(int(file.tensors[stored].shape[-1]) if stored in file.tensors else 0):
            found[f"{base}{name.replace('experts', f'experts.{expert}')}.weight"] = stored
    return found


def _floats(tensor: ReaderTensor, data: Any, rows_R: Tensor | None, less: float, dtype: torch.dtype) -> Tensor:
    """Rows of a tensor's data, or its numbers where it has one dimension, less something."""
    import gguf

    kind = tensor.tensor_type.name
    chosen = slice(None) if rows_R is None else rows_R.numpy()
    if kind in _FLOATS:
        stored = torch.from_numpy(data[chosen])
        stored = stored.view(_FLOATS[kind]) if stored.dtype == torch.uint8 else stored
        return (stored.float() - less).to(dtype) if less else stored.to(dtype, copy=rows_R is None)
    width = int(tensor.shape[0])
    count = len(data) if rows_R is None else len(rows_R)
    found = torch.empty((count, width), dtype=dtype)
    step = max(1, _PIECE // width)
    for at in range(0, count, step):
        piece = data[at : at + step] if rows_R is None else data[rows_R[at : at + step].numpy()]
        found[at : at + step] = torch.from_numpy(gguf.dequantize(piece, tensor.tensor_type))
    return found


def _data(name: str, tensor: ReaderTensor) -> Any:
    """Of a stack the expert that the name tells."""
    return tensor.data if len(tensor.shape) < 3 else tensor.data[int(name.split(".experts.")[1].split(".")[0])]


def _integers(tensor: ReaderTensor, data: Any, rows_R: Tensor | None) -> QuantizedWeight:
    """Blocks of 32: a scale in float16, then 32 bytes, or 16 with two digits each, the first 16 in the lower halves."""
    kind = tensor.tensor_type.name
    stored = torch.from_numpy(data if rows_R is None else data[rows_R.numpy()])
    blocks_OGY = stored.view(len(stored), -1, 2 + _GROUP * INTEGER_BITS[kind] // 8)
    scales_OG = blocks_OGY[..., :2].contiguous().view(torch.float16)[..., 0].float()
    digits = blocks_OGY[..., 2:]
    if kind == "Q4_0":
        values = torch.cat([digits & 15, digits >> 4], -1).to(torch.int8) - 8
    else:
        values = digits.contiguous().view(torch.int8)
    return QuantizedWeight(
        bits=INTEGER_BITS[kind], group=_GROUP, values_OI=values.reshape(len(stored), -1).contiguous(),
        scales_OG=scales_OG,
    )  # fmt: skip
