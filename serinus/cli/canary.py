"""`serinus canary selftest`: does the canary of this machine find what it promises?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serinus.cli.parser import Command, UsageProblem, make_parser
from serinus.core.errors import ConfigError, SerinusError
from serinus.core.private_folder import PrivateFolder

if TYPE_CHECKING:
    from serinus.selftest import Cell, Subject

_ALARMS_SHOWN = 5
_RANKS_MAX = 16
_IN_TURNS = "rotating:3"
"""The coverage of one more toy: what is checked at once when a sequence comes shows only there."""
_LATENT_HEADS = 4
"""Query heads of the latent toy."""


# ---- selftest -------------------------------------------------------------------------------------------------------


def selftest(command: Command, words: Sequence[str]) -> int:
    """Run the matrix. 0 = perfect, 1 = not."""
    arguments = _arguments(command, words)
    from serinus.core.log import get_logger

    if not arguments.verbose:
        get_logger("canary").setLevel("CRITICAL")  # a line for each fault and each report: the table has them
        get_logger("engine").setLevel("ERROR")
    with PrivateFolder() as home:
        subjects = _subjects(arguments, home)
        if arguments.mutants:
            return _grade_all(subjects, arguments)
        cells = _run_all(subjects, arguments)
    _print_table(cells)
    perfect = all(cell.perfect for cell in cells)
    result = {"perfect": perfect, "settings": _settings(arguments), "cells": [cell.as_json() for cell in cells]}
    from serinus.cli.show import write_json

    write_json(arguments.json, result)
    return 0 if perfect else 1


def _arguments(command: Command, words: Sequence[str]) -> Any:
    parser = make_parser(command, settings=False)
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="directory of a checkpoint, or a hub id; default: four toys"
    )
    what = parser.add_argument_group("The canary under test (as for `serinus serve`)")
    what.add_argument("--kv-canary-real-data", default="all", metavar="{partial,all}", help="default: all")
    what.add_argument("--kv-canary-coverage", default="full", metavar="full|rotating:N", help="default: full")
    what.add_argument("--page-size", type=int, default=0, metavar="N", help="default: 4 for toys, 16 for a MODEL")
    what.add_argument(
        "--tp-size", type=int, default=1, metavar="N",
        help="slices of each layer, each a rank with its own heads and pages; default: 1",
    )  # fmt: skip
    what.add_argument(
        "--pp-size", type=int, default=1, metavar="N",
        help="stages, each a rank (or tp-size of them) with its own layers; default: 1. The ranks are threads of this"
        " process on the CPU, and each of them is damaged",
    )  # fmt: skip
    what.add_argument(
        "--device", default="auto", metavar="NAME", help="auto, cpu or cuda; default: auto, of several ranks cpu"
    )
    what.add_argument(
        "--dtype", default="auto", metavar="NAME", help="auto, bfloat16, float16 or float32; default: auto"
    )
    what.add_argument(
        "--kv-cache-dtype", default="auto", metavar="NAME", help="auto, fp8_e4m3 (fp8) or fp8_e5m2; default: auto"
    )
    how = parser.add_argument_group("How to test it")
    how.add_argument("--faults", type=int, default=3, metavar="N", help="faults of each kind in each place; default: 3")
    how.add_argument("--seed", type=int, default=0, metavar="N", help="same seed, same faults; default: 0")
    how.add_argument(
        "--mutants", action="store_true", help="run it under planted weaknesses of the canary: each must turn it red"
    )
    how.add_argument("--json", metavar="FILE", help="write the result there (- is standard output)")
    how.add_argument("--verbose", action="store_true", help="log every fault and every report")
    arguments = parser.arguments(words)
    if arguments.faults < 1:
        raise UsageProblem(f"--faults is {arguments.faults}, expected at least 1")
    if arguments.kv_canary_real_data not in ("partial", "all"):
        raise UsageProblem(
            f"--kv-canary-real-data is {arguments.kv_canary_real_data!r}, expected partial or all: without digests"
            f" most faults cannot be found"
        )
    _check_ranks(arguments)
    return arguments


def _check_ranks(arguments: Any) -> None:
    """Whether these ranks can be threads of this process; whether the model can be divided so is asked of it."""
    sizes = {"--tp-size": arguments.tp_size, "--pp-size": arguments.pp_size}
    for flag, size in sizes.items():
        if size < 1:
            raise UsageProblem(f"{flag} is {size}, expected at least 1")
    ranks = arguments.tp_size * arguments.pp_size
    if ranks > _RANKS_MAX:
        raise UsageProblem(
            f"--tp-size {arguments.tp_size} --pp-size {arguments.pp_size} makes {ranks} ranks, expected at most"
            f" {_RANKS_MAX}: they are threads of this process"
        )
    if ranks > 1 and arguments.device == "auto":
        arguments.device = "cpu"
    if ranks > 1 and arguments.device != "cpu":
        raise UsageProblem(
            f"--device is {arguments.device!r} with {ranks} ranks, expected cpu: here ranks are threads, which share"
            f" one device"
        )


def _settings(arguments: Any) -> dict[str, Any]:
    page = arguments.page_size or (16 if arguments.model else 4)
    return {
        "kv_canary_real_data": arguments.kv_canary_real_data,
        "kv_canary_coverage": arguments.kv_canary_coverage,
        "page_size": page,
        "max_total_tokens": 128 * page,
        "chunked_prefill_size": 16 * page,
        "device": arguments.device,
        "dtype": arguments.dtype,
        "kv_cache_dtype": arguments.kv_cache_dtype,
        "tp_size": arguments.tp_size,
        "pp_size": arguments.pp_size,
    }


def _subjects(arguments: Any, home: Path) -> list[Subject]:
    from serinus.models import resolve
    from serinus.selftest import CANARY_SHAPES, Subject, make_canary_toy

    settings = _settings(arguments)
    if arguments.model:
        folder = Path(resolve(arguments.model))
        return [Subject(name=folder.name or str(folder), checkpoint=folder, settings=settings)]
    toys = [
        Subject(
            name=f"toy {shape}",
            checkpoint=make_canary_toy(home / shape, shape, **_toy(shape, arguments, settings["page_size"])),
            settings=settings,
        )
        for shape in CANARY_SHAPES
        if shape != "latent" or _LATENT_HEADS % arguments.tp_size == 0
    ]
    if settings["kv_canary_coverage"] != "full":
        return toys
    in_turns = {**settings, "kv_canary_coverage": _IN_TURNS}
    name, modes = f"{toys[0].name}, {_IN_TURNS}", ("req_to_token", "real_kv_used", "tier_bytes")
    return [*toys, Subject(name=name, checkpoint=toys[0].checkpoint, settings=in_turns, modes=modes, sides=("decode",))]


def _toy(shape: str, arguments: Any, page: int) -> dict[str, Any]:
    """What fits the page size and the ranks: a window of two pages and a slot, KV heads and layers for all of them."""
    layers = max(3, arguments.pp_size)
    kind: dict[str, Any] = {"layers": layers}
    if shape != "latent":
        kind["kv_heads"] = max(2, arguments.tp_size)
    if shape in ("swa", "both"):
        kind["window"] = 2 * page + 1
    if shape == "both":
        kind["layer_types"] = ("SF" * layers)[:layers]
    return kind


def _run_all(subjects: Sequence[Subject], arguments: Any) -> list[Cell]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from serinus.cli.show import console
    from serinus.selftest import plan_matrix, run_cell

    work = [(cell, subject) for subject in subjects for cell in plan_matrix(subject)]
    out = console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=out, disable=not out.is_terminal, transient=True) as progress:
        task = progress.add_task("", total=len(work))
        for cell, subject in work:
            progress.update(task, description=f"{cell.model}: {cell.mode} {cell.part.lower()} in {cell.side}")
            try:
                run_cell(cell, subject, faults=arguments.faults, seed=arguments.seed)
            except ConfigError:
                raise
            except (SerinusError, AssertionError) as error:  # a fault that is not reported, a request that never ends
                cell.error = f"{type(error).__name__}: {error}"
            progress.advance(task)
    return [cell for cell, _ in work]


def _print_table(cells: Sequence[Cell]) -> None:
    from rich.table import Table

    from serinus.cli.show import console

    table = Table(title="The canary's detector matrix", title_justify="left")
    for name in ("model", "fault", "part", "planted in"):
        table.add_column(name)
    for name in ("injected", "detected"):
        table.add_column(name, justify="right")
    table.add_column("by")
    for name in ("latency", "false alarms"):
        table.add_column(name, justify="right")
    table.add_column("")
    for cell in cells:
        promise = "" if cell.promise is None else f" of {cell.promise}"
        clean = cell.mode == "none"
        table.add_row(
            cell.model, "none: clean run" if clean else cell.mode, cell.part.lower(), cell.side,
            "" if clean else str(cell.injected), "" if clean else str(cell.detected), _reporters(cell),
            f"{cell.latency}{promise}" if cell.detected else "", str(len(cell.alarms)),
            "[green]ok[/]" if cell.perfect else "[bold red]WRONG[/]",
        )  # fmt: skip
    out = console()
    out.print(table)
    out.print("latency: steps of the engine that reports, from planting to report, the longest (of those promised)")
    for line in _coverage(cells):
        out.print(line, highlight=False, soft_wrap=True)
    for cell in (cell for cell in cells if not cell.perfect):
        out.print(f"\n{cell.model}, {cell.mode} {cell.part} in {cell.side}: expected {cell.expected}", style="red")
        for line in [*([cell.error] if cell.error else []), *cell.alarms[:_ALARMS_SHOWN]]:
            out.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)
    wrong = sum(not cell.perfect for cell in cells)
    injected, detected = sum(cell.injected for cell in cells), sum(cell.detected for cell in cells)
    out.print(
        f"\n{injected} faults injected, {detected} detected, {sum(len(c.alarms) for c in cells)} false alarms: "
        + ("the matrix is perfect" if not wrong else f"{wrong} of {len(cells)} lines are not as they must be"),
        style="bold green" if not wrong else "bold red", highlight=False,
    )  # fmt: skip


def _coverage(cells: Sequence[Cell]) -> list[str]:
    """What was damaged and reported, of what there is: layers x halves x heads (and lanes x fields of stamps)."""
    lines = ["proved: places (layers x halves x heads, of pages also lanes x fields of stamps) damaged and reported"]
    for model in dict.fromkeys(cell.model for cell in cells):
        own = [cell for cell in cells if cell.model == model and cell.places]
        told = [f"{cell.mode} {cell.part.lower()} {cell.side} {cell.hit}/{cell.places}" for cell in own]
        checks = {by.split()[1] for cell in cells if cell.model == model for by in cell.by}
        lines.append(f"  {model}: {', '.join(told)}; checks that reported: {', '.join(sorted(checks))}")
        if ranks := _ranks([cell for cell in cells if cell.model == model]):
            lines.append(f"  {model}, kinds of faults that each rank had and reported itself: {ranks}")
    return lines


def _ranks(cells: Sequence[Cell]) -> str:
    """Of each rank in how many cells it was damaged and reported that, of those in which it can be damaged."""
    able = Counter(name for cell in cells for name in cell.ranks)
    hit = Counter(name for cell in cells for name in cell.ranks if name in cell.ranks_hit)
    return ", ".join(f"{name} {hit[name]}/{able[name]}" for name in able)


def _grade_all(subjects: Sequence[Subject], arguments: Any) -> int:
    """The self-test under each weakness. 0 = it saw all of them, 1 = it was blind to one."""
    from dataclasses import asdict

    from serinus.cli.show import console, write_json
    from serinus.selftest import RANK_WEAKNESSES, WEAKNESSES, grade, plan_matrix

    for subject in subjects:
        plan_matrix(subject)  # a model that does not fit so many ranks is no weakness that was seen
    out, grades = console(), []
    # The toys with all layers full and in turns come first: they are quick, and see the most.
    order = sorted(subjects, key=lambda subject: (subject.name.endswith("swa"), subject.name.endswith("both")))
    for each in [*WEAKNESSES, *(RANK_WEAKNESSES if arguments.tp_size * arguments.pp_size > 1 else [])]:
        grades.append(grade(order, each, faults=arguments.faults, seed=arguments.seed))
        found = grades[-1]
        word = "[green]red, as it must be[/]" if found.seen_by else "[bold red]BLIND[/]"
        out.print(f"{word}  {each.name}", highlight=False, soft_wrap=True)
        if found.seen_by:
            out.print(f"    {found.seen_by}: {found.said[:200]}", markup=False, highlight=False, soft_wrap=True)
    blind = sum(not found.seen_by for found in grades)
    write_json(arguments.json, {"perfect": not blind, "weaknesses": [asdict(found) for found in grades]})
    out.print(
        f"\n{len(grades)} weaknesses planted in the canary, {len(grades) - blind} turned the self-test red"
        + (f", it was blind to {blind}" if blind else ""),
        style="bold red" if blind else "bold green", highlight=False,
    )  # fmt: skip
    return 1 if blind else 0


def _reporters(cell: Cell) -> str:
    """Reports with the halves put together: HEAD_K_FULL and HEAD_V_FULL as HEAD_KV_FULL."""
    halves: dict[tuple[str, str, str], str] = {}
    for reporter in cell.by:
        side, tag = reporter.split()
        when, half, part = tag.split("_")
        halves[side, when, part] = halves.get((side, when, part), "") + half
    return ", ".join(f"{side} {when}_{half}_{part}" for (side, when, part), half in halves.items())
