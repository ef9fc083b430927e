"""Settings: checked at birth, layered, carried to a child as they are, refused in words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from serinus.core.config import (
    RouterConfig,
    ServeConfig,
    UpConfig,
    build_tree,
    from_names,
    groups_of,
    read_environment,
    read_file,
)
from serinus.core.errors import ConfigError
from serinus.core.setting import settings_of
from serinus.core.settings import MemorySettings, ModelSettings, PdSettings, ServerSettings


@pytest.mark.parametrize("tree", [ServeConfig, UpConfig, RouterConfig])
def test_a_tree_comes_back_from_json_as_it_was(tree: type) -> None:
    assert tree.from_json(tree().to_json()) == tree()


def test_every_value_survives_json() -> None:
    config = from_names(
        ServeConfig,
        {
            "model_path": "modèle",
            "context_length": 77,
            "mem_fraction_static": 0.5,
            "disable_radix_cache": True,
            "mode": "decode",
            "prefill_addresses": ("tcp://a:1", "tcp://b:2"),
            "revision": "main",
        },
    )
    again = ServeConfig.from_json(config.to_json())
    assert again == config
    assert again.pd.prefill_addresses == ("tcp://a:1", "tcp://b:2")
    assert again.model.context_length == 77


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "no JSON"),
        ("[]", "JSON list"),
        ('{"modle": {}}', "unknown group 'modle'"),
        ('{"model": {"model_pth": "x"}}', "unknown setting model.model_pth"),
        ('{"memory": {"page_size": "16"}}', "--page-size is '16', expected an integer"),
        ('{"memory": {"page_size": true}}', "--page-size is True, expected an integer"),
    ],
)
def test_json_that_is_no_tree_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match="config: ") as raised:
        ServeConfig.from_json(text)
    assert complaint in str(raised.value)


@pytest.mark.parametrize(
    ("group", "values", "complaint"),
    [
        (ServerSettings, {"port": 65536}, "--port is 65536, expected at most 65535"),
        (ServerSettings, {"port": -1}, "--port is -1, expected at least 0"),
        (ServerSettings, {"port": "80"}, "--port is '80', expected an integer"),
        (ServerSettings, {"drain_s_max": float("nan")}, "--drain-timeout is nan"),
        (MemorySettings, {"mem_fraction_static": 1.5}, "expected at most 0.98"),
        (MemorySettings, {"page_size": 0}, "--page-size is 0, expected at least 1"),
        (ModelSettings, {"dtype": "float8"}, "expected one of auto, bfloat16, float16, float32"),
        (ModelSettings, {"context_length": 1.5}, "--context-length is 1.5, expected an integer"),
        (PdSettings, {"mode": "both"}, "--disaggregation-mode is 'both'"),
        (PdSettings, {"keepalive_s": 5.0, "peer_s_max": 5.0}, "expected more than"),
        (PdSettings, {"prefill_addresses": ("tcp://a:1",) * 65}, "-addresses are 65, expected at most 64"),
    ],
)
def test_a_wrong_value_is_refused_with_flag_value_and_expectation(
    group: type, values: dict[str, object], complaint: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        group(**values)
    assert complaint in str(raised.value)


def test_flags_win_over_variables_and_variables_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("page-size: 8\nmax_total_tokens: 800\nport: 1008\n")
    env = {"SERINUS_PAGE_SIZE": "4", "SERINUS_MAX_TOTAL_TOKENS": "400"}
    flags = {"memory": {"page_size": 2}}
    config = build_tree(ServeConfig, flags, read_environment(ServeConfig, env), read_file(ServeConfig, str(file)))
    assert (config.memory.page_size, config.memory.max_total_tokens, config.server.port) == (2, 400, 1008)


def test_variables_are_read_by_the_type_of_their_setting() -> None:
    env = {
        "SERINUS_DISABLE_RADIX_CACHE": "yes",
        "SERINUS_CONTEXT_LENGTH": "none",
        "SERINUS_DISAGGREGATION_MODE": "decode",
        "SERINUS_DISAGGREGATION_PREFILL_ADDRESSES": "tcp://a:1, tcp://b:2",
        "SERINUS_MEM_FRACTION_STATIC": "0.25",
        "SERINUS_SOMETHING_ELSE": "1",
    }
    config = build_tree(ServeConfig, read_environment(ServeConfig, env))
    assert config.sched.disable_radix_cache is True
    assert config.model.context_length is None
    assert config.pd.prefill_addresses == ("tcp://a:1", "tcp://b:2")
    assert config.memory.mem_fraction_static == 0.25


@pytest.mark.parametrize(("name", "value"), [("SERINUS_PORT", "http"), ("SERINUS_DISABLE_RADIX_CACHE", "perhaps")])
def test_a_wrong_variable_is_refused_by_its_name(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is '{value}'"):
        read_environment(ServeConfig, {name: value})


def test_a_toml_file_may_use_names_of_vllm(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('max-model-len = 128\nblock_size = 32\nmodel = "m"\nenable-prefix-caching = true\n')
    with pytest.raises(ConfigError, match="enable-prefix-caching"):
        read_file(ServeConfig, str(file))
    file.write_text('max-model-len = 128\nblock_size = 32\nmodel = "m"\n')
    config = build_tree(ServeConfig, read_file(ServeConfig, str(file)))
    assert (config.model.context_length, config.memory.page_size, config.model.model_path) == (128, 32, "m")


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("a.yaml", "- 1\n", "holds a list"),
        ("a.yaml", "page-size: [", "no YAML"),
        ("a.toml", "page-size = = 1", "no TOML"),
        ("a.yaml", "pge-size: 1\n", "sets 'pge-size'"),
        ("a.yaml", "page-size: big\n", "--page-size is 'big'"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, name: str, text: str, complaint: str) -> None:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(ConfigError) as raised:
        build_tree(ServeConfig, read_file(ServeConfig, str(file)))
    assert complaint in str(raised.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read --config"):
        read_file(ServeConfig, str(tmp_path / "none.yaml"))


def test_python_names_reach_their_groups_and_near_misses_are_said() -> None:
    config = from_names(ServeConfig, {"model": "m", "max_model_len": 64, "disaggregation_mode": "decode"})
    assert (config.model.model_path, config.model.context_length, config.role) == ("m", 64, "decode")
    with pytest.raises(ConfigError, match="unknown setting 'page_sise', expected perhaps 'page_size'"):
        from_names(ServeConfig, {"page_sise": 4})


def test_a_setting_that_is_json_may_be_a_table(tmp_path: Path) -> None:
    """In a program, as vLLM takes hf_overrides, and in a file."""
    table = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
    config = from_names(ServeConfig, {"model": "m", "hf_overrides": table})
    assert json.loads(config.model.json_model_override_args) == table
    with pytest.raises(ConfigError, match=r"--json-model-override-args is .*not JSON serializable\), expected what"):
        from_names(ServeConfig, {"model": "m", "hf_overrides": {"ids": {1}}})
    file = tmp_path / "dates.yaml"
    file.write_text("hf-overrides: {since: 2026-11-30}\n")
    with pytest.raises(ConfigError, match="expected what JSON has"):
        read_file(ServeConfig, str(file))


def test_an_engine_of_up_has_its_own_port_name_and_threads_and_shares_the_rest() -> None:
    up = from_names(UpConfig, {"model": "m", "prefill": 1, "decode": 2, "mem_fraction_static": 0.6, "api_key": "k"})
    engine = up.engine(role="prefill", name="prefill-0", port=1234, threads=1)
    assert (engine.role, engine.engine_name, engine.server.port, engine.server.host) == (
        "prefill",
        "prefill-0",
        1234,
        "127.0.0.1",
    )
    assert engine.memory.mem_fraction_static == pytest.approx(0.2)
    assert (engine.kernels.threads, engine.server.api_key, engine.model.model_path) == (1, "k", "m")
    assert up.engine(role="unified", name="unified-0", port=1, threads=1).pd.mode == "null"


@pytest.mark.parametrize(
    ("name", "value", "role"),
    [
        ("prefill_addresses", ("tcp://a:1",), "decode"),
        ("on_failure", "error", "decode"),
        ("min_remote_tokens", 8, "null or prefill or decode"),
        ("local_gain", 1.5, "null or prefill or decode"),
        ("optimistic_prefill", True, "null or prefill or decode"),
        ("bootstrap_port", 9, "prefill"),
        ("park_tokens", 9, "null or prefill or decode"),
        ("transfer_backend", "tcp", "prefill or decode"),
        ("bootstrap_host", "::1", "prefill or decode"),
        ("handoff_s_max", 9.0, "prefill or decode"),
        ("keepalive_s", 0.5, "prefill or decode"),
        ("peer_s_max", 9.0, "prefill or decode"),
        ("cluster_secret", "s", "null or prefill or decode"),
    ],
)
def test_what_only_one_role_looks_at_is_refused_by_engines_of_the_others(name: str, value: object, role: str) -> None:
    for mode in ("null", "prefill", "decode"):
        given = {"mode": mode, name: value}
        if mode in role.split(" or "):
            assert getattr(from_names(ServeConfig, given).pd, name) == value
            continue
        with pytest.raises(
            ConfigError, match=f"with --disaggregation-mode {mode}, expected --disaggregation-mode {role}"
        ):
            from_names(ServeConfig, given)


def test_up_tells_decode_engines_alone_what_they_do_where_a_handoff_fails() -> None:
    up = from_names(UpConfig, {"model": "m", "on_failure": "error"})
    engines = {role: up.engine(role=role, name=role, port=1, threads=1) for role in ("prefill", "decode", "unified")}
    assert {role: engine.pd.on_failure for role, engine in engines.items()} == {
        "prefill": "recompute", "decode": "error", "unified": "recompute",
    }  # fmt: skip


def test_up_does_not_ask_for_what_it_decides_itself() -> None:
    assert read_environment(UpConfig, {"SERINUS_DISAGGREGATION_MODE": "prefill"}) == {}
    with pytest.raises(ConfigError, match="unknown setting 'disaggregation_mode'"):
        from_names(UpConfig, {"disaggregation_mode": "prefill"})


def test_the_router_has_its_own_default_port() -> None:
    assert (ServeConfig().server.port, UpConfig().server.port, RouterConfig().server.port) == (30000, 8000, 8000)


def test_the_name_of_an_engine_comes_from_its_role() -> None:
    assert ServeConfig().engine_name == "unified-0"
    assert from_names(ServeConfig, {"mode": "decode"}).engine_name == "decode-0"
    assert from_names(ServeConfig, {"engine_name": "left"}).engine_name == "left"


@pytest.mark.parametrize("tree", [ServeConfig, UpConfig, RouterConfig])
def test_every_default_is_a_legal_value(tree: type) -> None:
    for _, group in groups_of(tree):
        assert group() == group(**{setting.name: setting.default for setting in settings_of(group)})


@pytest.mark.parametrize("page_size", [0, 3, 24, 256])
def test_a_page_size_is_a_power_of_two_up_to_128(page_size: int) -> None:
    with pytest.raises(ConfigError, match="page-size"):
        MemorySettings(page_size=page_size)


def test_a_router_is_asked_for_no_watchdog_of_steps() -> None:
    """A variable may be there for the engines beside it."""
    assert read_environment(RouterConfig, {"SERINUS_WATCHDOG_TIMEOUT": "9"}) == {}
    with pytest.raises(ConfigError, match="unknown setting 'watchdog_timeout'"):
        from_names(RouterConfig, {"watchdog_timeout": 9.0})
