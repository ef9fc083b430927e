"""Whatever a request needs compiled is compiled before the engine says it is ready."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from serinus.models.small_checkpoints import make_checkpoint

pytestmark = pytest.mark.slow

SCRIPT = """
import gc, json, sys
from serinus import LLM, SamplingParams
from serinus.kernels.cpu.body import Body

def compiled():
    return sum(isinstance(each, Body) for each in gc.get_objects())

for path, settings in json.loads(sys.argv[1]):
    llm = LLM(path, max_total_tokens=192, page_size=8, **settings)
    ready = compiled()
    for first in (3, 60, 110, 3):
        prompts = [list(range(first, first + 90)), [first, 4, 5]]
        llm.generate(prompts, SamplingParams(temperature=0.7, top_k=5, max_new_tokens=12), use_tqdm=False)
    print(json.dumps([ready, compiled()]))
    llm.close()
"""
MODELS: list[tuple[str, dict[str, object]]] = [
    ("llama", {}),
    ("gemma2", {"enable_hierarchical_cache": True}),
    ("qwen3", {"kv_canary": "raise", "kv_canary_real_data": "all"}),
]


@pytest.mark.timeout(300)  # where no kernel was ever compiled
@pytest.mark.parametrize(
    "models",
    [
        pytest.param(MODELS, id="one after the other"),
        *(pytest.param([each], id=f"{each[0]} alone", marks=pytest.mark.proof) for each in MODELS),
    ],
)
def test_no_kernel_is_compiled_by_a_request(tmp_path: Path, models: list[tuple[str, dict[str, object]]]) -> None:
    made = [
        (str(make_checkpoint(tmp_path / family, family, head_size=64, dtype="bfloat16")), settings)
        for family, settings in models
    ]
    words = [sys.executable, "-c", SCRIPT, json.dumps(made)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    counts = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(counts) == len(models)
    assert all(0 < ready == after for ready, after in counts), counts
