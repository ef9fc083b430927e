"""Every layout to every other, over both backends, with more requests than the suite has time for.

python -m tests.ranks.matrix          exit code 1 = an answer was wrong
"""

from __future__ import annotations

import sys
import tempfile
from itertools import product

from serinus.core.clock import WallClock
from serinus.models.small_checkpoints import make_toy
from tests.ranks.pair import answers, count, pair, prompts_of, toy_answers

LAYOUTS = [(1, 1), (1, 2), (2, 1), (2, 2), (1, 3)]


def main() -> int:
    """Run them all; 0 = all answers are right."""
    wrong, clock = 0, WallClock()
    with tempfile.TemporaryDirectory() as folder:
        toy = make_toy(folder, vocab=64, context=128, layers=6, kv_heads=4, tokenizer=False)
        prompts = prompts_of(16, 6)
        expected = toy_answers(toy, prompts, 9)
        for backend, prefill, decode in product(("shm", "tcp"), LAYOUTS, LAYOUTS):
            start = clock.now()
            ours, theirs = ({"tp_size": tp, "pp_size": pp} for tp, pp in (prefill, decode))
            with pair(toy, ours, theirs, backend) as engines:
                good = answers(engines, prompts, 9) == expected
                failed = count(engines.decode, "num_transfer_failed_reqs")
                pages = count(engines.decode, "kv_transfer_pages")
            wrong += not good or failed > 0
            word = "right" if good else "WRONG"
            shapes = f"TP{prefill[0]} PP{prefill[1]} -> TP{decode[0]} PP{decode[1]}"
            print(
                f"{backend} {shapes}  {word}, {failed} failed, {pages} pages, {clock.now() - start:.1f} s", flush=True
            )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
