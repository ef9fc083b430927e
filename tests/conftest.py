"""Tests of several accelerators are skipped where there are fewer: only `pytest -m gpu` has them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Skip, with a reason, what is marked `gpus(n)` on a machine with fewer than n."""
    needs = [(item, int(mark.args[0])) for item in items if (mark := item.get_closest_marker("gpus")) is not None]
    if needs:
        import torch

        count = torch.cuda.device_count()
        for item, wanted in needs:
            assert item.get_closest_marker("gpu") is not None, f"{item.nodeid} has the mark gpus, expected gpu as well"
            if count < wanted:
                item.add_marker(pytest.mark.skip(reason=f"needs {wanted} GPUs, this machine has {count}"))
