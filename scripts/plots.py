"""Plots of benchmarks/results/*.json as SVG for the docs: `make pictures-plots`. The same results, the same bytes.

    python scripts/plots.py --write docs/pictures

Every plot names what was measured on which machine, has its axes from zero, and its peer, floor or goal beside it.
Colours are of medium brightness on nothing, for white pages and black ones. Needs matplotlib (the extra `docs`).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import ScaledTranslation

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
TEXT, GREY = "#7d8590", "#8b949e"
BLUE, GREEN, AMBER, RED, VIOLET = "#3d84e6", "#2f9e58", "#c98a1b", "#e0524c", "#8f65dd"
STYLE = {
    "svg.hashsalt": "serinus", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 11,
    "font.sans-serif": ["DejaVu Sans"], "text.color": TEXT, "axes.labelcolor": TEXT, "xtick.color": TEXT,
    "ytick.color": TEXT, "axes.edgecolor": GREY, "axes.spines.top": False, "axes.spines.right": False,
    "figure.facecolor": "none", "axes.facecolor": "none", "savefig.facecolor": "none", "axes.titlelocation": "left",
    "axes.titleweight": "bold", "axes.titlesize": 12, "legend.frameon": False, "legend.labelcolor": TEXT,
}  # fmt: skip


def result(name: str) -> dict[str, Any]:
    """What a benchmark has measured."""
    read: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return read


def conditions(*names: str) -> str:
    """Machine and commit of results, in one line."""
    lines = []
    for name in names:
        found = result(name)
        machine = found["machine"]
        where = machine if isinstance(machine, str) else f"{machine['cpu']}, {machine['cores']} cores"
        lines.append(f"{where}, commit {found['commit']}")
    return "; ".join(dict.fromkeys(lines)) + f" (benchmarks/{', '.join(names)}.py)"


def bars(axes: Axes, names: Sequence[str], values: Sequence[float], colours: Sequence[str], form: str) -> None:
    """Lying bars from zero, the first one on top, each with its value."""
    axes.barh(range(len(names)), values, color=colours, height=0.62)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    for at, value in enumerate(values):
        shift = axes.transData + ScaledTranslation(5 / 72, 0, axes.figure.dpi_scale_trans)
        axes.text(value, at, form.format(value), va="center", color=TEXT, transform=shift)
    axes.set_xlim(0, max(values) * 1.22)


def peers() -> Figure:
    """The whole job, and one stream, beside other engines with the same weights, in turns."""
    found = result("peers")
    engines, versions = found["engines"], found["versions"]
    words = {"serinus": "Serinus, bf16, canary on", "transformers": "transformers, bf16"}
    names = sorted(engines, key=lambda name: -engines[name]["batch"]["tok_per_cpu_s"])
    figure = Figure(figsize=(9.6, 3.3), layout="constrained")
    colours = [GREEN if name == "serinus" else AMBER for name in names]
    for axes, word, count, shown in zip(
        figure.subplots(1, 2, sharey=True), ("batch", "stream"), (found["requests"], 1), ("requests", "request"),
        strict=True,
    ):  # fmt: skip
        rates = [engines[name][word]["tok_per_cpu_s"] for name in names]
        bars(axes, [words.get(name, name.replace(" ", ", ")) for name in names], rates, colours, "{:,.0f}")
        axes.set_title(f"{count} {shown} of {found['prompt']} + {found['output']} tokens")
        axes.set_xlabel("tokens per CPU second (higher is better)")
    figure.axes[1].invert_yaxis()  # shared: both calls of bars have turned it
    about = ", ".join(f"{name} {number}" for name, number in versions.items())
    return signed(
        figure, f"prompts and answers; 221M weights, {found['threads']} thread, {about}; {conditions('peers')}"
    )


def decode() -> Figure:
    """A decode step with and without the canary, and what of it is the floor."""
    job = result("job")
    floor = job["plain_step_ms"] * job["plain_of_floor"]
    names = [
        "floor (bytes over bandwidth)",
        "without the canary",
        "canary: every byte, rotating:16",
        "the same, sampled",
    ]
    values = [floor, job["plain_step_ms"], job["decode_step_ms"], job["sampled_step_ms"]]
    figure, axes = panel(3.0)
    bars(axes, names, values, [GREY, BLUE, GREEN, GREEN], "{:.1f} ms")
    axes.axvline(floor, color=GREY, linewidth=1, linestyle=(0, (4, 3)))
    axes.set_title("A decode step against its floor")
    axes.set_xlabel(f"ms (lower is better): 16 requests, 221M weights; memory of {job['bandwidth_gb_s']:.0f} GB/s")
    return signed(figure, conditions("job"))


def handoffs() -> Figure:
    """Bytes of a prompt through each transport beside a plain copy and socket; what a handoff adds to a first token."""
    handoff, serving = result("handoff"), result("serving")
    figure = Figure(figsize=(9.6, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
    paths = handoff["paths_gb_s"]
    ms = {name: handoff["bytes"] / 1e6 / rate for name, rate in paths.items()}
    words = {"copy": "plain copy", "socket": "bare loopback socket", "nixl": "NIXL (UCX)", "mooncake": "Mooncake (TCP)"}
    order = sorted(ms, key=lambda name: ms[name])
    colours = [GREY if name in ("copy", "socket") else BLUE for name in order]
    bars(left, [words.get(name, name) for name in order], [ms[name] for name in order], colours, "{:.0f} ms")
    left.set_title("Latency of a handoff of 2,000 tokens")
    left.set_xlabel(f"ms for {handoff['bytes'] / 1e6:.0f} MB of KV (lower is better)")
    values = [serving["local_ttft_s"], serving["handoff_ttft_s"]]
    bars(right, ["computed here", "handed over (shm)"], values, [GREY, GREEN], "{:.2f} s")
    right.set_title(f"A first token: +{serving['handoff_cost_of_prefill']:.1%}")
    right.set_xlabel("s, over HTTP (lower is better)")
    return signed(figure, conditions("handoff", "serving"))


def tiers() -> Figure:
    """First token of a prompt that shares 2,000 tokens, by where they are found."""
    found = result("tiers")
    names = ["on the device", "on the host", "in files", "nowhere: computed"]
    values = [found[f"{name}_ttft_ms"] for name in ("device", "host", "file", "cold")]
    figure, axes = panel(2.9)
    bars(axes, names, values, [BLUE, BLUE, BLUE, GREY], "{:,.0f} ms")
    axes.set_title("First token of 2,000 shared tokens, by where their KV is found")
    axes.set_xlabel(f"ms (lower is better): {found['prefix_mb']:.0f} MB of KV, every digest checked")
    return signed(figure, conditions("tiers"))


def canary() -> Figure:
    """What the canary costs a rank of a step, by what it digests and how often, beside its goals."""
    found = result("canary")
    words = {
        "partial_rotating": "16 bytes a row,\nrotating:16", "all_rotating": "every byte,\nrotating:16",
        "all_full": "every byte,\nevery step",
    }  # fmt: skip
    figure, axes = panel(3.3)
    for at, name in enumerate(words):
        mode = found["modes"][name]
        for offset, key, colour in ((-0.2, "decode_overhead", GREEN), (0.2, "prefill_overhead", BLUE)):
            value = 100 * mode[key]
            axes.bar(at + offset, value, 0.36, color=colour)
            near = key == "decode_overhead" and 0 < 100 * mode["goal"] - value < 1  # above the line of the goal, then
            y = 100 * mode["goal"] if near else value
            axes.text(at + offset, y, f"{value:.1f} %", ha="center", va="bottom", color=TEXT)
        axes.hlines(100 * mode["goal"], at - 0.42, at + 0.02, color=RED, linewidth=1.5)
    axes.set_xticks(range(len(words)), list(words.values()))
    axes.set_ylabel("% of the step without it")
    axes.set_ylim(0, None)
    axes.set_title("What the canary costs a rank")
    axes.plot([], [], "s", color=GREEN, label=f"decode step ({found['decode_step_ms']:.0f} ms)")
    axes.plot([], [], "s", color=BLUE, label=f"prompt chunk ({found['prefill_chunk_ms']:.0f} ms)")
    axes.plot([], [], "-", color=RED, label="goal of the decode step")
    axes.legend(loc="upper left")
    return signed(figure, conditions("canary"))


def matrix() -> Figure:
    """Planted faults by the check that found them, beside all that were planted."""
    found = result("matrix")
    rows, checks = found["faults"], found["checks"]
    figure = Figure(figsize=(9.6, 2.0 + 0.34 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for y, row in enumerate(rows):
        for check, count in row["by"].items():
            axes.scatter(checks.index(check), y, s=250, color=GREEN, marker="s", linewidths=0)
            axes.text(checks.index(check), y, f"{count}", ha="center", va="center", color="white", fontsize=9)
        whole = row["detected"] == row["injected"]
        words = f"{row['detected']} of {row['injected']}"
        axes.text(len(checks) - 0.2, y, words, va="center", color=GREEN if whole else RED, fontweight="bold")
    axes.set_yticks(range(len(rows)), [row["fault"] for row in rows])
    axes.set_xticks(range(len(checks)), checks, rotation=35, ha="left")
    axes.xaxis.tick_top()
    axes.set_xlim(-0.6, len(checks) + 0.8)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.grid(color=GREY, alpha=0.25)
    axes.set_axisbelow(True)
    told = f"{found['detected']} of {found['injected']} planted faults found, {found['alarms']} false alarms"
    axes.set_title(f"Detection matrix: {told}", pad=12)
    axes.set_xlabel("cells (model, part, engine) in which this check reported it; right: faults found of those planted")
    return signed(figure, conditions("matrix"))


def panel(height: float) -> tuple[Figure, Axes]:
    """A figure with one pair of axes."""
    figure = Figure(figsize=(9.2, height), layout="constrained")
    return figure, figure.subplots()


def signed(figure: Figure, words: str) -> Figure:
    """The figure with where its numbers come from, in small letters below."""
    figure.supxlabel(words, fontsize=8.5, color=GREY, x=0.99, ha="right")
    return figure


PLOTS: dict[str, Callable[[], Figure]] = {
    "peers": peers, "decode": decode, "handoffs": handoffs, "tiers": tiers, "canary-cost": canary, "matrix": matrix,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", type=Path, required=True, metavar="FOLDER", help="where the SVG files go")
    folder = parser.parse_args().write
    folder.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(STYLE):
        for name, plot in PLOTS.items():
            plot().savefig(folder / f"{name}.svg", metadata={"Date": None, "Creator": "scripts/plots.py"})
            print(folder / f"{name}.svg")


if __name__ == "__main__":
    main()
