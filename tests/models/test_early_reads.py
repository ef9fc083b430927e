"""What kernels on a GPU read before they wait for the kernel before them (kernels/triton/dependent.py) was written by
none that may still run: another kernel was queued as usual behind the one that wrote it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from serinus.canary import CanaryRank, CheckSettings
from serinus.kernels import FP8_FORMATS, Kernels, load
from serinus.models import load_model, load_spec
from serinus.models.small_checkpoints import FAMILIES, make_checkpoint
from serinus.testing.direct import DirectEngine
from tests.models.parity import GREEDY, random_ids
from tests.models.test_parity import LATENT, LOADED, MIXTURES

BLANK = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")
PAGE = 8


class Writers(TorchDispatchMode):
    """Which operation of torch wrote a memory last, and how many there were. Those within an op of `kernels` are no
    kernels of their own: such a kernel may begin before the one before it has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.within, self.checked = 0, False, 0
        self._last: dict[int, float] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        out = func(*args, **given)
        changed = [
            value for value, argument in zip(args, func._schema.arguments, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]  # fmt: skip
        is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns)
        made = [out] if isinstance(out, torch.Tensor) and not is_view else list(out) if isinstance(out, tuple) else []
        if func._opname not in BLANK and (written := [each for each in changed + made if torch.is_tensor(each)]):
            self.count += not self.within
            for each in written:
                self._last[each.untyped_storage().data_ptr()] = self.count + 0.5 * self.within
        return out

    def told(self, inbox: Any) -> None:
        """What a step is told has been sent by a kernel."""
        self._last[inbox._there_W.untyped_storage().data_ptr()] = self.count + 0.5

    def check(self, what: str, early: torch.Tensor | None) -> None:
        """`early` is read by the next kernel before it waits."""
        self.checked += early is not None
        if early is not None:
            wrote = self._last.get(early.untyped_storage().data_ptr(), -1)
            assert self.count > wrote, f"{what} was written by the last kernel that was queued as usual, or behind it"


def early_reads(op: str, args: Any, kwargs: Any) -> dict[str, torch.Tensor | None]:
    """What the op's kernel reads before it waits, by name."""
    if op == "qk_rope_store":
        names = ("cos", "sin", "positions", "q_norm", "k_norm")
        return {**dict(zip(names, args[1:6], strict=True)), "slots": args[9]}
    if op in ("paged_attention", "watched_attention"):
        batch, digest = args[4], args[6] if op == "watched_attention" and len(args) > 6 else kwargs.get("digest")
        found = {"rows": batch.rows_B, "starts": batch.q_starts_B1, "contexts": batch.context_B}
        return found if digest is None else {**found, "due": digest.due_7B, "factors": digest.factors.factors}
    at = {"rms_norm": 1, "add_rms_norm": 2, "norm_linear": 2}.get(op)
    return {} if at is None else {"weight": args[at]}


def watched_kernels(writers: Writers) -> Kernels:
    """Those of the reference; each says what its kernel on a GPU would read early."""
    kernels = load("cpu", "ref")

    def watching(op: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            for name, early in early_reads(op, args, kwargs).items():
                writers.check(f"{op}: {name}", early)
            before, writers.within = writers.within, True
            try:
                return call(*args, **kwargs)
            finally:
                writers.within = before

        return called

    calls = {each.name: getattr(kernels, each.name) for each in fields(kernels)}
    ops = {name: call for name, call in calls.items() if callable(call) and name != "canary_watch"}
    return replace(kernels, **{name: watching(name, call) for name, call in ops.items()})


def run(path: Path, *, canary: bool = False, impl: str = "auto", **given: Any) -> Writers:
    """Chunks, decodes, and both in one step."""
    writers, spec = Writers(), load_spec(path, model_impl=impl)
    kernels = watched_kernels(writers)

    def watch(engine: DirectEngine) -> CanaryRank:
        settings = CheckSettings(page_size=PAGE, window=spec.window, real_data="all")
        return CanaryRank(settings, engine.pools, engine.tables, {p: spec.layers_of(p) for p in spec.parts}, kernels)

    model = load_model(spec, path, torch.float32, kernels)
    direct = DirectEngine(
        model, kernels, page_size=PAGE, page_count=128, canary=watch if canary else None, **given
    )  # fmt: skip
    inbox: Any = direct.runner._inbox  # type: ignore[attr-defined]
    send = inbox.send
    inbox.send = lambda: (send(), writers.told(inbox))
    seqs = [direct.start(random_ids(i, length), GREEDY, tokens=64) for i, length in enumerate((5, 40, 17))]
    with writers:
        direct.step([(seqs[0], 5), (seqs[1], 16)])
        direct.step([(seqs[0], 1), (seqs[1], 24), (seqs[2], 17)])
        for _ in range(2):
            direct.step([(seq, 1) for seq in seqs])
    assert not direct.violations
    assert writers.checked > 20
    return writers


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=pytest.mark.proof if name in LOADED + MIXTURES else ())
        for name in FAMILIES
        if name not in LATENT
    ],
)
def test_no_step_of_a_family_writes_what_the_next_kernel_reads_early(tmp_path: Path, family: str) -> None:
    path = make_checkpoint(tmp_path, family, tokenizer=False)
    assert run(path, canary=True).count > run(path).count


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_scales_of_keys_in_fp8_are_no_work_of_a_step(tmp_path: Path, family: str) -> None:
    path = make_checkpoint(tmp_path, family, layers=2, tokenizer=False)
    tensors = load_file(path / "model.safetensors")
    tensors |= {f"model.layers.{i}.self_attn.{half}_scale": torch.tensor(0.5) for i in range(2) for half in "kv"}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    run(path, kv_dtype=next(iter(FP8_FORMATS)))


@pytest.mark.slow
def test_nor_does_a_model_that_runs_through_transformers(tmp_path: Path) -> None:
    run(make_checkpoint(tmp_path, "qwen3", tokenizer=False), impl="transformers")


def test_what_was_written_last_is_seen() -> None:
    writers = Writers()
    with writers:
        positions = torch.zeros(3)
        view = positions[1:]
        torch.empty(3)
        with pytest.raises(AssertionError, match="positions was written by the last kernel"):
            writers.check("positions", view)
        torch.ones(1)
        writers.check("positions", view)
        writers.told(SimpleNamespace(_there_W=positions))
        with pytest.raises(AssertionError, match="positions was written by the last kernel"):
            writers.check("positions", view)
        positions.add_(1)
        with pytest.raises(AssertionError, match="positions was written by the last kernel"):
            writers.check("positions", view)
