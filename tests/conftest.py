"""The log is left as each test found it; a busy machine is no failure of a property test. Tests of several accelerators
are skipped where there are fewer, those of nixl where it is not installed. Ctrl-C arrives, also where the suite runs
behind a shell's `&`."""

from __future__ import annotations

import logging
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib.util import find_spec

import pytest
from hypothesis import HealthCheck, settings

from serinus.core.heap import collect_seldom, settle_heap

settings.register_profile("serinus", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("serinus")


def pytest_configure() -> None:
    """Shells let a command behind `&` and its children ignore SIGINT, which tests of Ctrl-C send."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """As a process that serves does: collections among what was imported took a twentieth of the time."""
    collect_seldom()
    settle_heap()


@pytest.fixture(autouse=True)
def log_as_before() -> Iterator[None]:
    """Commands send the log to stderr, which is the test's own: later tests must not write there."""
    logger = logging.getLogger("serinus")
    handlers, level, propagate = list(logger.handlers), logger.level, logger.propagate
    yield
    logger.handlers, logger.propagate = handlers, propagate
    logger.setLevel(level)


FIRST = (
    "sim/test_world.py", "kernels/test_triton.py", "kernels/test_triton_compiled.py", "canary/test_adversary.py",
    "e2e/test_ray.py", "runner/test_graphs.py", "sched/test_depth.py", "sim/test_product_runs.py", "cli/test_wheel.py",
    "engine/test_kernel_variants.py", "docs/test_changing.py",
)  # fmt: skip
"""Files of few tests that take long: begun last, one would keep a worker busy when the other has nothing left."""


@pytest.hookimpl(trylast=True)  # what the marks leave out is gone
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order files for the workers of `make test`, which take one after the other; skip what needs more than is here."""
    if hasattr(config, "workerinput"):
        order_files(items)
    skip_without_gpus(items)
    skip_without_nixl(items)


def order_files(items: list[pytest.Item]) -> None:
    """FIRST, then by their number of tests; those of a cluster for all of them side by side, which is started once."""
    counts = Counter(item.path for item in items)
    in_e2e = [item for item in items if "e2e" in item.path.parts]
    shared = {item.path for item in in_e2e if {"cluster", "pair"} & set(getattr(item, "fixturenames", ()))}

    def place(item: pytest.Item) -> tuple[int, int, str]:
        first = [number for number, name in enumerate(FIRST) if item.path.as_posix().endswith(name)]
        rank = first[0] if first else len(FIRST) + (item.path not in shared)
        return rank, 0 if item.path in shared else -counts[item.path], item.path.as_posix()

    items.sort(key=place)


def skip_without_gpus(items: Sequence[pytest.Item]) -> None:
    """Skip, with a reason, what is marked `gpus(n)` on a machine with fewer than n."""
    needs = [(item, int(mark.args[0])) for item in items if (mark := item.get_closest_marker("gpus")) is not None]
    if needs:
        import torch

        count = torch.cuda.device_count()
        for item, wanted in needs:
            assert item.get_closest_marker("gpu") is not None, f"{item.nodeid} has the mark gpus, expected gpu as well"
            if count < wanted:
                item.add_marker(pytest.mark.skip(reason=f"needs {wanted} GPUs, this machine has {count}"))


def skip_without_nixl(items: Sequence[pytest.Item]) -> None:
    """Skip, with a reason, what is marked `nixl` where the package is not installed."""
    for item in items:
        if item.get_closest_marker("nixl") is not None and find_spec("nixl") is None:
            assert item.get_closest_marker("gpu") is not None, f"{item.nodeid} has the mark nixl, expected gpu as well"
            item.add_marker(pytest.mark.skip(reason="needs the package nixl: pip install -e '.[nixl]'"))
