"""What the parity tests share: transformers' logits, and an engine that remembers its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from serinus.core.rng import Rng
from serinus.core.sampling import SamplingParams
from serinus.kernels import load
from serinus.models import load_model, load_spec
from serinus.models.mixture import choose_experts
from serinus.selftest import EnginePair
from serinus.testing.direct import DirectEngine, DirectSeq

GREEDY = SamplingParams(temperature=0.0)
DECODE_STEPS = 64


def random_ids(seed: int, count: int) -> list[int]:
    """Token ids of the small vocabularies, all different draws."""
    rng = Rng(seed)
    return [rng.randrange(512) for _ in range(count)]


class Recorder:
    """A model that remembers the logits it gave."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.spec, self.dtype = model.spec, model.dtype
        self.seen: list[torch.Tensor] = []

    def forward(self, *args: Any) -> torch.Tensor:
        hidden: torch.Tensor = self._model.forward(*args)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.seen.append(self._model.logits(hidden).float())
        return self.seen[-1]


def reference(path: Path, ids: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Logits of transformers for a whole sequence at once, [T, V]."""
    return references(path, [ids], dtype)[0]


def references(path: Path, sequences: Sequence[list[int]], dtype: torch.dtype) -> list[torch.Tensor]:
    """The same of several, one after the other."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager").eval()
    with torch.no_grad():
        return [model(torch.tensor([ids])).logits[0].float() for ids in sequences]


@dataclass(frozen=True, slots=True)
class Bf16Errors:
    """How far logits in bf16 are from those of transformers in fp32, mean over the vocabulary, [T] of all draws."""

    ours: torch.Tensor
    theirs: torch.Tensor


def bf16_errors(path: Path, prompts: Sequence[list[int]], *, forget: bool = False) -> Bf16Errors:
    """Of these prompts and the 64 greedy tokens behind each. One prompt alone says little: of two right engines the one
    may be off by half or twice as much as the other. `forget`: as of `run_in_uneven_chunks`."""
    direct, model = engine(path, torch.bfloat16)
    sequences = [prompt + run_in_uneven_chunks(direct, prompt, forget=forget).output[:-1] for prompt in prompts]
    truth, theirs = (
        torch.cat([each[-DECODE_STEPS - 1 :] for each in references(path, sequences, dtype)])
        for dtype in (torch.float32, torch.bfloat16)
    )
    return Bf16Errors((torch.cat(model.seen) - truth).abs().mean(-1), (theirs - truth).abs().mean(-1))


def tied_tokens(path: Path, ids: list[int], apart: float = 1e-5) -> set[int]:
    """Positions at which transformers' routers choose other experts where their logits are off by `apart`: there two
    right engines may differ."""
    from transformers import AutoModelForCausalLM

    spec = load_spec(path).experts
    assert spec is not None
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    tied: set[int] = set()

    def look(module: Any, _inputs: Any, output: Any) -> None:
        logits, correction = output[0], getattr(module, "e_score_correction_bias", None)
        chosen = choose_experts(logits, spec, correction)[1].sort().values
        for seed in range(4):
            noise = torch.randn(logits.shape, generator=torch.Generator().manual_seed(seed)) * apart
            other = choose_experts(logits + noise, spec, correction)[1].sort().values
            tied.update(torch.where((other != chosen).any(-1))[0].tolist())
        theirs = output[2].sort().values
        assert [i for i in torch.where((theirs != chosen).any(-1))[0].tolist() if i not in tied] == []

    for module in model.modules():
        if type(module).__name__.endswith("Router"):
            module.register_forward_hook(look)
    with torch.no_grad():
        model.eval()(torch.tensor([ids]))
    return tied


def engine(
    path: Path, dtype: torch.dtype, column: str = "auto", page_size: int = 8, *, device: str = "cpu",
    quantization: str = "auto",
) -> tuple[DirectEngine, Recorder]:  # fmt: skip
    kernels = load(device, column)
    model = Recorder(load_model(load_spec(path, quantization=quantization), path, dtype, kernels, device=device))
    return DirectEngine(model, kernels, page_size=page_size, page_count=1280 // page_size, device=device), model


def equals_transformers(
    path: Path, column: str, *, device: str = "cpu", plain: Path | None = None, **given: Any
) -> None:
    """In fp32 all logits and the greedy tokens. `plain`: the same model as transformers reads it; `given`: of
    `engine`."""
    prompt = random_ids(7, 150)
    direct, model = engine(path, torch.float32, column, device=device, **given)
    seq = run_in_uneven_chunks(direct, prompt)
    expected = reference(plain or path, prompt + seq.output[:-1], torch.float32)[len(prompt) - 1 :]
    found = torch.cat(model.seen).cpu()
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) < 1e-4
    assert seq.output == expected.argmax(-1).tolist()


def run_in_uneven_chunks(direct: DirectEngine, prompt: list[int], *, forget: bool = False) -> DirectSeq:
    """`forget`: after each step, what fell out of the window becomes NaN, and its row entries 0."""
    seq = direct.start(prompt, GREEDY, tokens=DECODE_STEPS + 1)
    chunks = [1, 17, 64, 3, 1 << 30] + [1] * DECODE_STEPS
    for chunk in chunks:
        direct.step([(seq, chunk)])
        if forget:
            direct.forget(seq)
    return seq


def check_handed_over_with_a_prefix(path: Path, plain: Path | None = None) -> None:
    """Two prompts of 600 tokens, of which the second finds 400 in the cache, prefilled by one engine in chunks and
    decoded by another under a canary: 100 tokens and their log-probabilities are those of transformers. `plain`: as of
    `equals_transformers`."""
    both = EnginePair(
        path, max_total_tokens=4096, kv_canary="raise", kv_canary_real_data="all", dtype="float32", page_size=16,
        chunked_prefill_size=96, skip_tokenizer_init=True,
    )  # fmt: skip
    for turn in range(2):
        rid, prompt = str(turn), [*random_ids(1, 400), *random_ids(2 + turn, 200 + turn)]
        both.add(rid, prompt, 100, logprobs=1)
        both.run_until_idle()
        deltas, tokens = both.deltas[rid], both.tokens(rid)
        sequence = prompt + tokens[:-1]
        expected = reference(plain or path, sequence, torch.float32)[len(prompt) - 1 :].log_softmax(-1)
        found = torch.tensor([each.logprob for delta in deltas for each in delta.logprobs])
        chosen = expected[torch.arange(100), torch.tensor(tokens)]
        assert float((found - chosen).abs().max()) < 1e-4
        assert tokens == expected.argmax(-1).tolist()
        if both.decode.built.spec.experts is not None:
            assert not [token for token in tied_tokens(plain or path, sequence) if token >= len(prompt) - 1]
        usage = deltas[-1].usage
        assert usage is not None
        assert usage.prefill_engine == "prefill-0"
        assert sum(usage.cached_tokens.values()) == 400 * turn
    both.check()
