"""One word for one thing: no two public classes of the package have one name."""

from __future__ import annotations

import ast
from collections import defaultdict

from tests.tidy.house import package


def test_no_two_public_classes_have_one_name() -> None:
    places: defaultdict[str, list[str]] = defaultdict(list)
    for source in package():
        for node in source.nodes:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(f"{source.name}:{node.lineno}")
    twins = {name: where for name, where in places.items() if len(where) > 1}
    assert not twins, f"classes of one name, expected a name of its own for each: {twins}"
