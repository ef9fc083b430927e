"""The registry: which column serves which op, and what it refuses."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import serinus.kernels.triton as triton_column
from serinus.core.errors import ConfigError
from serinus.kernels import Kernels, load
from serinus.kernels.registry import FILES


def test_every_op_of_the_contract_is_in_the_reference_and_nothing_else_is() -> None:
    fields = set(Kernels.__dataclass_fields__) - {"device", "columns", "decode_layers", "warmer"}
    assert fields == set(FILES)
    for op, file in FILES.items():
        listed = importlib.import_module(f"serinus.kernels.ref.{file}").__all__
        assert op in listed or f"make_{op}" in listed, f"ref/{file}.py lists no {op}"


def test_a_cpu_has_its_own_column_for_every_op_that_its_engine_calls(cpu: Kernels, ref: Kernels) -> None:
    assert set(cpu.columns.values()) == {"cpu"}
    assert cpu.summary() == "all ops on column cpu"
    assert set(ref.columns.values()) == {"ref"}
    assert ref.summary() == "all ops on column ref"


def test_the_triton_column_has_the_ops_of_a_step_and_the_cpu_those_of_the_host() -> None:
    kernels = load("cuda:0")
    assert kernels.device == "cuda"
    served = {
        column: {op for op, name in kernels.columns.items() if name == column} for column in kernels.columns.values()
    }
    assert served.keys() == {"triton", "cpu"}
    assert kernels.columns["pack_experts"] == "triton"
    assert served["cpu"] == {"canary_due", "chain_hashes", "page_digests"}
    assert kernels.summary() == "all ops on column triton, but cpu: page_digests, canary_due, chain_hashes"


def test_a_caller_that_asks_for_a_kernel_of_the_column_itself_is_not_given_the_reference() -> None:
    own = load("cuda", "triton", own=("watched_attention",)).columns
    assert own["watched_attention"] == own["pack_factors"] == "triton"
    with pytest.raises(ConfigError, match="column 'triton' has no page_digests, expected a kernel of its own"):
        load("cuda", "triton", own=("page_digests", "watched_attention"))


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
    """A folder of the triton column before its own; its modules are forgotten afterwards."""
    name = "serinus.kernels.triton.mask_logits"
    monkeypatch.setattr(triton_column, "__path__", [str(tmp_path), *triton_column.__path__])
    sys.modules.pop(name, None)
    yield tmp_path
    sys.modules.pop(name, None)
    importlib.invalidate_caches()


def test_a_new_file_in_a_column_is_all_that_a_new_kernel_needs(extra_folder: Path) -> None:
    (extra_folder / "mask_logits.py").write_text(
        "def mask_logits(logits_BV, rows, words_RW):\n    logits_BV.fill_(7)\n"
    )
    importlib.invalidate_caches()
    kernels = load("cuda")
    assert kernels.columns["mask_logits"] == "triton"
    logits = torch.ones(1, 2)
    kernels.mask_logits(logits, [], np.zeros((0, 1), np.int32))
    assert logits.tolist() == [[7.0, 7.0]]
