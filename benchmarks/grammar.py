"""Grammars beside a decode step: 16 rows of 8 layers of Qwen3-0.6B (or another shape), random weights, each with a
schema.

Claim: what a step waits for its masks, and what it costs to put them on the logits, is at most 2 % of the step.
The same 16 requests are run free and guided in turns; `longer_percent` is how much longer the time from step to step is
under a grammar (of each round in `rounds_percent`), `percent_of_step` the sum of what the masks are seen to take of the
step's own thread: that is timed in turns of its own, which count for nothing else.
The vocabulary is made here: 151,643 byte-level tokens, the words of Python's own library and their beginnings.

    python benchmarks/grammar.py [--device cpu] [--shapes 0.6b:8] [--tokens 24] [--rounds 3] [--folder DIR] [--wait]

A shape is that of Qwen3, with so many layers; one JSON line for each.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from report import best_ms, emit
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from serinus import LLM, Grammar, SamplingParams
from serinus.core.clock import WallClock
from serinus.core.plan import SampleSpec
from serinus.runner.grammar_masks import GrammarMasks, StepMasks
from serinus.text import GrammarVocabulary, byte_of_char, load_tokenizer

ROWS, VOCAB, TOKENS, PROMPT = 16, 151_936, 151_643, 256
SHAPES = {
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "tie_word_embeddings": True},
    "8b": {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "tie_word_embeddings": False},
}
"""Of Qwen3."""
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 5},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
                           "kind": {"enum": ["home", "work"]}},
            "required": ["street", "zip", "kind"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "tags", "address"],
    "additionalProperties": False,
}  # fmt: skip


class _Timed(Future[StepMasks]):
    """Masks under way; notes how long they were waited for."""

    def __init__(self, inner: Future[StepMasks], waits: list[float]) -> None:
        super().__init__()
        self._inner, self._waits = inner, waits

    def result(self, timeout: float | None = None) -> StepMasks:
        begin = time.perf_counter()
        masks = self._inner.result(timeout)
        self._waits.append(time.perf_counter() - begin)
        return masks


class TimedMasks(GrammarMasks):
    """Notes what a step spends on its masks."""

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        super().__init__(lambda: vocabulary, WallClock(), width=VOCAB)
        self.begins: list[float] = []
        self.waits: list[float] = []
        self.makes: list[float] = []
        self.follows: list[float] = []
        self.last: StepMasks | None = None

    def begin(self, rids: Sequence[str], specs: Sequence[SampleSpec]) -> Future[StepMasks] | None:
        begin = time.perf_counter()
        begun = super().begin(rids, specs)
        if begun is None:
            return None  # a pass ahead, whose masks come with its plan
        self.begins.append(time.perf_counter() - begin)
        return _Timed(begun, self.waits)

    def _made(self, *arguments: Any) -> StepMasks:
        begin = time.perf_counter()
        self.last = super()._made(*arguments)
        self.makes.append(time.perf_counter() - begin)
        return self.last

    def chosen(self, rid: str, token: int) -> bool:
        begin = time.perf_counter()
        complete = super().chosen(rid, token)
        self.follows.append(time.perf_counter() - begin)
        return complete


def _words() -> Iterator[bytes]:
    """Distinct words of Python's own library, some with a space before them, and their beginnings."""
    seen: set[bytes] = set()
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        for found in re.findall(rb" ?[A-Za-z]+|[ \n]+|[^\w\s]+|[0-9]+", file.read_bytes()):
            for end in range(2, min(len(found), 16) + 1):
                if found[:end] not in seen:
                    seen.add(found[:end])
                    yield found[:end]


def make_tokenizer(folder: Path) -> None:
    """The tokenizer of the benchmark, in the files of a checkpoint."""
    char_of = {byte: char for char, byte in byte_of_char().items()}
    vocab = {char_of[byte]: byte for byte in range(256)}
    for word in _words():
        if len(vocab) == TOKENS:
            break
        vocab.setdefault("".join(char_of[byte] for byte in word), len(vocab))
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(text, special=True) for text in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")]
    )
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))


def make_config(folder: Path, shape: str, layers: int) -> None:
    """A config of one of the shapes; its weights are drawn where it is loaded."""
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": VOCAB, "num_hidden_layers": layers,
        "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "hidden_act": "silu", "torch_dtype": "bfloat16", "eos_token_id": 151_645, **SHAPES[shape],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shapes", nargs="+", default=["0.6b:8"])
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--wait", action="store_true", help="each step begins when the one before it was read")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        folder = asked.folder or Path(home)
        make_tokenizer(folder)
        begin = time.perf_counter()
        vocabulary = GrammarVocabulary(load_tokenizer(str(folder)), width=VOCAB, eos_ids=(151_645,))
        read_s = time.perf_counter() - begin
        for each in asked.shapes:
            shape, _, layers = each.partition(":")
            make_config(folder, shape, int(layers))
            with LLM(
                str(folder), load_format="dummy", dtype="bfloat16", max_total_tokens=ROWS * 512,
                skip_tokenizer_init=True, device=asked.device, max_running_requests=ROWS,
                disable_overlap_schedule=asked.wait,
            ) as llm:  # fmt: skip
                measure(llm, vocabulary, asked, shape=shape, layers=int(layers), read_vocabulary_s=round(read_s, 2))


def measure(llm: LLM, vocabulary: GrammarVocabulary, asked: argparse.Namespace, **about: Any) -> None:
    """Runs of the same 16 requests, free and under a grammar in turns; prints the line."""
    grammar = Grammar.of("json_schema", SCHEMA)
    begin = time.perf_counter()
    vocabulary.begin(grammar)
    compile_s = time.perf_counter() - begin
    ahead = llm._built.line.body._runner
    runner = ahead._runner  # type: ignore[attr-defined]
    plain, masks = GrammarMasks(lambda: vocabulary, WallClock(), width=VOCAB), TimedMasks(vocabulary)
    llm._check_grammar = lambda _: None  # type: ignore[method-assign]
    begins: list[float] = []
    """When each step began, of those in which all rows decode."""
    run = runner.launch

    def timed(plan: Any, *behind: Any) -> Any:
        if len(plan.work) == ROWS and all(len(each.tokens) == 1 for each in plan.work):
            begins.append(time.perf_counter())
        return run(plan, *behind)

    runner.launch = timed
    prompts = [[1 + row * 7 + at % 1000 for at in range(PROMPT)] for row in range(ROWS)]
    steps: dict[str, list[list[float]]] = {"free": [], "guided": [], "timed": []}
    for _ in range(asked.rounds + 1):
        for name, times in steps.items():
            begins.clear()
            runner._grammars = masks if name == "timed" else plain
            given = None if name == "free" else grammar
            params = SamplingParams(max_tokens=asked.tokens, grammar=given, seed=1, ignore_eos=True)
            llm.generate(prompts, params, use_tqdm=False)
            times.append([late - early for early, late in pairwise(begins)])
    del steps["free"][0], steps["guided"][0]  # the first round warms up
    plain.close()
    ms = {name: statistics.median(chain.from_iterable(times)) * 1e3 for name, times in steps.items()}
    rounds = [
        statistics.median(guided) / statistics.median(free)
        for free, guided in zip(steps["free"], steps["guided"], strict=True)
    ]
    assert masks.last is not None
    logits = torch.randn(ROWS, VOCAB).bfloat16().to(asked.device)
    kernels, rows, words = (
        runner._kernels,
        list(range(ROWS)),
        np.resize(masks.last.words_RW, (ROWS, (VOCAB + 31) // 32)),
    )
    own = {
        "begin": statistics.median(masks.begins) * 1e3,
        "wait": statistics.median(masks.waits) * 1e3,
        "apply": best_ms(lambda: kernels.mask_logits(logits, rows, words), 20),
        "follow": statistics.median(masks.follows) * 1e3 * ROWS,
    }
    if asked.device != "cpu":
        own["apply"] = _device_ms(lambda: kernels.mask_logits(logits, rows, words))
        own["wait"] = 0.0  # the device computes meanwhile; where it does not, the steps are longer
    emit(
        "grammar", device=asked.device, overlap=ahead.taken > 0, rows=ROWS, vocab=VOCAB, **about,
        step_ms=round(ms["free"], 3), guided_step_ms=round(ms["guided"], 3),
        longer_percent=round(100 * (ms["guided"] / ms["free"] - 1), 2),
        rounds_percent=[round(100 * (ratio - 1), 1) for ratio in sorted(rounds)],
        percent_of_step=round(100 * sum(own.values()) / ms["free"], 2), goal=2.0,
        **{f"{name}_ms": round(value, 3) for name, value in own.items()},
        host_wait_ms=round(statistics.median(masks.waits) * 1e3, 3), wait_max_ms=round(max(masks.waits) * 1e3, 2),
        masks_ms=round(statistics.median(masks.makes) * 1e3, 3), masks_max_ms=round(max(masks.makes) * 1e3, 2),
        compile_ms=round(compile_s * 1e3, 2),
    )  # fmt: skip


def _device_ms(job: Callable[[], object], repeat: int = 20) -> float:
    """Milliseconds that a job takes of the device, median: its copies and its kernels, behind work that hides its host
    side."""
    filler = torch.randn(4096, 4096, device="cuda")
    times = []
    for _ in range(repeat):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.mm(filler, filler)
        begin.record()
        job()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


if __name__ == "__main__":
    main()
