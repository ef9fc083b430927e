"""What removing pages from a storage folder takes, by how many files lie in it.

    python benchmarks/removals.py [--files 1000,10000,50000] [--rounds 15] [--folder DIR]

Prompts of 10 pages of 512 bytes. Each second, in one folder after the other, 10 pages are stored and the last 8 pages
of a prompt are removed. `alone`: by the only engine on the folder; `shared`: another one is there and has just stored
10 pages too; `look`: what it takes that one to learn of the removal. `first`: an engine that found the files there
removes for the first time: it reads the headers of all. `plain`: 8 files are removed without an engine. Claim: alone, a
removal from the largest folder takes at most twice as long as one from the smallest.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
from report import emit

from serinus.core.clock import WallClock
from serinus.core.parts import Part
from serinus.pool.storage import PageFiles
from serinus.ranks.tier_parts import pause

CLOCK = WallClock()
PROMPT, PAGE_BYTES, REMOVED = 10, 512, 8
ROOT = b"\xff" * 16
"""What the first page of a prompt continues; an engine takes a hash of the model's name."""
DATA = np.zeros(PAGE_BYTES, np.uint8)


def ms(job: Callable[[], object]) -> float:
    begin = CLOCK.now()
    job()
    return 1e3 * (CLOCK.now() - begin)


class Folder:
    """A folder of so many files, and the engines on it."""

    def __init__(self, path: Path, file_count: int) -> None:
        self.path, self.prompts = path, 0
        self.engine = self.open()
        for _ in range(file_count // PROMPT):
            self.store(self.engine)
        self.took: dict[str, list[float]] = {"alone": [], "shared": [], "look": [], "first": [], "plain": []}

    def open(self) -> PageFiles:
        return PageFiles(self.path, namespace="n", page_bytes={Part.FULL: PAGE_BYTES}, byte_max=None, clock=CLOCK)

    def keys(self, prompt: int) -> list[bytes]:
        return [(prompt * PROMPT + at + 1).to_bytes(16, "big") for at in range(PROMPT)]

    def store(self, engine: PageFiles) -> None:
        keys = self.keys(self.prompts)
        self.prompts += 1
        for before, key in zip([ROOT, *keys], keys, strict=False):
            engine.save(Part.FULL, key, DATA, before)

    def remove(self, engine: PageFiles, what: str) -> None:
        key = self.keys(self.prompts - 1)[PROMPT - REMOVED]
        counts: list[int] = []
        self.took[what].append(ms(lambda: counts.append(engine.remove([key]))))
        assert counts == [REMOVED], f"{counts} files went, expected {REMOVED}"

    def plain(self) -> None:
        """Without an engine."""
        paths = [self.path / f"plain{at}" for at in range(REMOVED)]
        for path in paths:
            path.write_bytes(DATA)
        self.took["plain"].append(ms(lambda: [path.unlink() for path in paths]))


def measured(folders: list[Folder], rounds: int) -> None:
    """A removal a second in each folder, first by one engine, then by the first of two."""
    for what in ("alone", "shared"):
        others = [folder.open() for folder in folders if what == "shared"]
        for _ in range(rounds):
            end = CLOCK.now() + 1.0
            for at, folder in enumerate(folders):
                folder.plain()
                folder.store(folder.engine)
                if others:
                    folder.store(others[at])
                folder.remove(folder.engine, what)
                if others:
                    folder.took["look"].append(ms(others[at].recalled))
            pause(max(0.0, end - CLOCK.now()))
        for folder, other in zip(folders, others, strict=False):
            folder.store(folder.engine)
            folder.remove(other, "first")
            other.close()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--files", default="1000,10000,50000")
    arguments.add_argument("--rounds", type=int, default=15)
    arguments.add_argument("--folder", default="", help="where files go; default: a temporary folder")
    args = arguments.parse_args()
    counts = [int(count) for count in args.files.split(",")]
    with tempfile.TemporaryDirectory(dir=args.folder or None) as name:
        folders = [Folder(Path(name, str(count)), count) for count in counts]
        measured(folders, args.rounds)
        found = [{what: median(values) for what, values in folder.took.items()} for folder in folders]
    emit(
        "removals",
        **{
            f"{what}_ms": {str(n): round(each[what], 3) for n, each in zip(counts, found, strict=True)}
            for what in found[0]
        },
        **{f"{what}_growth": round(found[-1][what] / found[0][what], 2) for what in ("alone", "shared", "look")},
    )


if __name__ == "__main__":
    main()
