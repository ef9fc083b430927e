"""Makes the table of families in docs/MODELS.md of the code: of what their data says, and of what a small config.json
of each is taken with.

    python scripts/models_table.py

The names of models stand here, and what of a family no field of `Family` says. tests/docs/test_models.py fails where
the page is not what this makes.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from serinus.core.errors import ConfigError
from serinus.core.parts import Part
from serinus.models import ModelSpec, load_spec
from serinus.models.experts import ExpertFamily
from serinus.models.families import FAMILIES, Family, Sliding
from serinus.models.gguf_config import GGUF_ARCHITECTURES
from serinus.models.quantization import AT_LOAD
from serinus.parallel import Mesh

PAGE = Path(__file__).parents[1] / "docs" / "MODELS.md"
BEGIN = "<!-- families: made by scripts/models_table.py of the code -->\n"
END = "<!-- end -->"
HEAD = (
    "architecture", "models", "KV", "windows", "biases and norms", "rotation and rest", "quantized files", "at load",
    "ranks", "canary",
)  # fmt: skip
MODELS = {
    "Cohere2ForCausalLM": ("Command R7B, Command A", ""),
    "CohereForCausalLM": ("Command R, Command R+", ""),
    "DeepseekV2ForCausalLM": ("DeepSeek-V2, V2-Lite, Coder-V2", "shared expert"),
    "DeepseekV3ForCausalLM": ("DeepSeek-V3, R1; Kimi K2 in this form", "groups; shared expert"),
    "Dots1ForCausalLM": ("dots.llm1", "groups; shared expert"),
    "Gemma2ForCausalLM": ("Gemma 2", ""),
    "Gemma3ForCausalLM": ("Gemma 3", ""),
    "GemmaForCausalLM": ("Gemma 1", ""),
    "Glm4ForCausalLM": ("GLM-4-0414", ""),
    "Glm4MoeForCausalLM": ("GLM-4.5, GLM-4.5-Air, GLM-4.6", "groups; shared expert"),
    "GlmForCausalLM": ("GLM-4", ""),
    "GptOssForCausalLM": ("gpt-oss-20b, gpt-oss-120b", ""),
    "GraniteForCausalLM": ("Granite 3", ""),
    "GraniteMoeForCausalLM": ("Granite 3 MoE", ""),
    "GraniteMoeHybridForCausalLM": (
        "Granite 4 of attention alone (Micro, 350M, 1B)",
        "shared expert, which is the MLP where there are no others",
    ),
    "GraniteMoeSharedForCausalLM": ("the same with a shared expert", "shared expert"),
    "LlamaForCausalLM": ("Llama 1 to 3, and the many models of this form", ""),
    "MistralForCausalLM": ("Mistral, Mistral Small 3", ""),
    "MixtralForCausalLM": ("Mixtral", ""),
    "Olmo2ForCausalLM": ("OLMo 2", ""),
    "Olmo3ForCausalLM": ("OLMo 3", ""),
    "Phi3ForCausalLM": ("Phi-3, Phi-3.5, Phi-4, Phi-4 mini", ""),
    "Qwen2ForCausalLM": ("Qwen2, Qwen2.5, QwQ", ""),
    "Qwen2MoeForCausalLM": ("Qwen1.5-MoE, Qwen2-MoE", ""),
    "Qwen3ForCausalLM": ("Qwen3", ""),
    "Qwen3MoeForCausalLM": ("Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder", ""),
    "SmolLM3ForCausalLM": ("SmolLM3", ""),
}
"""Names, and what to say besides."""
_WINDOWS = {
    None: "-", Sliding.ALL: "all layers", Sliding.ASKED: "all layers", Sliding.ABOVE: "upper layers",
    Sliding.UPPER: "upper layers", Sliding.TURNS: "every other layer", Sliding.STILL: "layers that do not rotate",
    Sliding.PATTERN: "by pattern",
}  # fmt: skip
_HEADS, _KV_HEADS = 8, 4
_CONFIG: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 6, "num_attention_heads": _HEADS, "head_dim": 16,
    "num_key_value_heads": _KV_HEADS, "vocab_size": 512, "max_position_embeddings": 4096, "num_local_experts": 8,
    "num_experts": 8, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
    "n_group": 1, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 24, "v_head_dim": 20,
}  # fmt: skip
"""Of a small model; each family reads of it what it knows."""
_WINDOW = {"sliding_window": 24, "use_sliding_window": True, "max_window_layers": 2}
_WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
_METHODS: dict[str, dict[str, Any]] = {
    "AWQ": {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
    "GPTQ": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True},
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": _WEIGHTS, "input_activations": None, "targets": ["Linear"]}},
    },
    "FP8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "MXFP4": {"quant_method": "mxfp4"},
}
"""A `quantization_config` of each kind of file."""


class Small:
    """A small model of one architecture, as the code reads its config.json."""

    def __init__(self, folder: Path, architecture: str) -> None:
        self._folder, self._architecture = folder, architecture
        self.family: Family = FAMILIES[architecture]

    def spec(self, quantization: str = "auto", device: str = "cpu", **more: Any) -> ModelSpec | None:
        """None: it is refused."""
        hybrid = {"layer_types": ["attention"] * _CONFIG["num_hidden_layers"]} if self.family.hybrid else {}
        config = {**_CONFIG, "architectures": [self._architecture], **hybrid, **more}
        (self._folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        try:
            return load_spec(self._folder, quantization=quantization, device=device)
        except ConfigError:
            return None

    def fits(self, tp: int = 1, pp: int = 1, ep: int = 1) -> bool:
        """Whether so many ranks can have it."""
        spec = self.spec()
        assert spec is not None
        try:
            return bool(spec.shards(Mesh(tp=tp, pp=pp, ep=ep)))
        except ConfigError:
            return False


def parts_of(small: Small) -> str:
    """The parts that its layers have, with windows where it knows them."""
    found: set[Part] = set()
    for more in ({}, _WINDOW):
        spec = small.spec(**more)
        assert spec is not None
        found.update(spec.layer_parts)
    return ", ".join(part.name for part in sorted(found))


def norms_of(family: Family) -> str:
    """Biases that it always has, and norms beside those before attention and MLP."""
    said = ["q, k, v biases"] * bool(family.qkv_bias)
    if family.norms[1]:
        said.append("norms after blocks" if family.norms[0] else "norms after blocks, none before")
    said += ["q and k norms"] * (family.qk_norm and not family.qk_norm_said)
    said += ["q and k norms where the config says so"] * ((family.qk_norm and family.qk_norm_said) or family.cohere)
    said += ["q and k norms over all heads"] * family.qk_norm_whole
    return "; ".join(said) or "-"


def rest_of(architecture: str) -> str:
    """How it rotates, and what else it has."""
    family = FAMILIES[architecture]
    facts = {
        "attention and MLP of one norm": family.cohere,
        "GELU": family.gemma,
        "caps": any(family.softcaps),
        "latent attention": family.latent,
        "attention sinks": family.sinks,
        "half of a head's elements rotate": family.rotated == 0.5,
        "neighbours rotate together": family.interleaved,
        "sliding layers with a base of their own": family.local_rope is not None,
        "layers that do not slide do not rotate": family.cohere and family.sliding is not None,
        "some layers do not rotate": bool(family.plain_every),
        "rotation where the config says so": family.hybrid,
        "fused projections": family.fused_qkv,
        "fused MLP": family.fused_mlp and not family.fused_qkv,
        "multipliers": family.multipliers,
    }
    said = [word for word, holds in facts.items() if holds]
    said += [] if family.experts is None else [experts_of(family.experts)]
    said += [MODELS[architecture][1]] if MODELS[architecture][1] else []
    return "; ".join(said) or "-"


def experts_of(experts: ExpertFamily) -> str:
    """How tokens choose, and what an expert is."""
    facts = {
        "sigmoid scores": experts.sigmoid,
        "corrected": experts.corrected,
        "weights as scored": not experts.normalized,
        "groups where `topk_method` says so": experts.method_said,
        "biases": experts.biased,
        "clamped SwiGLU": experts.gate == "swiglu_oai",
        "shared expert with a gate": experts.shared_gate,
    }
    said = ", ".join(word for word, holds in facts.items() if holds)
    return f"experts: {said}" if said else "experts"


def files_of(small: Small, architecture: str) -> str:
    """The quantized files that it is taken from."""
    said = [name for name, config in _METHODS.items() if small.spec(quantization_config=config) is not None]
    is_gguf = architecture in GGUF_ARCHITECTURES.values() or architecture == "MixtralForCausalLM"
    return ", ".join([*said, *["GGUF"] * is_gguf]) or "-"


def at_load(small: Small) -> str:
    """What `--quantization` makes of it, and where of its experts too."""
    said, experts = [], []
    for name in AT_LOAD:
        (here, there) = (small.spec(quantization=name, device=device) for device in ("cpu", "cuda"))
        if here is None or here.quantization is None:
            continue
        said.append(name if there is not None else f"{name} on a CPU")
        bits = [
            16 if each is None or each.quantization is None else each.quantization.expert_bits for each in (here, there)
        ]
        if min(bits) < 16:
            experts.append(f"{name} on a CPU" if bits[1] == 16 else name)
    return "; ".join([", ".join(said) or "-", *[f"experts: {', '.join(experts)}"] * bool(experts)])


def ranks_of(small: Small) -> str:
    """The ways in which several ranks can have it."""
    said = []
    if small.fits(tp=2):
        said.append("TP by query heads" if small.fits(tp=_HEADS) else "TP by KV heads")
    said += ["PP"] * small.fits(pp=2) + ["EP"] * small.fits(tp=2, ep=2)
    return ", ".join(said) or "one"


def canary_of(parts: str) -> str:
    """What of a position is stamped and held against its stamp."""
    halves = {Part[name].halves for name in parts.split(", ")}
    return "keys, values" if halves == {2} else "latent rows"


def table() -> str:
    """All rows, by the name of the architecture."""
    lines = [HEAD, ("---",) * len(HEAD)]
    with tempfile.TemporaryDirectory() as folder:
        for name in sorted(FAMILIES):
            small = Small(Path(folder), name)
            parts = parts_of(small)
            lines.append((
                f"`{name}`", MODELS[name][0], parts, _WINDOWS[small.family.sliding], norms_of(small.family),
                rest_of(name), files_of(small, name), at_load(small), ranks_of(small), canary_of(parts),
            ))  # fmt: skip
    return "".join(f"| {' | '.join(line)} |\n" for line in lines).replace("| --- ", "|---").replace("--- |", "---|")


def page(text: str) -> str:
    """The page with its table made anew."""
    before, _, rest = text.partition(BEGIN)
    assert rest, f"{PAGE} has no line {BEGIN!r}"
    return before + BEGIN + table() + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
