"""Runs the benchmarks, keeps their JSON lines, and makes the table of the docs from them: numbers are never typed.

    python benchmarks/table.py --run                 run all, print the table
    python benchmarks/table.py --run job sched       run two of them
    python benchmarks/table.py --write README.md     put the table of the kept results between the markers of a file

A benchmark is a script of this folder whose last line of JSON names itself (`"benchmark": ...`); its line is kept in
benchmarks/results/. Every row stands beside its ceiling, its peer or its goal, measured in the same run. What GPUs gave
is kept by `gpu_results.py`; what stands beside it of an H100 is of docs/GPU.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from table_rows import ROWS

from serinus.core.cores import cores, threads_env

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
SECONDS_MAX = 1800


def scripts() -> dict[str, Path]:
    """Benchmarks by name: the scripts of this folder that run by themselves and are not this one."""
    found = {file.stem: file for file in sorted(HERE.glob("*.py")) if file != Path(__file__).resolve()}
    return {name: file for name, file in found.items() if '__name__ == "__main__"' in file.read_text(encoding="utf-8")}


def run(name: str, file: Path) -> dict[str, Any]:
    """Run one, with the environment of an engine that has all cores, and keep its line. Raises RuntimeError where it
    fails or says nothing."""
    done = subprocess.run(
        [sys.executable, str(file)],
        cwd=HERE.parent,
        env={**threads_env(cores()), "CUDA_VISIBLE_DEVICES": ""},  # the table is of the CPU
        stdout=subprocess.PIPE,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"benchmark"')]
    if done.returncode or not lines:
        raise RuntimeError(f"benchmarks: {name} ended with exit code {done.returncode} and {len(lines)} results")
    result: dict[str, Any] = json.loads(lines[-1])
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{result['benchmark']}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result


def kept() -> dict[str, dict[str, Any]]:
    """The kept results by benchmark."""
    return {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in sorted(RESULTS.glob("*.json"))}


def table(results: dict[str, dict[str, Any]]) -> str:
    """Markdown; only benchmarks with a result have rows, and a row only where that has its figures."""
    rows, places = [], dict[str, str]()
    for row in ROWS:
        result = results.get(row.benchmark)
        if result is None:
            continue
        try:
            cells = (row.here.format(**result), row.beside.format(**result), row.goal.format(**result))
            reached = row.reached(result)
        except KeyError as missing:  # kept from before the row was
            print(f"... left out: {row.what}: the result kept of {row.benchmark} has no {missing}", file=sys.stderr)
            continue
        mark = places.setdefault(_where(result), chr(ord("a") + len(places)))
        rows.append(f"| {row.what} | {' | '.join(cells)} | {reached.replace('missed', '**missed**')} | {mark} |")
    missed = sum("**missed**" in row for row in rows)
    return "\n".join(
        [
            "| what | here | beside it, same run but for an H100 | goal | reached | on |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
            f"{missed} goals are missed. Rows of different letters are of different machines or commits (`-dirty`: with"
            " changes that were not committed):",
            "",
            *(f"- {mark}: {where}" for where, mark in places.items()),
        ]
    )


def _where(result: dict[str, Any]) -> str:
    """Machine and commit of a result, in words."""
    on, commit = result.get("machine", "an unknown machine"), result.get("commit", "unknown")
    if isinstance(on, dict):  # a few benchmarks say less
        on = f"{on['cores']} cores of {on['cpu']}, torch {on['torch']}, Python {on['python']}"
    if "gpu" in result:
        on = f"{result['gpu']}, {on}"
    return f"{on}; commit {commit}"


def write(path: Path, text: str) -> None:
    """Put the table between the markers of a file. Raises RuntimeError where there are none."""
    page = path.read_text(encoding="utf-8")
    if BEGIN not in page or END not in page:
        raise RuntimeError(f"benchmarks: {path} has no {BEGIN} and {END}")
    head, rest = page.split(BEGIN, 1)
    path.write_text(f"{head}{BEGIN}\n{text}\n{END}{rest.split(END, 1)[1]}", encoding="utf-8")


def main() -> int:
    """See the head of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", nargs="*", metavar="NAME", help="run these (none named: all)")
    parser.add_argument("--write", metavar="FILE", help="put the table between the markers of this file")
    arguments = parser.parse_args()
    failed = []
    if arguments.run is not None:
        for name, file in scripts().items():
            # Unnamed, those for a GPU stay away: most machines have none.
            if name not in arguments.run and (arguments.run or "gpu" in name):
                continue
            print(f"... {name}", file=sys.stderr, flush=True)
            try:
                run(name, file)
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                failed.append(name)
                print(error, file=sys.stderr)
    text = table(kept())
    print(text)
    if arguments.write and not failed:
        write(Path(arguments.write), text)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
