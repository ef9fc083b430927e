"""Keeps what the table of the README shows of a session on GPUs: of one card as `results/gpu.json`, of slices on two
beside each of them alone as `results/gpus.json`.

    python -m benchmarks.gpu_session benchmarks --out FOLDER            (on the machine with a GPU)
    python -m benchmarks.gpu_session benchmarks_of_gpus --out FOLDER2   (on one with two)
    python -m benchmarks.gpu_results FOLDER FOLDER2 && python benchmarks/table.py --write README.md
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu_session import BENCHMARKS_OF_GPUS

__all__ = ["gathered"]

RESULTS = Path(__file__).resolve().parent / "results"
_SHARED = ("gpu", "machine", "commit")
_MODEL = "qwen3-8b"


def gathered(folder: Path) -> dict[str, dict[str, Any]]:
    """The results of a session's folder, by the name they are kept under. Raises ValueError: a piece of two GPUs has
    said nothing of its decode, as one that was ended at its limit. A format string has no place for a key with a colon,
    or of digits alone."""
    found: dict[str, dict[str, Any]] = {}
    for piece, line in _lines(folder):
        where, figures = _place(line)
        if not where:
            continue
        name = "gpus" if piece in BENCHMARKS_OF_GPUS else "gpu"
        kept = found.setdefault(name, {"benchmark": name})
        kept |= {each: line[each] for each in _SHARED if each in line}
        if name == "gpus":
            kept.setdefault(piece, {})[where[0]] = figures
        else:
            kept.setdefault(where[0], {}).setdefault(where[1], {})[where[2]] = figures
    if (two := found.get("gpus")) is not None:
        silent = [piece for piece in BENCHMARKS_OF_GPUS if "decode" not in two.get(piece, {})]
        if silent:
            raise ValueError(f"benchmarks: {folder} has no decode step of {', '.join(silent)}, expected one of each")
        slices, *alone = (two[piece]["decode"]["step_ms"] for piece in BENCHMARKS_OF_GPUS)
        two["gain"] = min(alone) / slices
    return found


def _lines(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for file in sorted(folder.glob("*.txt")):
        for line in file.read_text(encoding="utf-8").splitlines():
            if line.startswith('{"benchmark"'):
                yield file.stem, json.loads(line)


def _place(line: dict[str, Any]) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Where a line's figures are kept; nowhere: the table shows none of them."""
    name, canary = line["benchmark"], str(line.get("canary", line.get("coverage"))).replace(":", "_")
    of = f"of_{line.get('batch', line.get('streams'))}"
    is_plain = line.get("model") == _MODEL and line.get("weights") == "auto" and line.get("graphs")
    if name == "gpu_engine_decode" and is_plain:
        return ("decode", canary, of), {each: line[each] for each in ("step_ms", "floor_ms", "tok_s")}
    if name == "gpu_engine_prefill" and is_plain:
        return ("prefill", canary, "of_64"), {each: line[each] for each in ("tok_s", "ceiling_tok_s")}
    if name == "gpu_server":
        return ("server", "http", of), {each: line[each] for each in ("llm_tok_s", "http_tok_s", "http_cost")}
    if name == "gpu_canary":
        return ("canary", canary, of), {each: line[each] for each in ("share", "goal", "step_ms")}
    return (), {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    for folder in parser.parse_args().folders:
        for name, result in gathered(folder).items():
            file = RESULTS / f"{name}.json"
            before = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
            file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
            gone = sorted(before.keys() - result.keys())
            print(f"{folder}: kept as {file}" + (f", without {', '.join(gone)} of before" if gone else ""))


if __name__ == "__main__":
    main()
