"""The detection matrix: every fault that the canary promises to find, planted once in each of its places, by the checks
that reported it (`serinus canary selftest --faults 1`). Ends in one line of JSON; exit code 1: a fault was missed."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from report import emit

from serinus.cli import main as serinus


def summary(cells: list[dict[str, Any]]) -> dict[str, Any]:
    """Of all models, parts and engines: a row for each kind of fault, with the cells that each check reported it in."""
    rows: dict[str, dict[str, Any]] = {}
    for cell in (each for each in cells if each["injected"]):
        row = rows.setdefault(cell["mode"], {"fault": cell["mode"], "injected": 0, "detected": 0, "by": Counter()})
        row["injected"] += cell["injected"]
        row["detected"] += cell["detected"]
        row["by"].update({check.split(" ", 1)[-1].removesuffix("_FULL").removesuffix("_SWA") for check in cell["by"]})
    faults = list(rows.values())
    return {
        "injected": sum(row["injected"] for row in faults),
        "detected": sum(row["detected"] for row in faults),
        "alarms": sum(len(cell["alarms"]) for cell in cells),
        "checks": sorted({check for row in faults for check in row["by"]}),
        "faults": faults,
    }


def main() -> int:
    """Run the self-test, and tell what it found."""
    with TemporaryDirectory() as folder:
        file = Path(folder, "matrix.json")
        code = serinus(["canary", "selftest", "--faults", "1", "--json", str(file)])
        cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
    emit("matrix", **summary(cells))
    return code


if __name__ == "__main__":
    sys.exit(main())
