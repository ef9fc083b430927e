"""A checkpoint from the page cache to the GPU: seconds of `load_model`, packed and digested, by threads that read.

Claim: 20 GB/s and more. Qwen3-8B's shape with fewer layers, random bf16, four files in memory (/dev/shm). Ceiling: the
same bytes from pinned memory.

    python -m benchmarks.gpu_load [--layers 16] [--threads 1 4 6 8 12]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.gpu_engine import CLOCK, MODELS, config_in, seconds
from benchmarks.report import emit
from serinus.kernels import load
from serinus.models import TensorDigests, device_reader, load_model, load_spec
from serinus.parallel.comm import SoloComm

FILES = 4
SHAPE = MODELS["qwen3-8b"]
WIDTH, INNER, SIZE, VOCAB = (SHAPE[name] for name in ("hidden_size", "intermediate_size", "head_dim", "vocab_size"))
HEADS, KV_HEADS = SHAPE["num_attention_heads"], SHAPE["num_key_value_heads"]


def write(folder: Path, layers: int) -> int:
    """The checkpoint; bytes of its weights."""
    config = json.loads(Path(config_in(folder, "qwen3-8b"), "config.json").read_text()) | {"num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config))
    shapes: dict[str, tuple[int, ...]] = {"model.norm.weight": (WIDTH,)}
    shapes |= dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (VOCAB, WIDTH))
    for i in range(layers):
        base = f"model.layers.{i}."
        shapes |= {base + f"self_attn.{name}_proj.weight": (KV_HEADS * SIZE, WIDTH) for name in "kv"}
        shapes |= {base + "self_attn.q_proj.weight": (HEADS * SIZE, WIDTH)}
        shapes |= {base + "self_attn.o_proj.weight": (WIDTH, HEADS * SIZE)}
        shapes |= {base + f"self_attn.{name}_norm.weight": (SIZE,) for name in "qk"}
        shapes |= {base + f"mlp.{name}_proj.weight": (INNER, WIDTH) for name in ("gate", "up")}
        shapes |= {base + "mlp.down_proj.weight": (WIDTH, INNER)}
        shapes |= {base + f"{name}_layernorm.weight": (WIDTH,) for name in ("input", "post_attention")}
    names, index, total = sorted(shapes), {}, 0
    for part in range(FILES):
        tensors = {
            name: torch.empty(shapes[name], dtype=torch.bfloat16, device="cuda").normal_(0.0, 0.02).cpu()
            for name in names[part * len(names) // FILES : (part + 1) * len(names) // FILES]
        }
        file = f"model-{part + 1:05d}-of-{FILES:05d}.safetensors"
        save_file(tensors, folder / file)
        index |= dict.fromkeys(tensors, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 4, 6, 8, 12])
    arguments = parser.parse_args()
    kernels = load("cuda")
    pinned = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(pinned, device="cuda")
    ceiling = min(seconds(partial(copied, pinned, there)) for _ in range(3))
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        folder = Path(name)
        begin = CLOCK.now()
        total = write(folder, arguments.layers)
        made_s = CLOCK.now() - begin
        spec = load_spec(folder)
        for threads in arguments.threads:
            for digested in (True, False) if threads == arguments.threads[-1] else (True,):
                device_reader.THREADS_MAX = threads
                torch.set_num_threads(threads)
                best = float("inf")
                for _ in range(2):
                    torch.cuda.empty_cache()
                    digests = TensorDigests() if digested else None
                    torch.cuda.synchronize()
                    begin = CLOCK.now()
                    with torch.inference_mode():
                        model = load_model(
                            spec, folder, torch.bfloat16, kernels, positions=4096, device="cuda", digests=digests
                        )
                        if digests is not None:
                            digests.of_model(SoloComm())
                    torch.cuda.synchronize()
                    best = min(best, CLOCK.now() - begin)
                    del model
                emit(
                    "gpu_load", threads=threads, digested=digested, gb=round(total / 1e9, 2), seconds=round(best, 3),
                    gb_s=round(total / best / 1e9, 2), ceiling_gb_s=round(pinned.nbytes / ceiling / 1e9, 1),
                    made_s=round(made_s, 1),
                )  # fmt: skip


def copied(pinned: torch.Tensor, there: torch.Tensor) -> None:
    """To the device, all of it."""
    there.copy_(pinned, non_blocking=True)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
