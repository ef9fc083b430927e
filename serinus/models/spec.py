"""ModelSpec: a checkpoint's config.json, read and checked without torch and without transformers.

Knows nothing of weights but the digest that loading them gives, and nothing of devices; what an architecture makes of
its fields is in `families`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from serinus.core.errors import ConfigError
from serinus.core.gguf_file import GGUF_LINK
from serinus.core.parts import Part
from serinus.core.settings import ModelSettings
from serinus.models.config_fields import ConfigFields, read_json
from serinus.models.experts import ExpertSpec
from serinus.models.families import FAMILIES, LLAMA_NORMS, NormNames, family_fields, toy_fields
from serinus.models.hub import resolve
from serinus.models.latent import LatentSpec
from serinus.models.quantization import QuantSpec, quant_spec
from serinus.models.rope_fields import RopeSpec
from serinus.parallel import Mesh, Shard, shards_of

__all__ = ["KNOWN_ARCHITECTURES", "TOY_ARCHITECTURE", "ModelSpec", "load_spec", "overrides_of", "spec_of"]

TOY_ARCHITECTURE = "SerinusToyForCausalLM"

KNOWN_ARCHITECTURES: tuple[str, ...] = (*sorted(FAMILIES), TOY_ARCHITECTURE)
"""Values of `architectures` in config.json that can be served; of those of text and images, the text model's."""

_DTYPES = ("float32", "bfloat16", "float16")
_MULTIMODAL = {
    "Gemma3ForConditionalGeneration": ("Gemma3ForCausalLM", "gemma3_text"),
    "Mistral3ForConditionalGeneration": ("MistralForCausalLM", "mistral"),
}
"""Architectures of which the text model is served, its name and its `model_type`."""
_TEXT_PREFIX = "language_model."


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Everything that shapes the model, its KV and its vocabulary."""

    path: str
    """Local directory of the checkpoint."""
    architecture: str
    """The entry of `architectures`, one of KNOWN_ARCHITECTURES."""
    layer_count: int
    """Decoder layers, each with its own KV."""
    hidden_size: int
    """Width of the residual stream."""
    intermediate_size: int
    """Width inside the MLP."""
    head_count: int
    """Query heads of each layer."""
    kv_head_count: int
    """Key (and value) heads; divides head_count."""
    head_size: int
    """Elements of one head; even."""
    vocab_size: int
    """Rows of the embedding; token ids are below it."""
    context_length: int
    """Longest sequence that the model was made for (max_position_embeddings)."""
    layer_parts: tuple[Part, ...]
    """The part of each layer; all FULL where no window is shorter than context_length."""
    window: int | None = None
    """Positions that a layer of part SWA sees, the token itself included; None where no layer slides."""
    rope: RopeSpec = field(default_factory=RopeSpec)
    """Rotary embedding of all layers, but of sliding ones where rope_swa is set."""
    rope_swa: RopeSpec | None = None
    """Rotary embedding of sliding layers, where it differs."""
    norm_eps: float = 1e-6
    """Epsilon of every RMS norm."""
    tied: bool = False
    """Whether the embedding serves as output head too."""
    qkv_bias: bool = False
    """Bias of the q, k, v projections."""
    output_bias: bool = False
    """Bias of the attention's output projection."""
    mlp_bias: bool = False
    """Bias of the MLP's projections."""
    qk_norm: bool = False
    """RMS norm of each q and k head before the rotation."""
    qk_norm_whole: bool = False
    """RMS norm over all q heads, and over all k heads, likewise."""
    qk_norm_each: bool = False
    """Norm of each q and k head with a weight of its own, which subtracts the mean, likewise."""
    sinks: bool = False
    """Each query head has a score that joins its softmax and weighs no value."""
    gelu: bool = False
    """Gate of the MLP: GELU in its tanh form; else SiLU."""
    norm_names: NormNames = LLAMA_NORMS
    """Names of a layer's norms: before attention, of what it adds, before the MLP, of what it adds; None = none."""
    is_parallel: bool = False
    """Attention and MLP read the same stream, and what both add joins it at once."""
    is_centred: bool = False
    """Norms of the stream subtract the mean; computed as RMS norms of a stream that is kept free of one."""
    fused_qkv: bool = False
    """Query, key and value projections are one tensor, `qkv_proj`."""
    fused_mlp: bool = False
    """Gate and up projections are one tensor, `gate_up_proj`."""
    shared_mlp: bool = False
    """The MLP is called `shared_mlp`, as a shared expert is."""
    experts: ExpertSpec | None = None
    """Its mixtures of experts; None = every MLP is dense."""
    latent: LatentSpec | None = None
    """Its attention is latent: then kv_head_count is 1, and head_size that of a row; None = it is not."""
    through_transformers: bool = False
    """transformers' code computes it, but for attention."""
    extra_layers: int = 0
    """Layers behind the last that predict several tokens at once: left out."""
    plain_layers: tuple[int, ...] = ()
    """Layers that do not rotate."""
    norm_plus_one: bool = False
    """Norm weights are stored less 1."""
    embedding_scale: float | None = None
    """What embeddings are multiplied by."""
    attention_scale: float | None = None
    """What scores are multiplied by; None = head_size ** -0.5."""
    residual_scale: float = 1.0
    """What attention and MLP add is multiplied by this."""
    logit_scale: float = 1.0
    """Logits are multiplied by this."""
    attention_softcap: float | None = None
    """Bound of the scores: cap * tanh(score / cap)."""
    logit_softcap: float | None = None
    """Bound of the logits, likewise."""
    quantization: QuantSpec | None = None
    """Of its linears; None = they are not quantized."""
    dtype: str = "bfloat16"
    """Element type the checkpoint was saved in: float32, bfloat16 or float16."""
    eos_ids: tuple[int, ...] = ()
    """End-of-sequence ids of config.json, sorted; an engine adds those of generation_config.json and tokenizer."""
    bos_id: int | None = None
    """Begin-of-sequence id, where named."""
    reserved_ids: int = 0
    """Toy only: ids below it are special and never generated."""
    prefix: str = ""
    """What names of tensors begin with in the files: a model of text and images has more, which are left out."""
    signature: str = ""
    """Digest of all of the above but the path, and of every byte of the weights: equal = KV may be exchanged. Empty
    until they are loaded (`signed`); of dummy and toy models it is known at once."""

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts of its KV, FULL first: FULL always, SWA where a layer slides, LATENT where rows are latent."""
        window = () if self.window is None else (Part.SWA,)
        return (Part.FULL, *window, *((Part.LATENT,) if self.is_latent else ()))

    @property
    def is_latent(self) -> bool:
        """Whether its KV is latent rows, which every rank of a stage has: then that of all layers is."""
        return Part.LATENT in self.layer_parts

    def layers_of(self, part: Part) -> tuple[int, ...]:
        """Indices of the layers of a part, ascending; none of FULL where all slide."""
        return tuple(i for i, own in enumerate(self.layer_parts) if own is part)

    def shards(self, mesh: Mesh, partition: Sequence[int] = ()) -> tuple[Shard, ...]:
        """What each rank of a mesh holds, by rank; `partition`: layers of each stage, () = even.

        Raises ConfigError, with the reason, where the model does not fit the mesh.
        """
        if self.through_transformers and mesh.size > 1:
            raise ConfigError(
                f"models: tp_size is {mesh.tp} and pp_size {mesh.pp} for {self.architecture}, which runs through"
                " transformers, expected 1 of both"
            )
        if self.experts is None and mesh.ep > 1:
            raise ConfigError(f"models: ep_size is {mesh.ep} for {self.architecture}, which has no experts, expected 1")
        if self.experts is not None and mesh.tp > (most := self.experts.ranks_max(whole=mesh.ep > 1)):
            what = (
                "experts of a layer, or the inner width of the shared one"
                if mesh.ep > 1
                else "inner width of an expert"
            )
            raise ConfigError(f"models: tp_size is {mesh.tp}, expected at most {most}, the {what}")
        return shards_of(
            mesh,
            layer_count=self.layer_count,
            head_count=self.head_count,
            kv_head_count=self.kv_head_count,
            mlp_size=self.intermediate_size,
            vocab_size=self.vocab_size,
            partition=partition,
            is_latent=self.is_latent,
        )

    def signed(self, weights: str) -> ModelSpec:
        """With its signature, of a digest of its weights."""
        quantized = None if self.quantization is None else self.quantization.as_stored
        plain = replace(self, path="", signature="", quantization=quantized)
        signature = hashlib.blake2b(f"{asdict(plain)!r}|{weights}".encode(), digest_size=16).hexdigest()
        return replace(self, signature=signature)

    def on(self, shard: Shard) -> ModelSpec:
        """What one rank runs: its layers, heads and MLP columns; vocabulary, window and signature are the whole's.

        A stage may have no layer of a part: the part stays, its pool has no bytes there.
        """
        return replace(
            self,
            layer_count=len(shard.layers),
            layer_parts=self.layer_parts[shard.layers.start : shard.layers.stop],
            head_count=len(shard.heads),
            kv_head_count=len(shard.kv_heads),
            intermediate_size=len(shard.mlp),
        )


def load_spec(
    path: str | Path,
    *,
    overrides: Mapping[str, Any] | None = None,
    load_format: str = "auto",
    seed: int = 0,
    device: str = "cpu",
    model_impl: str = "auto",
    quantization: str = "auto",
) -> ModelSpec:
    """Read and check `path/config.json`.

    Args:
        path: a local directory (see `models.resolve` for hub ids).
        overrides: fields laid over config.json (`--json-model-override-args`).
        load_format: with `dummy` the signature is made of `seed`; else it comes with the weights.
        seed: seed of dummy weights.
        device: where the model runs: each type of device makes dummy weights of its own, and may have kernels for
            quantized experts or not.
        quantization: int8, int4 or fp8 = of a checkpoint that is not quantized; auto = as it is.
        model_impl: `serinus` = a family of this package, `transformers` = its code, `auto` = the first if it can.
    Raises:
        ConfigError: no directory, no or broken config.json, unknown architecture, missing or wrong field.
    Cost: reads a small file.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ConfigError(f"models: no checkpoint at {str(path)!r}, expected a directory with a config.json")
    config = _fields(read_json(folder / "config.json"), overrides or {}, folder / "config.json")
    architecture = _architecture(config, model_impl)
    if not config.flag("is_causal", True):
        raise config.fail("is_causal", "true: only models whose tokens see those before them are served")
    toy = architecture == TOY_ARCHITECTURE
    known = FAMILIES[architecture].quantizations if architecture in FAMILIES and model_impl != "transformers" else None
    quantized = quant_spec(config, quantization, architecture, known, device.split(":")[0])
    if architecture not in KNOWN_ARCHITECTURES or (model_impl == "transformers" and not toy):
        fields = _by_transformers(folder, architecture, overrides or {})
    else:
        fields = toy_fields(config) if toy else family_fields(config, FAMILIES[architecture])
    if quantized is not None and fields.get("experts") is None:
        quantized = replace(quantized, expert_bits=16)
    spec = {
        **fields,
        "architecture": architecture,
        "prefix": _TEXT_PREFIX if config.get("vision_config") is not None else "",
        "quantization": quantized,
        "vocab_size": config.whole("vocab_size"),
        "dtype": _dtype(config),
        "eos_ids": tuple(sorted(set(_ids(config.get("eos_token_id"))))),
        "bos_id": config.get("bos_token_id") if isinstance(config.get("bos_token_id"), int) else None,
    }
    unsigned = ModelSpec(path=str(folder), **spec)
    if toy:
        return unsigned.signed(f"toy:{config.get('seed', 0)}")
    made = f"dummy:{seed}" if device == "cpu" else f"dummy:{seed}:{device.split(':')[0]}"
    return unsigned.signed(made) if load_format == "dummy" else unsigned


def spec_of(settings: ModelSettings, *, device: str = "cpu") -> ModelSpec:
    """The model that these settings name, as they change it. `device`: as of `load_spec`.

    Raises ConfigError as `resolve` and `load_spec` do, and where the overrides are no JSON object. Cost: reads a small
    file of a directory; a hub id is fetched.
    """
    return load_spec(
        resolve(settings.model_path, settings.revision), overrides=overrides_of(settings),
        load_format=settings.load_format, seed=settings.random_seed or 0, device=device,
        model_impl=settings.model_impl, quantization=settings.quantization,
    )  # fmt: skip


def overrides_of(settings: ModelSettings) -> dict[str, Any]:
    """Values that replace those of config.json. Raises ConfigError: no JSON object."""
    text = settings.json_model_override_args
    try:
        overrides = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"models: json_model_override_args is {text!r} ({error}), expected a JSON object") from None
    if not isinstance(overrides, dict):
        raise ConfigError(f"models: json_model_override_args is {text!r}, expected a JSON object")
    return overrides


def _by_transformers(folder: Path, architecture: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
    # Imported here: it takes a second or two, which families of this package need not pay.
    from serinus.models.transformers_spec import transformers_fields

    if (folder / GGUF_LINK).exists():
        raise ConfigError(f"models: model_impl is transformers for {folder / GGUF_LINK}, expected a family's own code")
    if overrides:
        raise ConfigError(
            f"models: json_model_override_args names {', '.join(overrides)} for {architecture}, which runs through"
            " transformers, expected none"
        )
    return transformers_fields(folder, architecture)


def _fields(values: Mapping[str, Any], overrides: Mapping[str, Any], source: Path) -> ConfigFields:
    """A config.json with overrides on top; of a model of text and images, what its text model has, of both."""
    whole = ConfigFields(values, overrides, source)
    named = whole.get("architectures")
    if isinstance(named, list) and len(named) == 1 and named[0] in _MULTIMODAL:
        text, changes = values.get("text_config") or {}, overrides.get("text_config") or {}
        if not isinstance(text, dict) or not isinstance(changes, dict):
            raise whole.fail("text_config", "an object")
        architecture, kind = _MULTIMODAL[named[0]]
        model = ConfigFields(text, changes, source)
        if model.get("model_type", kind) != kind:
            raise model.fail("model_type", f"{kind!r} in text_config of {named[0]}: no other text model is served")
        tied = values.get("tie_word_embeddings")
        # A null does not hide what the whole says.
        values = {**values, **{name: value for name, value in text.items() if value is not None or name not in values}}
        if tied is not None:
            values["tie_word_embeddings"] = tied
        overrides = {**changes, **overrides, "architectures": [architecture]}
    if "rope_parameters" in overrides:
        values = {**values, "rope_scaling": None}  # which would win over them
    return ConfigFields(values, overrides, source)


def _architecture(config: ConfigFields, model_impl: str) -> str:
    named = config.get("architectures")
    if not isinstance(named, list) or not named or not isinstance(named[0], str):
        raise config.fail("architectures", f"a list with one of {', '.join(KNOWN_ARCHITECTURES)}")
    is_foreign = named[0] not in KNOWN_ARCHITECTURES and not (model_impl != "serinus" and _is_decoder(named[0]))
    if is_foreign:
        raise ConfigError(
            f"models: architecture {named[0]!r} is not known, expected one of"
            f" {', '.join((*KNOWN_ARCHITECTURES, *_MULTIMODAL))}"
        )
    return named[0]


def _is_decoder(architecture: str) -> bool:
    """Whether transformers has a text decoder of this name."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return architecture in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def _dtype(config: ConfigFields) -> str:
    name = config.get("dtype", config.get("torch_dtype", "float32"))
    if name not in _DTYPES:
        raise config.fail("dtype" if config.get("dtype") is not None else "torch_dtype", f"one of {', '.join(_DTYPES)}")
    return str(name)


def _ids(value: Any) -> tuple[int, ...]:
    """`eos_token_id`: an integer, a list of them, or nothing."""
    values = value if isinstance(value, list) else [value]
    return tuple(v for v in values if isinstance(v, int) and not isinstance(v, bool) and v >= 0)
