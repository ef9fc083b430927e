"""Coverage-guided fuzzing of the codec and both handoff machines, with atheris (pip install -e '.[fuzz]').

    python tests/fuzz/fuzz_handoff.py codec|decode|prefill [libFuzzer flags, e.g. -max_total_time=300]

The same scripts run with hypothesis in tests/pd/test_anything.py. A finding is printed with its bytes by libFuzzer and
kept in crash-*; give that file as the argument to run it again.
"""

from __future__ import annotations

import sys
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

with atheris.instrument_imports(include=["serinus.pd", "serinus.wire"]):
    from tests.pd.scripts import run_codec, run_decode, run_prefill


class Bytes:
    """Choices out of the fuzzer's bytes."""

    def __init__(self, data: bytes) -> None:
        self._provider = atheris.FuzzedDataProvider(data)

    def pick(self, count: int) -> int:
        """A number below `count`, from the next bytes."""
        picked: int = self._provider.ConsumeIntInRange(0, count - 1)
        return picked


def codec(data: bytes) -> None:
    """Any bytes as one part, or cut into two after the place that the first byte names."""
    run_codec(data[1:], () if data[:1] < b"\x80" else (data[0],))


def decode(data: bytes) -> None:
    """Any script for a decode side."""
    run_decode(Bytes(data), 60)


def prefill(data: bytes) -> None:
    """Any script for a prefill side."""
    run_prefill(Bytes(data), 60)


if __name__ == "__main__":
    harness = {"codec": codec, "decode": decode, "prefill": prefill}[sys.argv.pop(1)]
    atheris.Setup(sys.argv, harness)
    atheris.Fuzz()
