"""`--prefill-FLAG` and `--decode-FLAG` of `serinus up`: which engines they reach, and what is refused beforehand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from serinus.cli import main, read_config
from serinus.cli.main import COMMANDS
from serinus.cli.parser import add_settings, make_parser
from serinus.cli.up import gpu_env, members
from serinus.core.config import ServeConfig, UpConfig, settings_in
from serinus.core.errors import ConfigError
from serinus.models.small_checkpoints import make_toy

UP = next(command for command in COMMANDS if command.name == "up")


def group(*words: str) -> list[ServeConfig]:
    """What the engines of `serinus up m WORDS` would be told, without starting any."""
    parser = make_parser(UP)
    add_settings(parser, UpConfig, positional_model=True)
    config, _ = read_config(UpConfig, parser, ["m", *words])
    assert UpConfig.from_json(config.to_json()) == config
    return [ServeConfig.from_json(member.config.to_json()) for member in members(config)]


def by_engine(words: str, value: Callable[[ServeConfig], Any]) -> dict[str, Any]:
    return {config.engine_name: value(config) for config in group(*words.split())}


def test_faults_can_be_planted_in_the_engines_of_one_role_alone() -> None:
    words = "--decode 2 --kv-canary raise --prefill-kv-canary-perturb transfer_bytes=0.1"
    assert by_engine(words, lambda c: (c.canary.kv_canary, c.canary.kv_canary_perturb)) == {
        "prefill-0": ("raise", "transfer_bytes=0.1"),
        "decode-0": ("raise", ""),
        "decode-1": ("raise", ""),
    }


@pytest.mark.parametrize(
    ("words", "prefill", "decode"),
    [
        ("--decode-kv-canary log --prefill-kv-canary raise", ("raise", "all"), ("log", "all")),
        (
            "--kv-canary log --prefill-kv-canary-real-data partial --decode-kv-canary-real-data partial",
            ("log", "partial"), ("log", "partial"),
        ),
        (
            "--kv-canary log --kv-canary-real-data partial --prefill-kv-canary none --decode-kv-canary none",
            ("none", "all"), ("none", "all"),
        ),
    ],
)  # fmt: skip
def test_each_role_may_have_its_own_canary(words: str, prefill: object, decode: object) -> None:
    """One that is switched off for a role takes over nothing of the canary of all, which would need it."""
    got = by_engine(words, lambda c: (c.canary.kv_canary, c.canary.kv_canary_real_data))
    assert got == {"prefill-0": prefill, "decode-0": decode}


def test_every_flag_of_a_role_reaches_the_engines_of_that_role_alone() -> None:
    values: dict[str, Any] = {
        "tp_size": 2, "pp_size": 2, "ep_size": 2, "kv_canary": "heal",
        "kv_canary_coverage": "full", "kv_canary_stream": "confirmed",
        "kv_canary_perturb": "real_kv_used=1", "kv_canary_perturb_target": "swa", "kv_canary_perturb_api": True,
        "device": "cpu", "page_size": 8, "max_total_tokens": 640, "mem_fraction_static": 0.5,
        "max_running_requests": 7, "chunked_prefill_size": 70,
    }  # fmt: skip
    for role in ("prefill", "decode"):
        own = [setting for name, setting in settings_in(UpConfig) if name == role]
        assert {setting.name for setting in own} >= set(values)
        given = {each: values.get(each.name, 7) for each in own if each.name != "kv_canary_real_data"}  # one for both
        words = ["--kv-canary", "log"]
        for item, value in given.items():
            words += [item.flag] if value is True else [item.flag, str(value)]
        for config in group(*words):
            for item, value in given.items():
                groups = (config.model, config.memory, config.sched, config.parallel, config.canary)
                (got,) = (getattr(each, item.name) for each in groups if hasattr(each, item.name))
                assert (got == value) == (config.role == role), f"{item.flag}: {got!r} in {config.engine_name}"


@pytest.mark.parametrize(
    ("words", "prefill", "decode"),
    [
        ("--mem-fraction-static 0.6", 0.2, 0.2),
        ("--mem-fraction-static 0.6 --prefill-device cuda", 0.6, 0.3),
        ("--mem-fraction-static 0.6 --prefill-device cuda --decode-mem-fraction-static 0.4", 0.6, 0.2),
        ("--mem-fraction-static 0.6 --prefill-gpu-memory-utilization 0.5 --decode-block-size 8", 0.5, 0.2),
    ],
)
def test_engines_of_one_device_share_a_fraction_of_its_memory(words: str, prefill: float, decode: float) -> None:
    """What was given for a role is shared among its engines."""
    got = by_engine(f"--decode 2 {words}", lambda c: c.memory.mem_fraction_static)
    assert got == {"prefill-0": pytest.approx(prefill), "decode-0": pytest.approx(decode), "decode-1": got["decode-0"]}


def test_engines_take_the_gpus_of_their_role_in_turn_and_see_those_of_the_others_behind_them() -> None:
    def found(words: str) -> dict[str, tuple[tuple[int, ...], float | None]]:
        parser = make_parser(UP)
        add_settings(parser, UpConfig, positional_model=True)
        config, _ = read_config(UpConfig, parser, ["m", "--mem-fraction-static", "0.8", *words.split()])
        shares = (ServeConfig.from_json(each.config.to_json()).memory.mem_fraction_static for each in members(config))
        return {each.name: (each.gpus, share) for each, share in zip(members(config), shares, strict=True)}

    assert {gpus for gpus, _ in found("--decode 2").values()} == {()}
    assert found("--decode 2 --prefill-gpus 0 --decode-gpus 1,2") == {
        "prefill-0": ((0, 1, 2), 0.8), "decode-0": ((1, 0, 2), 0.8), "decode-1": ((2, 0, 1), 0.8),
    }  # fmt: skip
    assert found("--prefill-tp-size 2 --prefill-gpus 0,1 --decode-gpus 1") == {
        "prefill-0": ((0, 1), 0.4), "decode-0": ((1, 0), 0.4),
    }  # fmt: skip
    with pytest.raises(ConfigError, match="--decode-gpus names 1 GPUs, expected one for each of 2 ranks"):
        found("--decode-tp-size 2 --decode-gpus 1")
    with pytest.raises(ConfigError, match="--prefill-gpus is '0,0', expected different numbers"):
        found("--prefill-gpus 0,0")
    with pytest.raises(ConfigError, match="--decode-gpus is '1' with --ray, expected none"):
        found("--ray --decode-gpus 1")
    with pytest.raises(ConfigError, match="--prefill-gpus is '0' with --prefill 0, expected none"):
        found("--prefill 0 --prefill-gpus 0")


def test_an_engine_whose_gpus_are_named_computes_there_or_not_at_all() -> None:
    def devices(words: str) -> dict[str, str]:
        return by_engine(words, lambda c: c.model.device)

    assert devices("--decode 1") == {"prefill-0": "auto", "decode-0": "auto"}
    assert devices("--prefill-gpus 0") == {"prefill-0": "cuda", "decode-0": "auto"}
    assert devices("--prefill-gpus 0 --decode-gpus 1") == {"prefill-0": "cuda", "decode-0": "cuda"}
    assert devices("--prefill-gpus 0 --device cpu") == {"prefill-0": "cpu", "decode-0": "cpu"}


def test_numbers_of_gpus_are_those_that_the_environment_leaves() -> None:
    assert gpu_env((1, 0), {"A": "b"}) == {"A": "b", "CUDA_VISIBLE_DEVICES": "1,0"}
    assert gpu_env((1, 0), {"CUDA_VISIBLE_DEVICES": "5,GPU-7"})["CUDA_VISIBLE_DEVICES"] == "GPU-7,5"
    assert gpu_env((), {"CUDA_VISIBLE_DEVICES": "5"}) == {"CUDA_VISIBLE_DEVICES": "5"}
    with pytest.raises(ConfigError, match="GPU 1 of CUDA_VISIBLE_DEVICES=5 is named, expected below 1"):
        gpu_env((1,), {"CUDA_VISIBLE_DEVICES": "5"})


def test_engines_that_do_both_have_their_own_device_too() -> None:
    words = "--prefill 0 --decode 2 --decode-device cpu --mem-fraction-static 0.6"
    got = by_engine(words, lambda c: (c.model.device, c.memory.mem_fraction_static))
    assert got == {"unified-0": ("cpu", pytest.approx(0.3)), "unified-1": ("cpu", pytest.approx(0.3))}


def test_names_of_vllm_switches_and_their_opposites_have_roles_too() -> None:
    assert by_engine("--decode-tensor-parallel-size 2", lambda c: c.parallel.tp_size) == {"prefill-0": 1, "decode-0": 2}
    words = "--kv-canary log --kv-canary-perturb-api --no-decode-kv-canary-perturb-api"
    assert by_engine(words, lambda c: c.canary.kv_canary_perturb_api) == {"prefill-0": True, "decode-0": False}
    words = "--kv-canary log --kv-canary-perturb real_kv_used=1 --kv-canary-perturb-rank 1"
    words += " --prefill-kv-canary-perturb-rank none"
    assert by_engine(words, lambda c: c.canary.kv_canary_perturb_rank) == {"prefill-0": None, "decode-0": 1}


def test_variables_and_files_say_it_too_and_flags_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "up.yaml"
    file.write_text("kv-canary: log\nprefill-kv-canary-perturb-seed: 1\ndecode_pp_size: 3\ndecode-tp-size: 3\n")
    monkeypatch.setenv("SERINUS_PREFILL_KV_CANARY", "none")
    monkeypatch.setenv("SERINUS_DECODE_TP_SIZE", "2")
    config = {c.role: c for c in group("--config", str(file), "--prefill-kv-canary", "raise")}
    assert (config["prefill"].canary.kv_canary, config["decode"].canary.kv_canary) == ("raise", "log")
    assert (config["prefill"].canary.kv_canary_perturb_seed, config["decode"].canary.kv_canary_perturb_seed) == (1, 0)
    assert (config["prefill"].parallel.size, config["decode"].parallel.size) == (1, 6)


def test_without_prefill_engines_the_flags_of_decode_hold_for_those_that_do_both() -> None:
    words = "--prefill 0 --decode 2 --decode-kv-canary log"
    assert by_engine(words, lambda c: c.canary.kv_canary) == {"unified-0": "log", "unified-1": "log"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--prefill-kv-canary rise", "--prefill-kv-canary is 'rise', expected one of none, log, raise, heal (did you"),
        ("--decode-pp-size 0", "--decode-pp-size is 0, expected at least 1"),
        ("--decode-kv-canary-perturb-seed x", "--decode-kv-canary-perturb-seed is 'x', expected an integer"),
        ("--prefill 0 --prefill-kv-canary log", "--prefill-kv-canary is 'log' with --prefill 0, expected prefill eng"),
        ("--kv-canary none --decode-kv-canary-real-data partial", "with --kv-canary none, expected --kv-canary log, r"),
        ("--kv-canary raise --kv-canary-stream confirmed", "'confirmed' with --kv-canary raise, expected --kv-can"),
        ("--kv-canary heal --prefill-kv-canary log --kv-canary-heals-max 5", "with --kv-canary log, expected --kv-"),
        ("--prefill-kv-canary none", "--kv-canary is 'none' of prefill and 'heal' of decode engines, expected th"),
        ("--decode-kv-canary-real-data none --decode-kv-canary log", "--kv-canary-real-data is 'all' of prefill and"),
        ("--kv-canary log --decode-kv-canary-coverage half", "is 'half', expected full or rotating:N with N > 0 (of"),
        ("--prefill-tp-size 33 --pp-size 2", "is 66 ranks, expected at most 64 (of prefill engines)"),
        ("--prefill-page-size 12", "--page-size is 12, expected a power of two from 1 to 128 (of prefill engines)"),
        ("--decode-device gpu", "--decode-device is 'gpu', expected one of auto, cpu, cuda"),
        ("--prefill-context-length 8", "unknown flag --prefill-context-length: did you mean --context-length?"),
        ("--prefill 0 --prefill-page-size 8", "--prefill-page-size is 8 with --prefill 0, expected prefill engines"),
        ("--prefill-kv-canry log", "did you mean --prefill-kv-canary?"),
        (
            "--kv-canary log --kv-canary-real-data all --kv-canary-perturb transfer_bytes=1",
            "`serinus up`: --prefill-kv-canary-perturb), expected it (of decode-0)",
        ),
        ("--kv-canary log --prefill-kv-canary-perturb real_kv_usd=1", "'real_kv_usd', expected one of req_to_token"),
        ("--kv-canary-real-data none --prefill-kv-canary-perturb real_kv_used=1", "--kv-canary-real-data is none"),
        (
            "--kv-canary log --kv-canary-perturb req_to_token=1 --prefill-pp-size 2 --kv-canary-perturb-rank 1",
            "--kv-canary-perturb-rank is 1, expected one of 0 (of 1 ranks from 0 on those that hold layers of part full"
            ") (of decode-0)",
        ),
    ],
)  # fmt: skip
def test_what_a_role_cannot_have_is_refused_in_words_before_any_process_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str, said: str
) -> None:
    async def spawned(*_: object, **__: object) -> None:
        pytest.fail("a process was started")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", spawned)
    toy = make_toy(tmp_path / "toy", kv_heads=2, tokenizer=False)
    assert main(["up", str(toy), "--port", "0", *words.split()]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert "Traceback" not in err


def test_the_help_names_the_pattern_once_and_every_flag_that_follows_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["up", "--help"])
    out = capsys.readouterr().out
    section = out.split("Engines of one role:")[1].split("\n\n")[0]
    assert "--prefill-FLAG and --decode-FLAG" in section
    assert len(section.splitlines()) < 9
    for name, setting in settings_in(UpConfig):
        if name == "prefill":
            assert f" {setting.key.removeprefix('prefill-')}" in section.replace("\n", " ")
