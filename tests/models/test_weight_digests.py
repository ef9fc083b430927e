"""What makes two models the same: every byte of their weights, whatever reads them."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from serinus.core.errors import ConfigError
from serinus.kernels import load
from serinus.models import TensorDigests, load_model, load_spec, make_checkpoint
from serinus.parallel import Mesh
from serinus.parallel.comm import Comm, SoloComm
from serinus.parallel.thread_comm import ThreadComm

KERNELS = load("cpu", "ref")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("signed") / "a", "qwen2", seed=3, shards=2)


def digest(path: Path, rank: int, mesh: Mesh, comm: Comm, machines: int = 1) -> str:
    """As a rank of an engine on so many machines makes it."""
    spec, each = load_spec(path), mesh.size // machines
    here = range(rank // each * each, rank // each * each + each)
    peers = [other for other in here if mesh.pp_rank(other) == mesh.pp_rank(rank)]
    digests = TensorDigests(index=peers.index(rank), count=len(peers))
    load_model(spec, path, torch.float32, KERNELS, shard=spec.shards(mesh)[rank], comm=comm, digests=digests)
    return digests.of_model(comm)


def alone(path: Path) -> str:
    return digest(path, 0, Mesh(), SoloComm())


def together(paths: list[Path], mesh: Mesh, machines: int = 1) -> set[str]:
    """What the ranks of one engine say; each reads the copy of its machine."""
    comms, each = ThreadComm.ranks_of(mesh, timeout_s=20), mesh.size // machines
    with ThreadPoolExecutor(mesh.size) as threads:
        found = [
            threads.submit(digest, paths[rank // each], rank, mesh, comms[rank], machines) for rank in range(mesh.size)
        ]
        return {each.result() for each in found}


def altered(path: Path, target: Path, name: str) -> Path:
    """A copy with another bit in the middle of one tensor."""
    shutil.copytree(path, target)
    for file in target.glob("*.safetensors"):
        tensors = load_file(file)
        if name in tensors:
            words = tensors[name].view(torch.int32).flatten()
            words[len(words) // 2] ^= 1
            save_file(tensors, file)
            return target
    raise AssertionError(name)


@pytest.mark.parametrize(
    "name", ["model.layers.1.mlp.down_proj.weight", "model.embed_tokens.weight", "model.layers.0.self_attn.k_proj.bias"]
)
def test_one_bit_in_the_middle_of_any_tensor_makes_another_model(checkpoint: Path, tmp_path: Path, name: str) -> None:
    assert alone(altered(checkpoint, tmp_path / "b", name)) != alone(checkpoint)


def test_two_tensors_exchanged_make_another_model(checkpoint: Path, tmp_path: Path) -> None:
    other = shutil.copytree(checkpoint, tmp_path / "b")
    (first, *_) = sorted(other.glob("*.safetensors"))
    tensors = load_file(first)
    one, two = (f"model.layers.0.self_attn.{each}_proj.weight" for each in "kv")
    tensors[one], tensors[two] = tensors[two], tensors[one]
    save_file(tensors, first)
    assert alone(other) != alone(checkpoint)


def test_ranks_of_every_mesh_and_files_cut_in_any_way_give_the_same_signature(checkpoint: Path, tmp_path: Path) -> None:
    expected = alone(checkpoint)
    for mesh, machines in ((Mesh(tp=2), 1), (Mesh(pp=2), 1), (Mesh(tp=2, pp=2), 2), (Mesh(tp=2), 2)):
        assert together([checkpoint] * machines, mesh, machines) == {expected}, f"{mesh} on {machines}"
    single = shutil.copytree(checkpoint, tmp_path / "single", ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors: dict[str, torch.Tensor] = {}
    for file in checkpoint.glob("*.safetensors"):
        tensors.update(load_file(file))
    save_file(tensors, single / "model.safetensors")
    assert alone(single) == expected


def test_ranks_of_one_stage_share_the_work(checkpoint: Path) -> None:
    spec, mesh, counts = load_spec(checkpoint), Mesh(tp=2), []
    for rank in range(2):
        digests = TensorDigests(index=rank, count=2)
        load_model(spec, checkpoint, torch.float32, KERNELS, shard=spec.shards(mesh)[rank], digests=digests)
        digests.close()
        counts.append(digests.byte_count)
    whole = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
    assert all(counts)
    assert whole - 64_000 < sum(counts) < whole, "each byte of a tensor once"


def test_machines_whose_copies_differ_are_refused_by_the_name_of_the_tensor(checkpoint: Path, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    other = altered(checkpoint, tmp_path / "b", name)
    with pytest.raises(ConfigError, match=f"tensor '{name}' is not the same on all machines of this engine"):
        together([checkpoint, other], Mesh(tp=2), machines=2)
    lacking = shutil.copytree(checkpoint, tmp_path / "c")
    (lacking / "model.safetensors.index.json").unlink()
    for file in sorted(lacking.glob("*.safetensors"))[:1]:
        tensors = load_file(file)
        save_file({**tensors, "model.layers.0.rotary_emb.inv_freq": torch.zeros(8)}, file)
    with pytest.raises(ConfigError, match="ranks find tensors of other names"):
        together([checkpoint, lacking], Mesh(tp=2), machines=2)


def test_the_type_that_weights_are_converted_to_is_not_in_the_digest(checkpoint: Path) -> None:
    """It is in the namespace and the layout, beside the signature."""
    found = set()
    for dtype in (torch.float32, torch.bfloat16):
        digests = TensorDigests()
        load_model(load_spec(checkpoint), checkpoint, dtype, KERNELS, digests=digests)
        found.add(digests.of_model(SoloComm()))
    assert len(found) == 1
