"""The command line: help that answers at once, names people know, refusals that say what to do."""

from __future__ import annotations

import platform
import subprocess
import sys
from importlib.metadata import version

import pytest

from serinus.cli import Command, main, read_config
from serinus.cli.main import COMMANDS
from serinus.cli.parser import UsageProblem, add_settings, make_parser
from serinus.core.config import ServeConfig

SERVE = next(command for command in COMMANDS if command.name == "serve")
HELPS = [["--help"], *([*command.name.split(), "--help"] for command in COMMANDS)]


def parse(*words: str) -> ServeConfig:
    """What `serinus serve WORDS` would be told, without starting anything."""
    parser = make_parser(SERVE)
    add_settings(parser, ServeConfig, positional_model=True)
    return read_config(ServeConfig, parser, words)[0]


@pytest.mark.slow
@pytest.mark.parametrize("words", HELPS, ids=" ".join)
def test_help_loads_little_and_nothing_heavy(words: list[str]) -> None:
    """280 modules take a core 0.2 s; any of the heavy ones alone brings more than what is left."""
    script = (
        "import sys\nfrom serinus.cli import main\n"
        f"try:\n    main({words!r})\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'transformers', 'numba', 'numpy', 'uvicorn', 'starlette', 'zmq'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert len(sys.modules) < 320, sorted(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "usage: serinus" in done.stdout


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_help_teaches_with_examples(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main([*command.name.split(), "--help"])
    assert raised.value.code == 0
    out = capsys.readouterr().out
    assert "examples:" in out
    assert f"$ serinus {command.name}" in out
    assert out.startswith(f"usage: serinus {command.name} ")


def test_what_may_be_left_out_stands_in_brackets(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    assert capsys.readouterr().out.startswith("usage: serinus serve [MODEL] [flags]\n")


@pytest.mark.parametrize(("group", "members"), [("bench", ["serve"]), ("canary", ["selftest", "show"])])
def test_the_help_of_a_group_lists_its_commands(
    group: str, members: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([group, "--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"usage: serinus {group} {member}" in out for member in members)


def test_an_interrupt_ends_a_command_with_130_and_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(command: Command, words: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("serinus.cli.version.run", interrupted)
    assert main(["version"]) == 130
    assert capsys.readouterr() == ("", "interrupted\n")


def test_without_words_the_list_of_commands_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out = capsys.readouterr().out
    assert all(command.summary in out for command in COMMANDS)


@pytest.mark.parametrize(
    ("sglang", "vllm", "value", "field"),
    [
        ("--context-length", "--max-model-len", "512", "model.context_length"),
        ("--page-size", "--block-size", "32", "memory.page_size"),
        ("--mem-fraction-static", "--gpu-memory-utilization", "0.5", "memory.mem_fraction_static"),
        ("--max-running-requests", "--max-num-seqs", "8", "sched.max_running_requests"),
        ("--chunked-prefill-size", "--max-num-batched-tokens", "256", "sched.chunked_prefill_size"),
        ("--tokenizer-path", "--tokenizer", "t", "model.tokenizer_path"),
        ("--random-seed", "--seed", "3", "model.random_seed"),
        ("--json-model-override-args", "--hf-overrides", "{}", "model.json_model_override_args"),
        ("--model-path", "--model", "m", "model.model_path"),
    ],
)
def test_names_of_sglang_and_vllm_mean_the_same(sglang: str, vllm: str, value: str, field: str) -> None:
    group, name = field.split(".")
    left, right = parse(sglang, value), parse(f"{vllm}={value}")
    assert left == right
    assert str(getattr(getattr(left, group), name)) == value


def test_prefix_caching_is_switched_by_either_name() -> None:
    assert parse("m", "--disable-radix-cache").sched.disable_radix_cache
    assert parse("m", "--no-enable-prefix-caching").sched.disable_radix_cache
    assert not parse("m", "--disable-radix-cache", "--enable-prefix-caching").sched.disable_radix_cache


def test_the_model_may_stand_alone_or_behind_its_flag_but_not_be_two() -> None:
    assert parse("m").model.model_path == "m"
    assert parse("m", "--model-path", "m").model.model_path == "m"
    with pytest.raises(UsageProblem, match="two models are named"):
        parse("m", "--model-path", "other")


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["serve", "m", "--pge-size", "8"], "did you mean --page-size?"),
        (["serve", "m", "--tp", "2"], "unknown flag --tp: did you mean --tp-size?"),
        (["serve", "m", "-pp=2"], "unknown flag -pp: did you mean --pp-size?"),
        (["serve", "m", "--master-port", "5000"], "--dist-init-addr HOST:PORT"),
        (["serve", "m", "--page", "8"], "unknown flag --page"),
        (["serve", "m", "--page-size", "eight"], "--page-size is 'eight', expected an integer"),
        (["serve", "m", "--page-size"], "expected one argument"),
        (["serve", "m", "--dtype", "bf16"], "expected one of auto, bfloat16, float16, float32"),
        (["serve", "m", "--port", "70000"], "--port is 70000, expected at most 65535"),
        (["serve", "m", "extra"], "unexpected argument 'extra'"),
        (["serve", "m", "--trust-remote-code"], "never runs code that comes with a checkpoint"),
        (["serve", "m", "--tensor-parallel-size", "0"], "--tp-size is 0, expected at least 1"),
        (["serve", "m", "--pp-size", "2", "--pp-layer-partition", "3"], "1 stages, expected --pp-size = 2 of them"),
        (["serve", "m", "--tp-size", "4", "--ep-size", "2"], "--ep-size is 2, expected 1 or --tp-size = 4"),
        (["serve", "m", "--tp-size", "3", "--nnodes", "2"], "--nnodes is 2, expected a divisor of the 3 ranks"),
        (["serve", "m", "--tp-size", "2", "--nnodes", "2"], "expected HOST:PORT of machine 0"),
        (["serve", "m", "--tp-size", "2", "--nnodes", "2", "--dist-init-addr", "::1:5000"], "as in [::1]:5000"),
        (["serve", "m", "--host", "::1:30000"], "--host is '::1:30000', expected a name or an address"),
        (["serve", "m", "--disaggregation-bootstrap-host", "[::1]:5000"], "without a port"),
        (["serve", "m", "--disaggregation-prefill-addresses", "tcp://::1:5000"], "as in [::1]:5000"),
        (["serve", "m", "--tp-size", "2", "--node-rank", "1"], "--node-rank is 1, expected less than --nnodes = 1"),
        (
            [
                "serve",
                "m",
                "--disaggregation-transfer-backend",
                "cuda_ipc",
                "--tp-size",
                "2",
                "--nnodes",
                "2",
                "--dist-init-addr",
                "h:1",
            ],
            "with 2 hosts",
        ),
        (["serve"], "no model is named"),
        (["up"], "no model is named"),
        (
            ["compile"],
            "serinus compile: no model is named, expected a directory or a hub id: serinus compile MODEL\n"
            "try `serinus compile --help`",
        ),
        (["cache", "127.0.0.1:1"], "serinus cache: http://127.0.0.1:1 does not answer"),
        (["canary", "show", "127.0.0.1:1"], "serinus canary show: http://127.0.0.1:1 does not answer"),
        (["up", "m", "--disaggregation-mode", "prefill"], "unknown flag --disaggregation-mode"),
        (["router"], "no engine is named"),
        (["router", "--decode", "ftp://x"], "ftp://x"),
        (["bench"], "expected `serinus bench serve`"),
        (["bench", "serve", "--num-prompts", "0"], "expected an integer, at least 1"),
        (["bench", "serve", "--request-rate", "-1"], "requests per second above 0"),
        (["bench", "serve", "--goodput", "speed:5"], "expected ttft:MS, tpot:MS or e2e:MS"),
        (["bench", "serve", "--base-url", "ftp://x"], "expected http://host:port or https://host:port"),
        (["bench", "serve", "--extra-request-body", "[1]"], "expected a JSON object"),
        (["version", "--verbose"], "unknown flag --verbose"),
        (["doctor", "--fast"], "unknown flag --fast"),
        (["demo", "--backend", "carrier"], "carrier"),
        (["srve"], "did you mean `serinus serve`?"),
        (["selftest"], "did you mean `serinus canary selftest`?"),
    ],
)
def test_a_wrong_command_line_ends_with_2_and_one_clear_sentence(
    words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    err = capsys.readouterr().err
    assert complaint in err
    assert err.startswith("serinus")
    assert "Traceback" not in err


def test_a_wrong_variable_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SERINUS_PAGE_SIZE", "many")
    assert main(["serve", "m"]) == 2
    assert "SERINUS_PAGE_SIZE is 'many', expected an integer" in capsys.readouterr().err


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == (
        f"serinus {version('serinus')} (torch {version('torch')}, python {platform.python_version()})"
    )
