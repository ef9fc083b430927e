"""The log is left as each test found it; a busy machine is no failure of a property test. Tests of several accelerators
are skipped where there are fewer. Ctrl-C arrives, also where the suite runs behind a shell's `&`."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("serinus", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("serinus")


def pytest_configure() -> None:
    """Shells let a command behind `&` and its children ignore SIGINT, which tests of Ctrl-C send."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def log_as_before() -> Iterator[None]:
    """Commands send the log to stderr, which is the test's own: later tests must not write there."""
    logger = logging.getLogger("serinus")
    handlers, level, propagate = list(logger.handlers), logger.level, logger.propagate
    yield
    logger.handlers, logger.propagate = handlers, propagate
    logger.setLevel(level)


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
