"""The ten lines of docs/RAY.md, as they stand there."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from serinus.models import load_spec
from serinus.models.small_checkpoints import make_toy
from serinus.testing.oracle import toy_continue
from serinus.text import load_tokenizer

PAGE = Path(__file__).parents[2] / "docs" / "RAY.md"


@pytest.mark.proof
@pytest.mark.timeout(600)
def test_ray_data_answers_a_file_of_prompts(tmp_path: Path) -> None:
    toy = make_toy(tmp_path / "toy", context=256)
    code = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)[-1].replace('"MODEL"', f'"{toy}"')
    # "local": a cluster of another test that runs meanwhile is not joined.
    begin = "import ray\nray.init('local', num_cpus=3, object_store_memory=100 << 20, include_dashboard=False)\n"
    prompts = [f"prompt number {number}" for number in range(20)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": each}) + "\n" for each in prompts))
    (tmp_path / "batch.py").write_text(begin + code)
    done = subprocess.run(
        [sys.executable, "batch.py"], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=400
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for file in (tmp_path / "answers").iterdir() for line in file.read_text().splitlines()]
    assert sorted(row["prompt"] for row in rows) == sorted(prompts)
    tokenizer, spec = load_tokenizer(str(toy)), load_spec(toy)
    for row in rows:
        right = toy_continue(spec, tokenizer.encode(row["prompt"]), 32)
        assert row["answer"] == tokenizer.decode(right, skip_special_tokens=True)
