"""The `serinus` command: runs the subcommand that is named. Settings that are wrong: one line and exit 2; Ctrl-C: 130.

Imports nothing heavy: a subcommand's module is loaded when it runs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module

from serinus.cli.parser import Command, UsageProblem
from serinus.core.descriptors import raise_descriptor_limit
from serinus.core.errors import ConfigError
from serinus.core.heap import collect_seldom

COMMANDS: tuple[Command, ...] = (
    Command(
        name="serve",
        summary="serve one model with one engine over HTTP",
        about="Serve one model: an engine process, and an OpenAI-compatible HTTP server before it.",
        examples=(
            ("serinus serve Qwen/Qwen3-0.6B --port 30000", "a model from the hub, or from a directory"),
            ("serinus serve ./model --max-total-tokens 8192 --api-key secret", "8192 tokens of KV, clients need a key"),
            ("serinus serve ./model --disaggregation-mode prefill --port 30001", "a prefill engine for others"),
        ),
        target="serinus.cli.serve:run",
    ),
    Command(
        name="up",
        summary="prefill engines, decode engines and their router, here or on a Ray cluster",
        about="Start P prefill engines, D decode engines and the router before them, watch them, stop them together.",
        examples=(
            ("serinus up ./model", "1 prefill + 1 decode engine, router on port 8000"),
            ("serinus up ./model --prefill 1 --decode 2 --port 9000", "two decode engines share one prefill engine"),
            ("serinus up ./model --prefill 0 --decode 2", "two whole engines, nothing handed over"),
            (
                "serinus up ./model --ray --prefill 2 --decode 4 --max-decode 8",
                "on the nodes of a Ray cluster, a router on each; up to 8 decode engines by load",
            ),
        ),
        target="serinus.cli.up:run",
    ),
    Command(
        name="compile",
        summary="compile a model's kernels ahead, so that its first start is as fast as the others",
        about="Compile the kernels of a model's shapes and settings, by several processes, into the cache on disk.",
        examples=(
            ("serinus compile ./model", "as `serinus serve ./model` would use them; give it the same flags"),
            ("serinus compile ./model --max-running-requests 64", "decode steps of at most 64 requests"),
        ),
        target="serinus.cli.compile:run",
    ),
    Command(
        name="router",
        summary="one address before engines that run elsewhere",
        about="Give decode engines one address, and tell each request which prefill engine may help.",
        examples=(
            (
                "serinus router --decode http://127.0.0.1:30002 --prefill http://127.0.0.1:30001",
                "one decode and one prefill engine, router on port 8000",
            ),
            ("serinus router --decode http://127.0.0.1:30000 http://127.0.0.1:30010", "spread over two whole engines"),
        ),
        target="serinus.cli.router:run",
    ),
    Command(
        name="bench serve",
        summary="measure a running server: throughput, first token, between tokens",
        about="Send requests to a running server (Serinus, or any OpenAI-compatible or SGLang server) and measure it.",
        examples=(
            ("serinus bench serve --port 8000 --num-prompts 64", "64 random prompts, as fast as they are answered"),
            (
                "serinus bench serve --dataset-name generated-shared-prefix --gsp-num-groups 4 --request-rate 8",
                "shared system prompts, 8 requests a second",
            ),
            (
                "serinus bench serve --goodput ttft:500 tpot:50 --output-file runs.jsonl",
                "goodput under an SLO, to a file",
            ),
            ("serinus bench serve --num-prompts 200 --request-rate 4 --plot run.svg", "and a picture of the run"),
        ),
        target="serinus.cli.bench.command:run",
    ),
    Command(
        name="batch",
        summary="answer a file of requests (OpenAI's batch form) into a file",
        about="""Answer the requests of a file in OpenAI's batch form (custom_id, method, url, body) into another one:
by an engine that is started for it, or by a running server. Answers are written as they come; where the output has some
already, only the rest is asked. Lines that are no requests are named, and stand in the output with an error.
Exit code 1 = a line is bad, an answer is an error, or the server was lost.""",
        examples=(
            ("serinus batch ./model -i requests.jsonl -o answers.jsonl", "an engine of its own"),
            ("serinus batch --url http://127.0.0.1:8000 -i requests.jsonl -o answers.jsonl", "a running server"),
        ),
        target="serinus.cli.batch:run",
    ),
    Command(
        name="cache",
        summary="what a running engine has cached where",
        about="Show the pools and the prefix tree of a running engine, or of every engine behind a router.",
        examples=(
            ("serinus cache http://127.0.0.1:30000", "one engine"),
            ("serinus cache http://127.0.0.1:8000 --limit 200", "every engine behind a router, 200 nodes each"),
            ("serinus cache --json | jq .pools", "the same as JSON"),
        ),
        target="serinus.cli.cache:run",
    ),
    Command(
        name="canary selftest",
        summary="prove that the canary of this machine finds damaged KV",
        about="""Plant every fault that the canary promises to find, one at a time, in both engines of a
prefill/decode pair on this machine, and say who reported it, how soon, and what else was reported. Run it before you
trust a deployment, with the settings you deploy. Without MODEL: toy models of full, sliding-window, mixed and latent
layers (these of one slice). `--tp-size` and `--pp-size`: engines of several ranks, each of which is damaged.
Exit code 1 = a fault was missed, found late, or something sound was accused. See docs/CANARY.md.""",
        examples=(
            ("serinus canary selftest", "four toy models, half a minute"),
            ("serinus canary selftest ./model --json matrix.json", "your model; two copies of it must fit in memory"),
            ("serinus canary selftest --kv-canary-real-data partial --faults 20", "cheaper digests, more faults"),
            ("serinus canary selftest --mutants", "is the self-test itself any good? some minutes"),
        ),
        target="serinus.cli.canary:selftest",
    ),
    Command(
        name="canary show",
        summary="what the canaries of running engines have found",
        about="""Print the incidents of a running engine, or of every engine behind a router: what was wrong where, from
which step to which, who owns the page, who uses it. Behind a router, then request by request: what each engine knows of
it, from the fault to the report. Exit code 1 = there are some.""",
        examples=(
            ("serinus canary show http://127.0.0.1:30000", "one engine"),
            ("serinus canary show http://127.0.0.1:8000 --json", "every engine behind a router, as JSON"),
            ("serinus canary show http://127.0.0.1:8000 --html story.html", "a page to send to a colleague"),
        ),
        target="serinus.cli.canary_show:show",
    ),
    Command(
        name="doctor",
        summary="look at this machine and a checkpoint, say what is wrong",
        about="""Show machine, versions, extras, threads, kernels, ports and shared memory. Where a
checkpoint is named: check it, and say how much KV an engine of these settings could hold, by part and tier.""",
        examples=(
            ("serinus doctor", "can this machine serve?"),
            ("serinus doctor ./model", "is this checkpoint whole, and does it fit?"),
            ("serinus doctor ./model --enable-hierarchical-cache --hicache-size 16", "and with a host tier?"),
            ("serinus doctor --settings-doc > docs/settings.md", "every setting as a table"),
        ),
        target="serinus.cli.doctor:run",
    ),
    Command(
        name="demo",
        summary="serve a small model disaggregated, plant one fault under three canaries, show the answers",
        about="""Serve the package's small model with one prefill and one decode engine, ask it with OpenAI's client,
and plant the same fault three times: under a canary that only logs (the wrong code, with HTTP 200), one that raises
(a 500 that names the place) and one that heals (the right code, and a receipt).""",
        examples=(
            ("serinus demo", "everything, in about half a minute"),
            ('serinus serve "$(serinus demo --model-path)"', "serve the demo's model"),
        ),
        target="serinus.cli.demo:run",
    ),
    Command(
        name="sim",
        summary="a whole cluster in one thread, with faults, from a seed",
        about="""Simulate a cluster: engines with the real scheduler, cache, wire and handoff code, all in
one thread and virtual time, while an adversary delays, loses, repeats and corrupts frames, cuts links, and pauses,
kills and restarts engines. Every answer is held against an oracle, and afterwards nothing may be left anywhere.
A seed is always the same run; a failing one is shrunk to the smallest schedule that still fails.
Exit code 1 = something was found. See docs/SIMULATION.md.""",
        examples=(
            ("serinus sim --seeds 0..2000 --workers 2", "two thousand clusters"),
            ("serinus sim --minutes 10 --json result.json", "as many as ten minutes allow, result to a file"),
            ("serinus sim --seed 1234", "one run again: its schedule, what happened, what was found"),
            ("serinus sim --seed 1234 --timeline run.svg", "and a picture of it: engines, requests, frames, faults"),
        ),
        target="serinus.cli.sim:run",
    ),
    Command(
        name="version",
        summary="print the versions of Serinus, torch and Python",
        about="Print the versions of Serinus, torch and Python.",
        examples=(("serinus version", "also: serinus --version"),),
        target="serinus.cli.version:run",
    ),
)
"""All subcommands, in the order of the help."""


def find_command(words: Sequence[str]) -> tuple[Command, list[str]]:
    """The command that the first words name, and the words after them. Raises UsageProblem."""
    for command in COMMANDS:
        parts = command.name.split()
        if list(words[: len(parts)]) == parts:
            return command, list(words[len(parts) :])
    if words[0] == "bench":
        raise UsageProblem("bench: expected `serinus bench serve`")
    if words[0] == "canary":
        raise UsageProblem("canary: expected `serinus canary selftest` or `serinus canary show`")
    names = {word: command.name for command in reversed(COMMANDS) for word in reversed(command.name.split())}
    near = get_close_matches(words[0], names, n=1, cutoff=0.5)
    hint = f"did you mean `serinus {names[near[0]]}`?" if near else "expected one of those that `serinus --help` lists"
    raise UsageProblem(f"unknown command {words[0]!r}: {hint}")


def group_help(group: str) -> str:
    """What `serinus GROUP --help` prints where the names of several words begin with GROUP; empty = none does."""
    members = [command for command in COMMANDS if command.name.startswith(f"{group} ")]
    lines = [f"usage: serinus {member.name} [flags]        {member.summary}" for member in members]
    return "\n".join((*lines, f"Flags and examples: `serinus {members[0].name} --help`.")) if members else ""


def help_text() -> str:
    """What `serinus --help` prints."""
    lines = [
        "Serinus serves large language models with a KV cache that is proved intact.",
        "",
        "usage: serinus COMMAND [flags]        serinus COMMAND --help",
        "",
        "commands:",
        *(f"  {command.name:<15} {command.summary}" for command in COMMANDS),
        "",
        "examples:",
        "  $ serinus demo                                     see it work, from nothing",
        "  $ serinus serve ./model --port 30000               one engine",
        "  $ serinus up ./model --prefill 1 --decode 1        prefill and decode apart, one command",
        "",
        "`./model` is a directory with config.json and safetensors, a GGUF file, or a Hugging Face hub id.",
        "Every setting, its variable and its default: docs/settings.md.",
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own); returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(help_text())
        return 0
    if words[0] in ("-V", "--version"):
        words[0] = "version"
    if len(words) == 2 and words[1] in ("-h", "--help") and (text := group_help(words[0])):
        print(text)
        return 0
    name = "serinus"
    try:
        command, rest = find_command(words)
        name = f"serinus {command.name}"
        raise_descriptor_limit()  # servers hold many connections, `bench serve` makes them
        collect_seldom()
        module, function = command.target.split(":")
        code: int = getattr(import_module(module), function)(command, rest)
        return code
    except UsageProblem as problem:
        print(f"{name}: {problem}\ntry `{name} --help`", file=sys.stderr)
        return 2
    except ConfigError as problem:
        own = f"{name.removeprefix('serinus ').split()[0]}: "  # an error of the command's own begins with that
        print(f"{name}: {str(problem).removeprefix(own)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 0  # the reader of our output (head, less) has seen enough
