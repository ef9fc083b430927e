"""The rows of the table of `benchmarks/table.py`: what is shown of each result, and what it was to reach."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_SIGNS: Mapping[str, Callable[[float, float], bool]] = {"<=": operator.le, "<": operator.lt, ">=": operator.ge}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table: format strings over the result of a benchmark."""

    benchmark: str
    what: str
    here: str
    beside: str
    goal: str
    """What was aimed at; empty = nothing was."""
    met: tuple[str, ...] = ()
    """What must hold for the goal to be met: a figure, `<=`, `<` or `>=`, and a figure or a sum (`a + b`)."""

    def reached(self, result: Mapping[str, Any]) -> str:
        """`met` or `missed`, by the figures as they were kept, not as they are shown; empty without a goal."""
        if not self.met:
            return ""
        return "met" if all(_holds(each.format(**result)) for each in self.met) else "missed"


def _holds(claim: str) -> bool:
    figure, sign, bound = claim.split(maxsplit=2)
    return _SIGNS[sign](float(figure), sum(map(float, bound.split("+"))))


ROWS = (
    Row(
        benchmark="job",
        what="16 requests of 256 + 64 tokens, whole job",
        here="{seconds:.2f} s",
        beside="transformers {transformers_s:.2f} s; floor {floor_s:.2f} s",
        goal=">= 2.3x transformers: {ratio:.2f}x",
        met=("{ratio} >= 2.3",),
    ),
    Row(
        benchmark="job",
        what="of it prefill",
        here="{prefill_s:.2f} s",
        beside="{prefill_of_floor:.0%} of the matmul rate ({matmul_gflop_s:.0f} GFLOP/s)",
        goal=">= 75 %",
        met=("{prefill_of_floor} >= 0.75",),
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
        met=("{plain_of_floor} >= 0.7",),
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
        met=(
            "{ms[temperature]} <= {goal_ms}",
            "{ms[top_p]} <= {goal_ms}",
            "{ms[top_k_top_p]} <= {goal_ms}",
            "{ms[penalties]} <= {goal_ms}",
        ),
    ),
    Row(
        benchmark="sampling",
        what="the same: 65,536 biases; logprobs; all of these (300 biases) at once",
        here="{ms[logit_bias_65536]:.1f}; {ms[logprobs]:.1f}; {ms[all]:.1f} ms",
        beside="",
        goal="<= {goal_ms:.0f} ms",
        met=("{ms[logit_bias_65536]} <= {goal_ms}", "{ms[logprobs]} <= {goal_ms}", "{ms[all]} <= {goal_ms}"),
    ),
    Row(
        benchmark="grammar",
        what="16 rows of 151,936 under a JSON Schema, 8 layers of Qwen3-0.6B: what a step has of it",
        here="{percent_of_step:.1f} %",
        beside="step {step_ms:.1f} ms, under it {guided_step_ms:.1f} in all; masks {masks_ms:.1f} ms beside it",
        goal="<= {goal:.0f} %",
        met=("{percent_of_step} <= {goal}",),
    ),
    Row(
        benchmark="job",
        what="one stream",
        here="{stream_tok_per_s:.0f} tok/s",
        beside="{stream_of_floor:.0%} of the bandwidth floor",
        goal=">= 65 %",
        met=("{stream_of_floor} >= 0.65",),
    ),
    Row(
        benchmark="job",
        what="memory of that process",
        here="{resident_mb} MB",
        beside="weights and KV pool {weights_and_kv_mb} MB",
        goal="<= 600 MB more",
        met=("{resident_mb} <= 600 + {weights_and_kv_mb}",),
    ),
    Row(
        benchmark="stall",
        what="longest gap of 8 streams while a prompt of 3,600 tokens is computed",
        here="{bound[gap_s]:.2f} s",
        beside="chunks of 2,048 without a bound {chunk[gap_s]:.2f} s",
        goal="<= 0.45 s",
        met=("{bound[gap_s]} <= 0.45",),
    ),
    Row(
        benchmark="stall",
        what="first token of it; of a prompt of 64 tokens just behind it",
        here="{bound[long_s]:.1f}; {bound[short_s]:.1f} s",
        beside="{chunk[long_s]:.1f}; {chunk[short_s]:.1f} s",
        goal="<= 50 % later: {cost:.0%}",
        met=("{cost} <= 0.5",),
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
        goal="<= 3 %: {http_overhead:.1%} +- {http_spread:.1%}",
        met=("{http_overhead} <= 0.03",),
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
        met=("{handoff_cost_of_prefill} <= 0.1",),
    ),
    Row(
        benchmark="serving",
        what="`serinus up` of 1 + 1 engines ready",
        here="{up_ready_s:.1f} s",
        beside="",
        goal="< 10 s",
        met=("{up_ready_s} < 10",),
    ),
    Row(
        benchmark="sched",
        what="plan + commit, 64 running",
        here="{step_ms:.2f} ms",
        beside="plain data alone {ceiling[step_ms]:.2f} ms",
        goal="<= {goal_ms:g} ms",
        met=("{step_ms} <= {goal_ms}",),
    ),
    Row(
        benchmark="cache",
        what="match a 128k prefix over 256 nodes",
        here="{figures[match_128k_256_nodes_us][value]:.0f} us",
        beside="compare alone {figures[match_128k_256_nodes_us][floor]:.0f} us",
        goal="<= {figures[match_128k_256_nodes_us][goal]:.0f} us",
        met=("{figures[match_128k_256_nodes_us][value]} <= {figures[match_128k_256_nodes_us][goal]}",),
    ),
    Row(
        benchmark="tiers",
        what="first token of 2,000 shared tokens, found on the device",
        here="{device_ttft_ms:.0f} ms",
        beside="computed {cold_ttft_ms:.0f} ms",
        goal=">= {goals[device]:.0f}x: {device_times:.0f}x",
        met=("{device_times} >= {goals[device]}",),
    ),
    Row(
        benchmark="tiers",
        what="the same, found on the host",
        here="{host_ttft_ms:.0f} ms",
        beside="loads {load_gb_s:.1f}, backups {backup_gb_s:.1f}, plain memcpy {memcpy_gb_s:.1f} GB/s",
        goal=">= {goals[host]:.0f}x: {host_times:.0f}x",
        met=("{host_times} >= {goals[host]}",),
    ),
    Row(
        benchmark="tiers",
        what="the same, found in files",
        here="{file_ttft_ms:.0f} ms",
        beside="reads {fetch_gb_s:.1f} GB/s, verified; plain files {plain_read_gb_s:.1f} GB/s",
        goal=">= {goals[file]:.0f}x: {file_times:.0f}x",
        met=("{file_times} >= {goals[file]}",),
    ),
    Row(
        benchmark="tiers",
        what="tiers on, never hit (16 requests of 256 + 64 tokens)",
        here="host {host_cost:.1%}, host and files {file_cost:.1%} of the throughput",
        beside="",
        goal="<= 2 %",
        met=("{host_cost} <= 0.02", "{file_cost} <= 0.02"),
    ),
    Row(
        benchmark="tiers",
        what="the same: CPU of the threads that copy, check and write, of all CPU of the job",
        here="host {host_cpu_share:.2%}, host and files {file_cpu_share:.2%}",
        beside="{host_cpu_ms:.0f}; {file_cpu_ms:.0f} ms",
        goal="<= 2 %",
        met=("{host_cpu_share} <= 0.02", "{file_cpu_share} <= 0.02"),
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
        met=("{got[shm_of_copy]} >= 0.6", "{got[shm_of_socket]} >= 2"),
    ),
    Row(
        benchmark="handoff",
        what="the same through TCP",
        here="{paths_gb_s[tcp]:.1f} GB/s",
        beside="{got[tcp_of_socket]:.0%} of a bare loopback socket",
        goal=">= 70 %",
        met=("{got[tcp_of_socket]} >= 0.7",),
    ),
    Row(
        benchmark="handoff",
        what="abort until its pages are free",
        here="{got[abort_ms]:.2f} ms",
        beside="{got[messages]:.0f} control messages a handoff, {got[handoffs_per_s]:.0f} one-page handoffs a second",
        goal="<= 1 ms, <= 8, >= 500",
        met=("{got[abort_ms]} <= 1", "{got[messages]} <= 8", "{got[handoffs_per_s]} >= 500"),
    ),
    Row(
        benchmark="parallel",
        what="the whole job by two stages of one thread each (PP2), throughput",
        here="{pp2_ratio:.2f}x one process",
        beside="ranks wait {pp2_waiting:.0%} of their steps",
        goal=">= 0.9x",
        met=("{pp2_ratio} >= 0.9",),
    ),
    Row(
        benchmark="parallel",
        what="the same by two slices of one thread each (TP2)",
        here="{tp2_ratio:.2f}x one process",
        beside="ranks wait {tp2_waiting:.0%} of their steps",
        goal=">= 0.7x",
        met=("{tp2_ratio} >= 0.7",),
    ),
    Row(
        benchmark="parallel",
        what="leading 2 x 2 ranks, a decode step of 16 requests",
        here="{line_ms:.2f} ms",
        beside="{line_bytes:.0f} bytes to three ranks; 64 requests {line64_ms:.2f} ms",
        goal="<= 0.3 ms",
        met=("{line_ms} <= 0.3",),
    ),
    Row(
        benchmark="parallel",
        what="first token of 2,000 tokens that two stages prefill for another engine",
        here="{handed_ttft_s:.2f} s",
        beside="the stages' own {own_ttft_s:.2f} s: {handed_ratio:.2f}x",
        goal="<= 1.05x",
        met=("{handed_ratio} <= 1.05",),
    ),
    Row(
        benchmark="canary",
        what="KV canary on a rank alone, first 16 bytes of each row, rotating:16, of a decode step of 16 requests",
        here="{modes[partial_rotating][decode_overhead]:.1%}",
        beside="without it {decode_step_ms:.1f} ms",
        goal="<= 1 %",
        met=("{modes[partial_rotating][decode_overhead]} <= 0.01",),
    ),
    Row(
        benchmark="canary",
        what="the same, every byte, rotating:16",
        here="{modes[all_rotating][decode_overhead]:.1%}",
        beside="of a prefill chunk {modes[all_rotating][prefill_overhead]:.1%}",
        goal="<= 1.5 %",
        met=("{modes[all_rotating][decode_overhead]} <= 0.015",),
    ),
    Row(
        benchmark="canary_engine",
        what="the same in the whole engine, leader and rank: the default",
        here="{decode_overhead:.1%}",
        beside="without it {decode_step_ms:.1f} ms",
        goal="<= 1.5 %",
        met=("{decode_overhead} <= {goal}",),
    ),
    Row(
        benchmark="canary_engine",
        what="the same of Qwen3-0.6B's shape",
        here="{qwen3_0_6b[decode_overhead]:.1%}",
        beside="without it {qwen3_0_6b[decode_step_ms]:.1f} ms",
        goal="<= 1.5 %",
        met=("{qwen3_0_6b[decode_overhead]} <= {qwen3_0_6b[goal]}",),
    ),
    Row(
        benchmark="canary",
        what="on a rank alone, every byte in every step",
        here="{modes[all_full][decode_overhead]:.1%}",
        beside="of a prefill chunk {modes[all_full][prefill_overhead]:.1%}",
        goal="<= 15 %",
        met=("{modes[all_full][decode_overhead]} <= 0.15",),
    ),
    Row(
        benchmark="canary",
        what="digest of every byte",
        here="{digest[digest_gb_s]:.1f} GB/s",
        beside="plain sum of as many bytes {digest[sum_gb_s]:.1f} GB/s",
        goal=">= {goal_gb_s:.0f} GB/s",
        met=("{digest[digest_gb_s]} >= {goal_gb_s}",),
    ),
    Row(
        benchmark="front_gap",
        what="a stream's longest gap grows by, while texts and chats of 30 MB come",
        here="{grown_ms:.0f} ms",
        beside="longest gap without {alone_ms:.0f} ms",
        goal="<= {goal_ms:.0f} ms",
        met=("{grown_ms} <= {goal_ms}",),
    ),
    Row(
        benchmark="front",
        what="front, CPU per streamed token (chat)",
        here="{figures[front_chat_us][value]:.0f} us",
        beside="one send() {send_floor_us:.0f} us",
        goal="<= {figures[front_chat_us][goal]:.0f} us",
        met=("{figures[front_chat_us][value]} <= {figures[front_chat_us][goal]}",),
    ),
    Row(
        benchmark="front",
        what="HTTP answer on a kept connection, one token",
        here="{figures[answer_ms][value]:.1f} ms",
        beside="the engine's own {figures[engine_answer_ms][value]:.1f} ms; a refused POST "
        "{figures[refusal_ms][value]:.1f} ms; by the router {figures[router_answer_ms][value]:.1f} ms",
        goal="<= {figures[kept_connection_ms][goal]:.0f} ms more: {figures[kept_connection_ms][value]:.1f} ms",
        met=("{figures[kept_connection_ms][value]} <= {figures[kept_connection_ms][goal]}",),
    ),
    Row(
        benchmark="dashboard",
        what="an open dashboard, CPU of all that is done for it, of the engine's CPU; four open",
        here="{percent[pages_1]:.2f}; {percent[pages_4]:.2f} %",
        beside="of it on the step thread {step_thread_percent:.2f} %; none open: {unwatched_calls} calls",
        goal="<= {goal_percent} %",
        met=("{percent[pages_1]} <= {goal_percent}", "{percent[pages_4]} <= {goal_percent}"),
    ),
    Row(
        benchmark="client",
        what="`bench serve`, CPU per streamed token",
        here="{client_us_per_token:.1f} us",
        beside="recv() alone {floor_us_per_token:.1f} us",
        goal="<= {goal_us:.0f} us",
        met=("{client_us_per_token} <= {goal_us}",),
    ),
    Row(
        benchmark="gpu",
        what="on a GPU, Qwen3-8B's shape in bf16: decode step of 1 request, no canary",
        here="{decode[none][of_1][step_ms]:.2f} ms",
        beside="floor {decode[none][of_1][floor_ms]:.2f} ms; on an H100 5.87, vLLM 0.26 there 6.80",
        goal="",
    ),
    Row(
        benchmark="gpu",
        what="of 16; of 256",
        here="{decode[none][of_16][step_ms]:.2f}; {decode[none][of_256][step_ms]:.1f} ms",
        beside="floor {decode[none][of_16][floor_ms]:.2f}; {decode[none][of_256][floor_ms]:.2f} ms;"
        " on an H100 6.99; 15.5",
        goal="",
    ),
    Row(
        benchmark="gpu",
        what="of 64; by another engine under the canary, every byte digested and verified once in 16 steps",
        here="{decode[none][of_64][step_ms]:.2f}; {decode[rotating_16][of_64][step_ms]:.2f} ms",
        beside="floor {decode[none][of_64][floor_ms]:.2f} ms; on an H100 9.67 to 9.89; 9.98, vLLM 0.26 there 10.9",
        goal="",
    ),
    Row(
        benchmark="gpu",
        what="what the canary takes of it, engines in turns: verified once in 16 steps; in every step",
        here="{canary[rotating_16][of_64][share]:.1%}; {canary[full][of_64][share]:.1%}",
        beside="without it {canary[full][of_64][step_ms]:.2f} ms",
        goal="<= 3 %; <= 5 %",
        met=(
            "{canary[rotating_16][of_64][share]} <= {canary[rotating_16][of_64][goal]}",
            "{canary[full][of_64][share]} <= {canary[full][of_64][goal]}",
        ),
    ),
    Row(
        benchmark="gpu",
        what="prefill of 64 x 1,024 tokens, no canary; under it",
        here="{prefill[none][of_64][tok_s]:,}; {prefill[rotating_16][of_64][tok_s]:,} tok/s",
        beside="products alone {prefill[none][of_64][ceiling_tok_s]:,}; on an H100 43.9k; 42.2k to 42.9k, vLLM 0.26 "
        "there 43.4k",
        goal=">= 43,500 tok/s without, of an H100",
        met=("{prefill[none][of_64][tok_s]} >= 43500",),
    ),
    Row(
        benchmark="gpu",
        what="`serve`, 256 requests at once of 512 + 256 tokens, under the canary",
        here="{server[http][of_256][http_tok_s]:,} tok/s",
        beside="by `LLM` {server[http][of_256][llm_tok_s]:,}; on an H100 8,714, vLLM 0.26 there 8,755 without HTTP",
        goal=">= 8,700 tok/s, of an H100",
        met=("{server[http][of_256][http_tok_s]} >= 8700",),
    ),
    Row(
        benchmark="gpu",
        what="what HTTP costs 64 streams of it",
        here="{server[http][of_64][http_cost]:.1%}",
        beside="by `LLM` {server[http][of_64][llm_tok_s]:,} tok/s",
        goal="<= 5 %",
        met=("{server[http][of_64][http_cost]} <= 0.05",),
    ),
    Row(
        benchmark="gpus",
        what="decode of 64 requests by two slices on two GPUs (TP2), under the canary",
        here="{slices[decode][step_ms]:.2f} ms",
        beside="each GPU alone {first[decode][step_ms]:.2f}; {second[decode][step_ms]:.2f} ms",
        goal=">= 1.6 times the faster one: {gain:.2f}",
        met=("{gain} >= 1.6",),
    ),
)
"""What the docs show; a benchmark may measure more."""
