"""triton: ops for GPUs, written in Triton. A column may lack an op; then `ref` serves."""
