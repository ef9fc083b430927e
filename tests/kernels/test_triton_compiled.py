"""The Triton column compiles for GPUs on a machine without one, and takes no more of them than it took."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import triton

import serinus.kernels.triton

from .triton_cases import run_cases

COLUMN = Path(serinus.kernels.triton.__path__[0])


@pytest.mark.proof
def test_every_triton_kernel_compiles_for_a_gpu_on_a_machine_without_one(tmp_path: Path) -> None:
    assert run_cases("compile", f"TRITON_CACHE_DIR={tmp_path}") == ""
    started = re.findall(r"^ +(?:[\w.]+ = )?(_\w+)\[\(", "".join(map(Path.read_text, COLUMN.glob("*.py"))), re.M)
    assert len(started) >= 6
    assert {path.stem for path in tmp_path.glob("*/*.cubin")} == set(started)


@pytest.mark.proof
def test_products_with_quantized_weights_compile_for_gpus_before_hopper(tmp_path: Path) -> None:
    assert run_cases("ampere", f"TRITON_CACHE_DIR={tmp_path}") == ""
    assert {"_quantized", "_quantized_experts", "_e2m1_experts"} <= {path.stem for path in tmp_path.glob("*/*.cubin")}


RESOURCES_MAX = {
    "_add": (48, 0), "_beside": (160, 0), "_best": (64, 0), "_chunk": (255, 264), "_contiguous": (200, 0),
    "_decode": (255, 280), "_draw": (160, 0), "_e2m1_experts": (148, 0), "_experts": (200, 0), "_gather": (64, 16),
    "_latent": (255, 256), "_latent_join": (64, 0), "_latent_store": (64, 0), "_norm": (64, 0), "_pick": (32, 0),
    "_pull": (64, 0), "_quantized": (255, 0), "_quantized_experts": (244, 0), "_rope_store": (64, 0),
    "_round": (40, 0), "_round_spans": (40, 0), "_rows": (160, 0), "_sort": (96, 0), "_tell": (40, 0),
    "_threshold": (112, 0), "_widen": (40, 0),
}  # fmt: skip
"""Registers of a thread and bytes spilled, by kernel. With more warps what spills is slower."""
SPILLING = 11
"""Kernels that spill: decode attention that digests (by one warp of up to 8 and of 16 parts), chunks of heads of 128
(both over FP8, too), and tiles of 64 pairs over latent rows."""


@pytest.mark.proof
def test_rows_of_slices_are_loaded_and_stored_16_bytes_at_a_time(tmp_path: Path) -> None:
    assert run_cases("pull", f"TRITON_CACHE_DIR={tmp_path}") == ""
    texts = [path.read_text() for path in tmp_path.glob("*/_pull.ptx")]
    assert len(texts) == 4, "whole pages and slices, moved and summed in place"
    for text in texts:
        assert len(re.findall(r"ld\.global\S*\.v2\.b64", text)) == 4, "2,048 words by 256 threads, in pairs"
        assert len(re.findall(r"st\.global\S*\.v2\.b64", text)) in (0, 4)
        assert not re.findall(r"(div|rem)\.[su]64", text), "rows are found by 32-bit numbers"


@pytest.mark.proof
def test_no_triton_kernel_takes_more_registers_at_the_shapes_of_models_than_it_took(tmp_path: Path) -> None:
    assert run_cases("shapes", f"TRITON_CACHE_DIR={tmp_path}") == ""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    found: dict[str, list[tuple[int, int]]] = {}
    for path in tmp_path.glob("*/*.cubin"):
        told = subprocess.run([tool, "--dump-resource-usage", path], capture_output=True, text=True, check=True).stdout
        registers, stack = (int(re.findall(rf"{name}:(\d+)", told)[0]) for name in ("REG", "STACK"))
        found.setdefault(path.stem, []).append((registers, stack))
    assert found.keys() == RESOURCES_MAX.keys()
    for name, taken in found.items():
        assert max(registers for registers, _ in taken) <= RESOURCES_MAX[name][0], f"{name}: {taken}"
        assert max(stack for _, stack in taken) <= RESOURCES_MAX[name][1], f"{name}: {taken}"
    assert sum(stack > 16 for taken in found.values() for _, stack in taken) <= SPILLING
