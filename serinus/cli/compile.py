"""`serinus compile MODEL`: kernels for a model's shapes made ahead, so that no start and no request waits for them."""

from __future__ import annotations

from collections.abc import Sequence

from serinus.cli.parser import Command, add_settings, make_parser, need_model, read_config
from serinus.core.clock import WallClock
from serinus.core.config import ServeConfig
from serinus.core.log import setup_logging


def run(command: Command, words: Sequence[str]) -> int:
    """Compile. Exit code 1 where a part of it failed. Raises UsageProblem: there is no model;
    ConfigError: model, machine or settings are wrong."""
    parser = make_parser(command)
    add_settings(parser, ServeConfig, positional_model=True)
    config, _ = read_config(ServeConfig, parser, words)
    need_model(command, config.model.model_path)
    setup_logging(config.server.log_level, "", config.server.log_format)
    from serinus.engine.compile_ahead import Compilers, few_layers
    from serinus.engine.compile_process import compile_share
    from serinus.engine.progress import counted
    from serinus.ranks.build import choose_device

    clock = WallClock()
    if choose_device(config.model.device) == "cpu":
        began = clock.now()
        with counted("compiling kernels", 1) as advance:
            compile_share(few_layers(config), (), clock, advance)
        print(f"kernels for {config.model.model_path} are compiled, in {clock.now() - began:.1f} s")
        return 0
    with Compilers(config, clock) as ahead:
        return 0 if ahead.wait(counted) else 1
