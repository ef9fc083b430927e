"""Runs the benchmarks, keeps their JSON lines, and makes the table of the docs from them: numbers are never typed.

    python benchmarks/table.py --run                 run all, print the table
    python benchmarks/table.py --run job sched       run two of them
    python benchmarks/table.py --write README.md     put the table of the kept results between the markers of a file

A benchmark is a script of this folder whose last line of JSON names itself (`"benchmark": ...`); its line is kept in
benchmarks/results/. Every row stands beside its ceiling, its peer or its goal, measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serinus.core.cores import cores, threads_env

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
SECONDS_MAX = 1800


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table: format strings over the result of a benchmark."""

    benchmark: str
    what: str
    here: str
    beside: str
    goal: str


ROWS = (
    Row(
        benchmark="job",
        what="16 requests of 256 + 64 tokens, whole job",
        here="{seconds:.2f} s",
        beside="transformers {transformers_s:.2f} s; floor {floor_s:.2f} s",
        goal=">= 2.3x transformers: {ratio:.2f}x",
    ),
    Row(
        benchmark="job",
        what="of it prefill",
        here="{prefill_s:.2f} s",
        beside="{prefill_of_floor:.0%} of the matmul rate ({matmul_gflop_s:.0f} GFLOP/s)",
        goal=">= 75 %",
    ),
    Row(
        benchmark="job",
        what="decode step, 16 requests, under the canary as it is by default",
        here="{decode_step_ms:.1f} ms",
        beside="{decode_of_floor:.0%} of the floor ({bandwidth_gb_s:.0f} GB/s), {decode_of_op_floor:.0%} op by op",
        goal="",
    ),
    Row(
        benchmark="job",
        what="the same without the canary",
        here="{plain_step_ms:.1f} ms",
        beside="{plain_of_floor:.0%} of the floor, {plain_of_op_floor:.0%} op by op",
        goal=">= 70 %",
    ),
    Row(
        benchmark="job",
        what="the same with temperature 0.7, top_p 0.95 and repetition penalty 1.05",
        here="{sampled_step_ms:.1f} ms",
        beside="greedy {decode_step_ms:.1f} ms",
        goal="",
    ),
    Row(
        benchmark="sampling",
        what="sampling 16 rows of 151,936 on one core: temperature; top_p; top_k and top_p; penalties of 128k prompts",
        here="{ms[temperature]:.1f}; {ms[top_p]:.1f}; {ms[top_k_top_p]:.1f}; {ms[penalties]:.1f} ms",
        beside="greedy {ms[greedy]:.1f} ms, a plain sum {floor_ms:.1f} ms",
        goal="<= {goal_ms:.0f} ms",
    ),
    Row(
        benchmark="sampling",
        what="the same: 65,536 biases; logprobs; all of these (300 biases) at once",
        here="{ms[logit_bias_65536]:.1f}; {ms[logprobs]:.1f}; {ms[all]:.1f} ms",
        beside="",
        goal="<= {goal_ms:.0f} ms",
    ),
    Row(
        benchmark="grammar",
        what="16 rows of 151,936 under a JSON Schema, 8 layers of Qwen3-0.6B: what a step has of it",
        here="{percent_of_step:.1f} %",
        beside="step {step_ms:.1f} ms, under it {guided_step_ms:.1f} in all; masks {masks_ms:.1f} ms beside it",
        goal="<= {goal:.0f} %",
    ),
    Row(
        benchmark="job",
        what="one stream",
        here="{stream_tok_per_s:.0f} tok/s",
        beside="{stream_of_floor:.0%} of the bandwidth floor",
        goal=">= 65 %",
    ),
    Row(
        benchmark="job",
        what="memory of that process",
        here="{resident_mb} MB",
        beside="weights and KV pool {weights_and_kv_mb} MB",
        goal="<= 600 MB more",
    ),
    Row(
        benchmark="stall",
        what="longest gap of 8 streams while a prompt of 3,600 tokens is computed",
        here="{bound[gap_s]:.2f} s",
        beside="chunks of 2,048 without a bound {chunk[gap_s]:.2f} s",
        goal="<= 0.45 s",
    ),
    Row(
        benchmark="stall",
        what="first token of it; of a prompt of 64 tokens just behind it",
        here="{bound[long_s]:.1f}; {bound[short_s]:.1f} s",
        beside="{chunk[long_s]:.1f}; {chunk[short_s]:.1f} s",
        goal="<= 50 % later: {cost:.0%}",
    ),
    Row(
        benchmark="sizes",
        what="16 requests of 256 + 64 tokens, 221M, by threads",
        here="{texts[221m][here]}",
        beside="{texts[221m][beside]}",
        goal="",
    ),
    Row(
        benchmark="sizes",
        what="16 requests of 256 + 16 tokens, Qwen3-0.6B shape, by threads",
        here="{texts[0.6b][here]}",
        beside="{texts[0.6b][beside]}",
        goal="",
    ),
    Row(
        benchmark="sizes",
        what="the same, Qwen3-1.7B shape (`--large`), by threads",
        here="{texts[1.7b][here]}",
        beside="{texts[1.7b][beside]}",
        goal="",
    ),
    Row(
        benchmark="serving",
        what="HTTP, tokenizer, detokenizer at 16 streams",
        here="{http_tok_per_s:.0f} tok/s",
        beside="without them {offline_tok_per_s:.0f} tok/s",
        goal="<= 3 %: {http_overhead:.1%}",
    ),
    Row(
        benchmark="serving",
        what="the same job by `LLM`, its steps bounded to 300 ms as the server's are",
        here="{offline_tok_per_s:.0f} tok/s",
        beside="not bounded {unbounded_tok_per_s:.0f} tok/s: {bound_overhead:.1%}",
        goal="",
    ),
    Row(
        benchmark="serving",
        what="first token of 2,000 tokens, handed over (shm)",
        here="{handoff_ttft_s:.2f} s",
        beside="computed by one engine {local_ttft_s:.2f} s; taking in {take_in_gb_s:.1f} GB/s",
        goal="<= 10 % more: {handoff_cost_of_prefill:.1%}",
    ),
    Row(
        benchmark="serving",
        what="`serinus up` of 1 + 1 engines ready",
        here="{up_ready_s:.1f} s",
        beside="",
        goal="< 10 s",
    ),
    Row(
        benchmark="sched",
        what="plan + commit, 64 running",
        here="{step_ms:.2f} ms",
        beside="plain data alone {ceiling[step_ms]:.2f} ms",
        goal="<= {goal_ms:g} ms",
    ),
    Row(
        benchmark="cache",
        what="match a 128k prefix over 256 nodes",
        here="{figures[match_128k_256_nodes_us][value]:.0f} us",
        beside="compare alone {figures[match_128k_256_nodes_us][floor]:.0f} us",
        goal="<= {figures[match_128k_256_nodes_us][goal]:.0f} us",
    ),
    Row(
        benchmark="tiers",
        what="first token of 2,000 shared tokens, found on the device",
        here="{device_ttft_ms:.0f} ms",
        beside="computed {cold_ttft_ms:.0f} ms",
        goal=">= {goals[device]:.0f}x: {device_times:.0f}x",
    ),
    Row(
        benchmark="tiers",
        what="the same, found on the host",
        here="{host_ttft_ms:.0f} ms",
        beside="loads {load_gb_s:.1f}, backups {backup_gb_s:.1f}, plain memcpy {memcpy_gb_s:.1f} GB/s",
        goal=">= {goals[host]:.0f}x: {host_times:.0f}x",
    ),
    Row(
        benchmark="tiers",
        what="the same, found in files",
        here="{file_ttft_ms:.0f} ms",
        beside="reads {fetch_gb_s:.1f} GB/s, verified; plain files {plain_read_gb_s:.1f} GB/s",
        goal=">= {goals[file]:.0f}x: {file_times:.0f}x",
    ),
    Row(
        benchmark="tiers",
        what="tiers on, never hit (16 requests of 256 + 64 tokens)",
        here="host {host_cost:.1%}, host and files {file_cost:.1%} of the throughput",
        beside="",
        goal="<= 2 %",
    ),
    Row(
        benchmark="tiers",
        what="the same: CPU of the threads that copy, check and write, of all CPU of the job",
        here="host {host_cpu_share:.2%}, host and files {file_cpu_share:.2%}",
        beside="{host_cpu_ms:.0f}; {file_cpu_ms:.0f} ms",
        goal="<= 2 %",
    ),
    Row(
        benchmark="tiers",
        what="the same with the host tier under write_back: what is evicted is copied",
        here="{write_back_cost:.1%} of the throughput",
        beside="",
        goal="",
    ),
    Row(
        benchmark="handoff",
        what="a prompt's pages through shared memory, digests checked",
        here="{paths_gb_s[shm]:.1f} GB/s",
        beside="{got[shm_of_copy]:.0%} of a plain copy, {got[shm_of_socket]:.1f}x a bare loopback socket",
        goal=">= 60 %, >= 2x",
    ),
    Row(
        benchmark="handoff",
        what="the same through TCP",
        here="{paths_gb_s[tcp]:.1f} GB/s",
        beside="{got[tcp_of_socket]:.0%} of a bare loopback socket",
        goal=">= 70 %",
    ),
    Row(
        benchmark="handoff",
        what="abort until its pages are free",
        here="{got[abort_ms]:.2f} ms",
        beside="{got[messages]:.0f} control messages a handoff, {got[handoffs_per_s]:.0f} one-page handoffs a second",
        goal="<= 1 ms, <= 8, >= 500",
    ),
    Row(
        benchmark="parallel",
        what="the whole job by two stages of one thread each (PP2), throughput",
        here="{pp2_ratio:.2f}x one process",
        beside="ranks wait {pp2_waiting:.0%} of their steps",
        goal=">= 0.9x",
    ),
    Row(
        benchmark="parallel",
        what="the same by two slices of one thread each (TP2)",
        here="{tp2_ratio:.2f}x one process",
        beside="ranks wait {tp2_waiting:.0%} of their steps",
        goal=">= 0.7x",
    ),
    Row(
        benchmark="parallel",
        what="leading 2 x 2 ranks, a decode step of 16 requests",
        here="{line_ms:.2f} ms",
        beside="{line_bytes:.0f} bytes to three ranks; 64 requests {line64_ms:.2f} ms",
        goal="<= 0.3 ms",
    ),
    Row(
        benchmark="parallel",
        what="first token of 2,000 tokens that two stages prefill for another engine",
        here="{handed_ttft_s:.2f} s",
        beside="the stages' own {own_ttft_s:.2f} s: {handed_ratio:.2f}x",
        goal="<= 1.05x",
    ),
    Row(
        benchmark="canary",
        what="KV canary, first 16 bytes of each row, rotating:16, of a decode step of 16 requests",
        here="{modes[partial_rotating][decode_overhead]:.1%}",
        beside="without it {decode_step_ms:.1f} ms",
        goal="<= 1 %",
    ),
    Row(
        benchmark="canary",
        what="the same, every byte, rotating:16: the default",
        here="{modes[all_rotating][decode_overhead]:.1%}",
        beside="of a prefill chunk {modes[all_rotating][prefill_overhead]:.1%}",
        goal="<= 1.5 %",
    ),
    Row(
        benchmark="canary",
        what="the same of Qwen3-0.6B's shape",
        here="{qwen3_0_6b[modes][all_rotating][decode_overhead]:.1%}",
        beside="without it {qwen3_0_6b[decode_step_ms]:.1f} ms",
        goal="<= 1.5 %",
    ),
    Row(
        benchmark="canary",
        what="the same, every byte in every step",
        here="{modes[all_full][decode_overhead]:.1%}",
        beside="of a prefill chunk {modes[all_full][prefill_overhead]:.1%}",
        goal="<= 15 %",
    ),
    Row(
        benchmark="canary",
        what="digest of every byte",
        here="{digest[digest_gb_s]:.1f} GB/s",
        beside="plain sum of as many bytes {digest[sum_gb_s]:.1f} GB/s",
        goal=">= {goal_gb_s:.0f} GB/s",
    ),
    Row(
        benchmark="front_gap",
        what="a stream's longest gap grows by, while texts and chats of 30 MB come",
        here="{grown_ms:.0f} ms",
        beside="longest gap without {alone_ms:.0f} ms",
        goal="<= {goal_ms:.0f} ms",
    ),
    Row(
        benchmark="front",
        what="front, CPU per streamed token (chat)",
        here="{figures[front_chat_us][value]:.0f} us",
        beside="one send() {send_floor_us:.0f} us",
        goal="<= {figures[front_chat_us][goal]:.0f} us",
    ),
    Row(
        benchmark="front",
        what="HTTP answer on a kept connection, one token",
        here="{figures[answer_ms][value]:.1f} ms",
        beside="the engine's own {figures[engine_answer_ms][value]:.1f} ms; a refused POST "
        "{figures[refusal_ms][value]:.1f} ms; by the router {figures[router_answer_ms][value]:.1f} ms",
        goal="<= {figures[kept_connection_ms][goal]:.0f} ms more: {figures[kept_connection_ms][value]:.1f} ms",
    ),
    Row(
        benchmark="dashboard",
        what="an open dashboard, CPU of all that is done for it, of the engine's CPU; four open",
        here="{percent[pages_1]:.2f}; {percent[pages_4]:.2f} %",
        beside="of it on the step thread {step_thread_percent:.2f} %; none open: {unwatched_calls} calls",
        goal="<= {goal_percent} %",
    ),
    Row(
        benchmark="client",
        what="`bench serve`, CPU per streamed token",
        here="{client_us_per_token:.1f} us",
        beside="recv() alone {floor_us_per_token:.1f} us",
        goal="<= {goal_us:.0f} us",
    ),
)
"""What the docs show; a benchmark may measure more."""


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
    lines = ["| what | here | beside it, same run | goal |", "|---|---|---|---|"]
    for row in ROWS:
        result = results.get(row.benchmark)
        if result is None:
            continue
        try:
            cells = (row.here.format(**result), row.beside.format(**result), row.goal.format(**result))
        except KeyError as missing:  # kept from before the row was
            print(f"... left out: {row.what}: the result kept of {row.benchmark} has no {missing}", file=sys.stderr)
            continue
        lines.append(f"| {row.what} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *_where(results)])


def _where(results: dict[str, dict[str, Any]]) -> list[str]:
    """Machine and commit of the results that have rows, in words."""
    results = {row.benchmark: results[row.benchmark] for row in ROWS if row.benchmark in results}
    by_machine: dict[str, list[str]] = {}
    for name, result in results.items():
        if isinstance(on := result.get("machine"), dict):  # a few benchmarks say less
            where = f"{on['cores']} cores of {on['cpu']}, torch {on['torch']}, Python {on['python']}"
            by_machine.setdefault(where, []).append(name)
    ordered = sorted(by_machine, key=lambda where: -len(by_machine[where]))
    words = [where if not at else f"{', '.join(by_machine[where])} on {where}" for at, where in enumerate(ordered)]
    commits = sorted({str(result.get("commit", "unknown")) for result in results.values()})
    return [f"Measured on {'; '.join(words) or 'an unknown machine'}; at {', '.join(commits)}."]


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
            if name not in arguments.run and (arguments.run or "_gpu" in name):
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
