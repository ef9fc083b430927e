"""The registry: which column serves which op, and what it refuses."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import serinus.kernels.triton as triton_column
from serinus.core.errors import ConfigError
from serinus.kernels import Kernels, load
from serinus.kernels.registry import FILES


def test_every_op_of_the_contract_is_in_the_reference_and_nothing_else_is() -> None:
    fields = set(Kernels.__dataclass_fields__) - {"device", "columns", "warmer"}
    assert fields == set(FILES)
    for op, file in FILES.items():
        listed = importlib.import_module(f"serinus.kernels.ref.{file}").__all__
        assert op in listed or f"make_{op}" in listed, f"ref/{file}.py lists no {op}"


def test_a_cpu_has_its_own_column_for_every_op_that_its_engine_calls(cpu: Kernels, ref: Kernels) -> None:
    assert set(cpu.columns.values()) == {"cpu"}
    assert cpu.summary() == "all ops on column cpu"
    assert set(ref.columns.values()) == {"ref"}
    assert ref.summary() == "all ops on column ref"


def test_the_reference_serves_what_the_triton_column_lacks() -> None:
    kernels = load("cuda:0")
    assert kernels.device == "cuda"
    assert kernels.columns["canary_digest"] == "triton"
    assert kernels.columns["rms_norm"] == kernels.columns["canary_due"] == "ref"
    assert kernels.rms_norm is load("cuda", "ref").rms_norm
    assert kernels.summary().startswith("all ops on column ref, but triton: canary_digest")


def test_a_caller_that_asks_for_a_kernel_of_the_column_itself_is_not_given_the_reference() -> None:
    own = load("cuda", "triton", own=("watched_attention",)).columns
    assert own["watched_attention"] == own["pack_factors"] == "triton"
    assert load("cuda").columns["watched_attention"] == "ref", (
        "it stands in for paged_attention, which is the reference's"
    )
    with pytest.raises(ConfigError, match="column 'triton' has no rms_norm, expected a kernel of its own"):
        load("cuda", "triton", own=("rms_norm", "watched_attention"))


def test_each_load_has_a_memory_of_its_own_where_an_op_keeps_one() -> None:
    one, other = load("cpu"), load("cpu")
    assert one.paged_attention is not other.paged_attention
    assert one.rms_norm is other.rms_norm


@pytest.mark.parametrize(
    ("device", "column", "message"),
    [
        ("cpu", "cuda", "column 'cuda', expected one of auto, ref, cpu, triton"),
        ("cuda:0", "cpu", "column 'cpu' on device 'cuda:0'"),
        ("mps", "triton", "column 'triton' on device 'mps'"),
    ],
)
def test_a_column_that_is_not_there_or_not_for_the_device_is_refused(device: str, column: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(device, column)


@pytest.fixture
def extra_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A second folder of the triton column; its modules are forgotten afterwards."""
    monkeypatch.setattr(triton_column, "__path__", [*triton_column.__path__, str(tmp_path)])
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("serinus.kernels.triton.silu_mul")]:
        del sys.modules[name]
    importlib.invalidate_caches()


def test_a_new_file_in_a_column_is_all_that_a_new_kernel_needs(extra_folder: Path) -> None:
    (extra_folder / "silu_mul.py").write_text("def silu_mul(gate_up_T2F):\n    return gate_up_T2F[..., :1] * 0 + 7\n")
    importlib.invalidate_caches()
    kernels = load("cuda")
    assert kernels.columns["silu_mul"] == "triton"
    assert kernels.columns["gelu_mul"] == "ref"
    assert kernels.silu_mul(torch.ones(1, 2)).tolist() == [[7.0]]
