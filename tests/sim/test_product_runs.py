"""The simulation runs the product: every module of which it never executes a function is listed here, with a reason.

A module that is new, or that the simulation has ceased to run, fails the test; so does a line here that is out of date.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType

import pytest

import serinus
from serinus.sim import Scenario, draw, run

ROOT = Path(serinus.__file__).parent
OUTSIDE = ("sim", "testing", "selftest")
"""Rooms that stand around the product."""
REASONS: dict[str, str] = {
    # HTTP and the command line
    "front/": "HTTP",
    "text/": "text before and behind token ids, for HTTP",
    "cli/": "commands of a terminal",
    "core/bounds.py": "texts of clients, which are checked as they come",
    "core/gguf_file.py": "files of weights",
    "core/grammar.py": "grammars, which its requests do not have",
    "core/json_line.py": "lines of JSON for clients of HTTP",
    "core/shown.py": "refusals, of requests that HTTP has not checked",
    "engine/kv_events.py": "events for subscribers of a socket",
    "engine/look.py": "calls of HTTP",
    # processes, sockets, threads, real time
    "core/clock.py": "real time",
    "core/cores.py": "start of a process",
    "core/descriptors.py": "start of a process",
    "scale/": "the number of engines of a cluster; tests/scale simulates it",
    "core/fleet_settings.py": "start of processes",
    "core/free_ports.py": "ports of processes",
    "core/heap.py": "start of a process",
    "core/lifeline.py": "ends a process with its parent",
    "core/private_folder.py": "folders of processes",
    "core/user_secret.py": "a file that the processes of one user share",
    "core/lazy.py": "names that are imported late",
    "core/log.py": "log lines are off",
    "core/version.py": "start of a process",
    "core/whole_file.py": "files of machine code and of checkpoints",
    "engine/first_steps.py": "start of a process",
    "engine/interrupt.py": "Ctrl-C in the offline loop",
    "engine/compile_ahead.py": "start of a process on a GPU",
    "engine/compile_process.py": "start of a process on a GPU",
    "engine/launch.py": "start of a process",
    "engine/llm.py": "the offline loop around an engine",
    "engine/loop.py": "the loop of a process; SimEngine stands in its place",
    "engine/messages.py": "refusals, of requests that HTTP has not checked",
    "engine/process.py": "start of a process",
    "engine/progress.py": "start of a process",
    "engine/prompts.py": "prompts of the offline loop",
    "parallel/comm.py": "tensors between processes",
    "parallel/near.py": "tensors between processes",
    "parallel/thread_comm.py": "ranks as threads, of the self-test",
    "pool/copy_engine.py": "copies between a GPU and its host",
    "pool/device_mover.py": "the same; tests/pool/test_device_mover.py runs it in any order that streams leave open",
    "pool/workers.py": "threads",
    "ranks/devices.py": "start of a process",
    "ranks/exit_reason.py": "end of a process",
    "ranks/largest_step.py": "start of a process on a GPU",
    "ranks/load_progress.py": "start of a process",
    "ranks/leader_supervisor.py": "supervision of processes",
    "ranks/handshake.py": "start of processes",
    "ranks/links.py": "connections over zmq",
    "ranks/memory.py": "start of a process",
    "ranks/peer_exchange.py": "start of ranks on GPUs",
    "ranks/process.py": "start of a process",
    "ranks/rank_processes.py": "start of processes",
    "ranks/tier_parts.py": "start of a process",
    "ranks/thread_ranks.py": "ranks as threads, of the self-test",
    "wire/fault_order.py": "an order of HTTP for faults on purpose; its own come from the seed",
    "wire/channels.py": "connections within one process, of tests",
    "wire/zmq_channel.py": "zmq",
    "wire/zmq_frames.py": "zmq",
    "wire/ipc_listener.py": "zmq",
    "wire/tcp_listener.py": "sockets; tests/pd/test_strangers.py and tests/wire hold it",
    "wire/zmtp.py": "bytes of a socket; tests/wire/test_zmtp.py holds it",
    # models and kernels: the arithmetic is simulated
    "kernels/": "arithmetic of models",
    "models/config_fields.py": "checkpoints",
    "models/decoder.py": "arithmetic of models",
    "models/expert_weights.py": "checkpoints",
    "models/experts.py": "checkpoints",
    "models/families.py": "checkpoints",
    "models/gguf_config.py": "checkpoints",
    "models/gguf_files.py": "checkpoints",
    "models/hub.py": "checkpoints",
    "models/interleaved.py": "checkpoints",
    "models/latent.py": "arithmetic of models",
    "models/latent_attention.py": "arithmetic of models",
    "models/layers.py": "checkpoints",
    "models/loader.py": "checkpoints",
    "models/mixture.py": "arithmetic of models",
    "models/mxfp4.py": "checkpoints",
    "models/quantization.py": "checkpoints",
    "models/quantized.py": "checkpoints",
    "models/quantized_files.py": "checkpoints",
    "models/rope.py": "arithmetic of models",
    "models/rope_fields.py": "checkpoints",
    "models/small_checkpoints.py": "checkpoints",
    "models/toy.py": "arithmetic of models",
    "models/transformers_model.py": "arithmetic of models",
    "models/transformers_spec.py": "checkpoints",
    "models/device_reader.py": "checkpoints",
    "models/device_tensors.py": "checkpoints",
    "models/weight_files.py": "checkpoints",
    "models/weights.py": "checkpoints",
    "models/weight_digests.py": "checkpoints",
    "runner/graphs.py": "recorded steps, of a GPU",
    "runner/token_oracle.py": "a sampler without a model",
    "core/history.py": "what penalties look at; a sampler without a model has none",
    # transports
    "pd/__init__.py": "names that are imported late",
    "pd/backends/__init__.py": "start of a process",
    "pd/backends/cuda_driver.py": "CUDA; sim/device_memory.py stands in its place, tests/pd/test_gpu.py runs it",
    "pd/backends/cuda_pulls.py": "CUDA; tests/pd/test_gpu.py runs it",
    # what no scenario asks for
    "cache/events.py": "events for subscribers of a socket",
    "canary/perturb/": "faults that the settings ask for; the adversary plants its own",
    "canary/faults.py": "faults that the settings ask for",
    # interfaces
    "cache/ports.py": "protocols",
    "core/line.py": "protocols",
}
SEEDS = 40


def product_modules() -> set[str]:
    """Files of the product that define a function."""
    found = set()
    for path in ROOT.rglob("*.py"):
        name = path.relative_to(ROOT).as_posix()
        if name.split("/")[0] not in OUTSIDE and "def " in path.read_text(encoding="utf-8"):
            found.add(name)
    return found


def worlds() -> Iterator[Scenario]:
    """Some as drawn, with and without canaries and sliding layers, and some in which tiers fail often."""
    for seed in range(SEEDS):
        yield draw(seed, canary=("", "sound", "damaged")[seed % 3], slides=seed % 2 == 0)
    for seed in range(SEEDS // 2):
        scenario = draw(seed, backend="local", canary="")
        engines = tuple(replace(e, host_pages=9, prefetch="wait_complete") for e in scenario.shape.engines)
        shape, options = replace(scenario.shape, engines=engines), replace(scenario.options, restore=0.3)
        yield replace(scenario, shape=shape, options=options)


def modules_that_run() -> set[str]:
    """Files of which a function was called while some worlds ran. What kernels call counts as a part of them: they are
    imported, compiled and stored by the first process that needs them, or were before."""
    seen: set[str] = set()
    kernels = f"{ROOT}/kernels/"

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_flags & inspect.CO_NEWLOCALS:
            caller = frame.f_back
            if caller is None or not caller.f_code.co_filename.startswith(kernels):
                seen.add(frame.f_code.co_filename)

    before = sys.gettrace()
    sys.settrace(note)  # told of calls alone, where a profiler is told of returns too, and of what is written in C
    try:
        for scenario in worlds():
            finding = run(scenario).finding
            assert finding is None, f"{finding}: {scenario.to_json()}"
    finally:
        sys.settrace(before)
    return {Path(name).relative_to(ROOT).as_posix() for name in seen if name.startswith(f"{ROOT}/")}


def reason_of(module: str) -> str:
    """The line of REASONS that names this module, or a folder above it; empty = none does."""
    return next((name for name in REASONS if module == name or (name.endswith("/") and module.startswith(name))), "")


@pytest.mark.proof
def test_every_module_of_the_product_runs_in_the_simulation_or_is_listed_with_a_reason() -> None:
    missing = product_modules() - modules_that_run()
    unexplained = sorted(module for module in missing if not reason_of(module))
    assert not unexplained, f"never run by the simulation: {unexplained}"
    explained = {reason_of(module) for module in missing}
    stale = sorted(name for name in REASONS.keys() - explained if (ROOT / name).exists())
    assert not stale, f"run by the simulation now: {stale}"
