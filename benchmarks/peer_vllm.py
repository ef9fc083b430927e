"""vLLM's build for CPUs as a peer of peers.py: prompts as lines of JSON in, turns as lines of JSON out.

It runs in an environment of vLLM's and imports nothing of Serinus. Its prefix cache is off: no prompt comes twice. Its
prefill is what the same prompts take with one token each, in a run of its own before. At its first start it compiles
itself for some minutes.

    PYTHON -P benchmarks/peer_vllm.py CHECKPOINT THREADS    # -P: kernels.py here is not the package `kernels`
"""

from __future__ import annotations

import json
import os
import sys
from time import perf_counter

REQUESTS, PROMPT, OUTPUT = 16, 256, 64
"""As in job.py."""


def main() -> None:
    path, threads = sys.argv[1], int(sys.argv[2])
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}"}
    os.environ |= {"VLLM_LOGGING_STREAM": "ext://sys.stderr", "VLLM_NO_USAGE_STATS": "1"}
    import psutil
    from vllm import LLM, SamplingParams

    llm = LLM(
        path, dtype="bfloat16", skip_tokenizer_init=True, max_model_len=1024, max_num_seqs=REQUESTS,
        max_num_batched_tokens=REQUESTS * PROMPT, enable_prefix_caching=False,
    )  # fmt: skip

    def answers(prompts: list[list[int]], count: int) -> list[list[int]]:
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        found = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return [list(each.outputs[0].token_ids) for each in found]

    def cpu_s() -> float:
        """Of this process and the engine's."""
        here = psutil.Process()
        return sum(sum(each.cpu_times()[:2]) for each in (here, *here.children(recursive=True)))

    answers([[7] * PROMPT] * 2, OUTPUT)
    print("ready", flush=True)
    for line in sys.stdin:
        prompts = json.loads(line)
        begin = perf_counter()
        answers(prompts, 1)
        middle, before = perf_counter(), cpu_s()
        outputs = answers(prompts, OUTPUT)
        prefill_s, whole_s = middle - begin, perf_counter() - middle
        turn = {"prefill_s": prefill_s, "decode_s": whole_s - prefill_s, "outputs": outputs, "cpu_s": cpu_s() - before}
        print(json.dumps(turn), flush=True)


if __name__ == "__main__":
    main()
