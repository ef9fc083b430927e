"""triton: ops for GPUs, written in Triton. A column may lack an op; then `ref` serves."""

import os

# Triton 3.10 fuses products and sums no more where nothing is said, and 3.9 warns of it: equal bits with every version.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
