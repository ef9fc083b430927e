"""A model that transformers computes, but for its attention: KV goes to the paged pools, the kernels attend to it.

transformers lets attention be a function of one's own (AttentionInterface). Ours stores a layer's keys and values where
the step says, calls the hooks as the decoder does, and reads the pages of all sequences; so the cache, the tiers, the
canary and handoffs are the same as for families of this package. Slower: nothing is packed or fused.

Shapes: T = tokens of the step, N = query heads, H = KV heads, D = head size, W = rows wanted, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open

from serinus.core.errors import ConfigError, InvariantError
from serinus.core.log import get_logger
from serinus.core.parts import Part
from serinus.kernels import Kernels, LayersKv
from serinus.models.batch import ForwardBatch
from serinus.models.hooks import ForwardHook
from serinus.models.spec import ModelSpec
from serinus.models.transformers_spec import read_config
from serinus.models.weight_digests import TensorDigests
from serinus.models.weight_files import file_of_each

_NAME: Final = "serinus_paged"
"""Of the attention function, where transformers keeps them."""
_CHECKED: Final = "serinus_paged_checked"
"""...and of the one of the first pass. transformers asks for its masks, which waits for the device."""
_log = get_logger("models")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pass:
    """One forward pass, for the attention function."""

    kernels: Kernels
    batch: ForwardBatch
    kv: LayersKv
    table_RC: torch.Tensor
    hook: ForwardHook
    context: int
    still: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    """Cosines and sines of no rotation, as transformers rotated already, and zeros as positions: made before the pass,
    as a kernel reads them before the one before it has ended."""
    seen: list[int] = field(default_factory=list)
    """Layers whose attention was computed, in order."""


class TransformersModel:
    """A decoder of transformers over the paged pools."""

    def __init__(
        self, spec: ModelSpec, folder: Path, dtype: torch.dtype, kernels: Kernels, *, device: str = "cpu",
        dummy_seed: int | None = None, digests: TensorDigests | None = None,
    ) -> None:  # fmt: skip
        """Load the weights as transformers does, from safetensors alone; or make them from `dummy_seed`.

        Raises ConfigError: files are missing or wrong.
        """
        from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM

        self.spec, self.dtype, self._kernels, self.has_kv_scales = spec, dtype, kernels, False
        maker: Any = AutoModelForCausalLM
        AttentionInterface.register(_NAME, _attend)
        AttentionInterface.register(_CHECKED, _attend_checked)
        AttentionMaskInterface.register(_CHECKED, _window_of_mask)
        config = read_config(folder)
        common: dict[str, Any] = {"dtype": dtype, "attn_implementation": _CHECKED, "trust_remote_code": False}
        if dummy_seed is None:
            files = file_of_each(folder)
            try:
                model, report = maker.from_pretrained(
                    folder, config=config, use_safetensors=True, local_files_only=True, output_loading_info=True,
                    **common,
                )  # fmt: skip
            except (OSError, ValueError, RuntimeError) as error:
                raise ConfigError(f"models: transformers cannot load {folder}: {error}") from None
            odd = [
                f"{kind.replace('_', ' ')} {sorted(map(str, report[kind]))[:3]}" for kind in _REPORTED if report[kind]
            ]
            if odd:
                raise ConfigError(f"models: {folder} does not fit its config.json: {'; '.join(odd)}")
            if digests is not None:
                _digest(folder, files, digests)
        else:
            with torch.random.fork_rng(), torch.inference_mode(False):
                torch.manual_seed(dummy_seed)
                model = maker.from_config(config, **common)
        self._model: Any = model.to(device).eval()
        still = torch.ones((1, spec.head_size // 2), device=device)
        self._still = still, torch.zeros_like(still)
        _log.warning(
            "%s runs through transformers, not by code of a family here: slower; cache,"
            " tiers, canary and handoffs are the same", spec.architecture,
        )  # fmt: skip

    def activation(self, token_count: int) -> tuple[tuple[int, ...], torch.dtype]:
        """Of what goes to another stage. Raises InvariantError: there is no other."""
        raise InvariantError(f"models: a stage asks for {token_count} rows of a model of one rank")

    def forward(
        self, batch: ForwardBatch, kv: LayersKv, tables: Mapping[Part, torch.Tensor],
        hook: ForwardHook, inflow: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Write the step's KV, return the logits of the wanted rows, [W, V], or of all: what is scaled or capped on the
        way to them only transformers knows. Raises InvariantError: a layer's attention did not come through;
        ConfigError, at the first pass: it cannot run over pages."""
        hook.before(batch)
        this = _Pass(
            kernels=self._kernels, batch=batch, kv=kv, table_RC=tables[Part.FULL], hook=hook,
            still=(*self._still, torch.zeros_like(batch.positions_T)),
            context=self.spec.context_length,
        )  # fmt: skip
        found = self._model(
            input_ids=batch.tokens_T[None], position_ids=batch.positions_T[None], use_cache=False,
            logits_to_keep=0 if batch.wanted_W is None else batch.wanted_W, serinus_pass=this,
        )  # fmt: skip
        is_first = self._model.config._attn_implementation == _CHECKED
        if this.seen != list(range(self.spec.layer_count)):
            said = f"attention of layers {this.seen} came through, expected all, once, in order"
            if is_first:
                raise ConfigError(f"models: {self.spec.architecture} cannot run over pages: {said}")
            raise InvariantError(f"models: {said}")
        if is_first:
            self._model.set_attn_implementation(_NAME)
        hook.after(batch)
        logits_WV: torch.Tensor = found.logits[0]
        return logits_WV

    def logits(self, hidden_BE: torch.Tensor) -> torch.Tensor | None:
        """Of rows that `forward` returned: those rows."""
        return hidden_BE

    def final_hidden(self, hidden_BE: torch.Tensor) -> torch.Tensor | None:
        """None: `forward` returns logits."""
        return None


_REPORTED = ("missing_keys", "unexpected_keys", "mismatched_keys")


def _digest(folder: Path, files: Mapping[str, str], digests: TensorDigests) -> None:
    """Of every tensor of the checkpoint, as it is stored."""
    digests.expect(files)
    for file in sorted(set(files.values())):
        with safe_open(folder / file, framework="pt") as opened:
            for name in sorted(name for name, own in files.items() if own == file):
                digests.add(name, opened.get_tensor(name))


def _window_of_mask(*, use_vmap: bool = False, local_size: int | None = None, **_more: Any) -> int | None:
    """In place of the mask that transformers would make for layers: its window, None where it is causal alone, and 0
    where it is neither. `_attend_checked` gets it as the mask."""
    return 0 if use_vmap else local_size


def _attend_checked(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | int | None,
    sliding_window: int | None = None, **more: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """`_attend`, where what transformers masks is what the layer says of itself."""
    if not isinstance(attention_mask, torch.Tensor) and attention_mask != 0 and "serinus_pass" in more:
        context = more["serinus_pass"].context
        masked, told = (size if size and size < context else None for size in (attention_mask, sliding_window))
        if masked != told:
            raise ConfigError(
                f"models: {type(module).__name__} cannot run over pages: transformers masks a window of {masked} and"
                f" tells its attention function of {told}, expected the same sliding_window of both"
            )
        attention_mask = None
    return _attend(module, query, key, value, attention_mask, sliding_window=sliding_window, **more)


def _attend(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | int | None,
    scaling: float | None = None, dropout: float = 0.0, sliding_window: int | None = None,
    softcap: float | None = None, s_aux: torch.Tensor | None = None, **more: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Attention of one layer over the pages: query [1, N, T, D], key and value [1, H, T, D] -> [1, T, N, D]."""
    this: _Pass | None = more.get("serinus_pass")
    layer = module.layer_idx
    if this is None:
        raise ConfigError(f"models: {type(module).__name__} does not pass on what its attention function is given")
    odd = [name for name in ("position_bias", "cu_seq_lens_q") if more.get(name) is not None]
    if odd or attention_mask is not None or not getattr(module, "is_causal", True):
        said = ", ".join(odd) or "a mask of its own, or none that is causal"
        raise ConfigError(f"models: {type(module).__name__} cannot run over pages: its attention has {said}")
    (k_SHD, v_SHD), batch, kernels = this.kv[layer], this.batch, this.kernels
    tokens, (heads, size) = query.shape[2], query.shape[1::2]
    if key.shape[1::2] != k_SHD.shape[-2:] or value.shape != key.shape or size != k_SHD.shape[-1]:
        raise ConfigError(
            f"models: {type(module).__name__} of layer {layer} has keys {tuple(key.shape)} and values"
            f" {tuple(value.shape)}, expected {k_SHD.shape[-2]} heads of {k_SHD.shape[-1]} of each"
        )
    this.seen.append(layer)
    this.hook.before_layer(layer)
    rows_TX = torch.cat([each[0].transpose(0, 1).reshape(tokens, -1) for each in (query, key, value)], 1)
    q_TND = rows_TX.new_empty((tokens, heads, size))
    kernels.qk_rope_store(
        rows_TX, *this.still, None, None, 0.0, k_SHD, v_SHD, batch.slots_T, q_TND, this.hook.writes(layer),
    )  # fmt: skip
    inputs = q_TND, k_SHD, v_SHD, this.table_RC, batch.attention, size**-0.5 if scaling is None else scaling
    sinks_N = None if s_aux is None else s_aux.float()
    digest = this.hook.reads(layer, batch.attention)
    if digest is None:
        mixed_TND = kernels.paged_attention(*inputs, sliding_window, softcap, sinks_N)
    else:
        mixed_TND = kernels.watched_attention(*inputs, digest, None, sliding_window, softcap, sinks_N)
    return mixed_TND[None], None
