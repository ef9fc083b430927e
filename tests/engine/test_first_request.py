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

llm = LLM(sys.argv[1], max_total_tokens=192, page_size=8, **json.loads(sys.argv[2]))
ready = compiled()
for first in (3, 60, 110, 3):
    prompts = [list(range(first, first + 90)), [first, 4, 5]]
    llm.generate(prompts, SamplingParams(temperature=0.7, top_k=5, max_new_tokens=12), use_tqdm=False)
print(json.dumps([ready, compiled()]))
llm.close()
"""


@pytest.mark.timeout(300)  # where no kernel was ever compiled
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {}),
        ("gemma2", {"enable_hierarchical_cache": True}),
        ("qwen3", {"kv_canary": "raise", "kv_canary_real_data": "all"}),
    ],
)
def test_no_kernel_is_compiled_by_a_request(tmp_path: Path, family: str, settings: dict[str, object]) -> None:
    make_checkpoint(tmp_path, family, head_size=64, dtype="bfloat16")
    words = [sys.executable, "-c", SCRIPT, str(tmp_path), json.dumps(settings)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    ready, after = json.loads(done.stdout)
    assert 0 < ready == after
