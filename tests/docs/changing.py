"""The sections of docs/CHANGING.md as data, and how a diff of that page is applied."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["EXAMPLES", "PAGE", "REPO", "Example", "apply"]

REPO = Path(__file__).parents[2]
PAGE = (REPO / "docs" / "CHANGING.md").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Example:
    """One section of the page."""

    title: str
    limit: int
    """Files that it may touch."""
    named: tuple[str, ...]
    """Files in its list."""
    diffs: tuple[str, ...]
    proof: str

    @property
    def touched(self) -> list[str]:
        return [diff.splitlines()[0].removeprefix("new ") for diff in self.diffs]


def _example(section: str) -> Example:
    title, _, body = section.partition("\n")
    found = re.fullmatch(r"(.+): (\d+) files?", title)
    assert found, f"{title!r}, expected '...: N files'"
    return Example(
        title=found[1],
        limit=int(found[2]),
        named=tuple(re.findall(r"^- `([^`]+)`", body, re.M)),
        diffs=tuple(re.findall(r"```diff\n(.*?)```", body, re.S)),
        proof="\n".join(re.findall(r"```python\n(.*?)```", body, re.S)),
    )


EXAMPLES = [_example(section) for section in re.split(r"^## ", PAGE, flags=re.M)[1:]]


def apply(diff: str, root: Path) -> None:
    """Apply one diff of the page below `root`. Each piece (between lines `@@`) must fit at exactly one place."""
    name, *lines = diff.splitlines()
    path = root / name.removeprefix("new ")
    assert path.exists() != name.startswith("new "), f"{name}: the file exists, or does not, against what the page says"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    for piece in "\n".join(lines).split("\n@@\n"):
        marked = [(line[:1] or " ", line[1:]) for line in piece.splitlines()]
        before = "".join(f"{line}\n" for mark, line in marked if mark != "+")
        after = "".join(f"{line}\n" for mark, line in marked if mark != "-")
        assert not before or text.count(before) == 1, f"{name}: {text.count(before)} places for\n{before}"
        text = text.replace(before, after) if before else after
    path.write_text(text, encoding="utf-8")
