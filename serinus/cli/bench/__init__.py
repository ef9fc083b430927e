"""bench: drives a running server as its users would, and measures what they would see.

Prompts are made beforehand, answers are parsed afterwards: while the clock runs the client only notes when which
bytes came, because it shares the machine with what it measures.
"""

from serinus.cli.bench.answer import BenchAnswer, read_answer
from serinus.cli.bench.dataset import DatasetSpec, Prompt, make_prompts
from serinus.cli.bench.dialect import DIALECTS
from serinus.cli.bench.drive import Load, drive
from serinus.cli.bench.report import Goodput, make_report, result_block
from serinus.cli.bench.transport import Arrival, RequestTrace, Target

__all__ = [
    "DIALECTS",
    "Arrival",
    "BenchAnswer",
    "DatasetSpec",
    "Goodput",
    "Load",
    "Prompt",
    "RequestTrace",
    "Target",
    "drive",
    "make_prompts",
    "make_report",
    "read_answer",
    "result_block",
]
