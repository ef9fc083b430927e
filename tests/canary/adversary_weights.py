"""Weights change under a folder of stored KV: another model, which must not take it for its own.

    python -m tests.canary.adversary_weights --faults 20 --seed 1

An engine of a real family answers prompts and writes their KV to files. Then some bytes of its safetensors file change
in place: name, sizes and settings stay. The next engine of that path and folder must answer as one without any files
does, and have nothing from storage. Every fourth time nothing changes: then it must have KV from storage, or the others
prove nothing.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from serinus.core.rng import Rng
from serinus.models import make_checkpoint

from .adversary_worlds import Tiered

__all__ = ["WeightFault", "strike"]

_PROMPT, _NEW_TOKENS, _BYTES = 40, 8, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFault:
    """What came of one."""

    changed: bool
    stored: int
    """Tokens of KV that the second engine had from storage."""
    is_right: bool
    """Its answers are those of an engine without files."""
    differs: bool
    """They are not those before the change."""

    @property
    def is_wrong(self) -> bool:
        """Answers are wrong, KV of another model was read, or (nothing changed) none was read at all."""
        return not self.is_right or (self.stored > 0) is self.changed


def _answers(checkpoint: Path, files: Path, prompts: list[list[int]]) -> tuple[list[list[int]], int]:
    """One after the other, by an engine that starts and stops; and the tokens that it had from storage."""
    world, found, stored = Tiered(checkpoint, files, "heal", "rotating:16"), list[list[int]](), 0
    try:
        for prompt in prompts:
            rid = world.ask(prompt, _NEW_TOKENS, stream=False)
            while world.finish(rid) is None:
                world.turn()
            usage = world.usage(rid)
            assert usage is not None, f"{rid} has no usage"
            assert usage.kv_integrity is not None, f"{rid} has no receipt"
            stored += usage.kv_integrity.sources["storage"]
            found.append(world.tokens(rid))
            world.settle()
    finally:
        world.close()
    return found, stored


def _change(path: Path, rng: Rng) -> None:
    """Other bytes somewhere among the tensors; at least one of them differs."""
    data = bytearray(path.read_bytes())
    begin = 8 + int.from_bytes(data[:8], "little")
    json.loads(data[8:begin])  # the tensors begin behind it
    at = rng.randrange(begin, len(data) - _BYTES)
    data[at : at + _BYTES] = bytes(byte ^ rng.randrange(1, 256) for byte in data[at : at + _BYTES])
    path.write_bytes(data)


def strike(faults: int, seed: int, home: Path, say: Callable[[str], None] = lambda line: None) -> list[WeightFault]:
    """So many, and a third as many times nothing. Cost: three engines each."""
    rng, found = Rng(seed), list[WeightFault]()
    for number in range(faults + faults // 3):
        changed = number % 4 != 3
        checkpoint = make_checkpoint(home / f"model{number}", "qwen3", seed=number, tokenizer=False)
        prompts = [[rng.randrange(5, 512) for _ in range(_PROMPT)] for _ in range(2)]
        files = home / f"files{number}"
        before, _ = _answers(checkpoint, files, prompts)
        if changed:
            _change(rng.choice(sorted(checkpoint.glob("*.safetensors"))), rng)
        after, stored = _answers(checkpoint, files, prompts)
        right, _ = _answers(checkpoint, home / f"none{number}", prompts)
        found.append(WeightFault(changed=changed, stored=stored, is_right=after == right, differs=right != before))
        say(str(found[-1]))
    return found


def main() -> int:
    """0: no stored KV of other weights was used."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as home:
        found = strike(options.faults, options.seed, Path(home))
    wrong, changed = [each for each in found if each.is_wrong], [each for each in found if each.changed]
    print(
        f"weights changed {len(changed)} times, answers with them in {sum(each.differs for each in changed)};"
        f" {len(found) - len(changed)} times not; {len(wrong)} wrong"
    )
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
