"""Run the canary's Triton kernels in Triton's interpreter beside the reference: one line for each case that differs.

TRITON_INTERPRET=1 python -m tests.kernels.canary_interpreted CASES
"""

from __future__ import annotations

import sys

from serinus.kernels.ref import canary as ref
from serinus.kernels.triton import canary as triton_column

from .canary_case import make_case, outcome

if __name__ == "__main__":
    differ = []
    for seed in range(int(sys.argv[1])):
        case = make_case(seed)
        if outcome(ref, case) != outcome(triton_column, case):
            differ.append(seed)
    sys.stdout.write(f"{sys.argv[1]} cases, differing: {differ}\n")
    sys.exit(bool(differ))
