"""From the dataclasses of `core/settings.py` to flags, and from flags, environment and file to a checked tree.

argparse only splits the words: every value goes through `core.config`, so that a flag, a variable and a file are
refused with the same sentence. Knows nothing of what the settings do.
"""

from __future__ import annotations

import argparse
import inspect
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, NoReturn, TypeVar

from serinus.core.config import (
    ConfigTree,
    build_tree,
    groups_of,
    parse_text,
    read_environment,
    read_file,
    roles_of,
    settings_in,
)
from serinus.core.errors import ConfigError
from serinus.core.fleet_settings import ROLES
from serinus.core.setting import KINDS, Setting

_TreeT = TypeVar("_TreeT", bound=ConfigTree)

_FOREIGN = {
    "--trust-remote-code": "Serinus never runs code that comes with a checkpoint; leave the flag out",
    "--enable-metrics": "metrics are always on; leave the flag out",
    "--enable-cache-report": "cached tokens are always reported; leave the flag out",
    "--enable-chunked-prefill": "prompts are always chunked (--chunked-prefill-size); leave the flag out",
    "--enable-mixed-chunk": "prefill chunks and decode always share a batch; leave the flag out",
    "--kv-transfer-config": "use --disaggregation-mode prefill or decode",
    "--data-parallel-size": "start several engines behind `serinus router`, or `serinus up --decode N`",
    "--dp-size": "start several engines behind `serinus router`, or `serinus up --decode N`",
    "--distributed-executor-backend": "every rank is a process of its own; leave the flag out",
    "--master-port": "it is part of the address: --dist-init-addr HOST:PORT",
}
"""Flags of other servers that people type from habit, and what to do instead."""


class UsageProblem(ConfigError):
    """The command line is wrong; printed with a hint, exit code 2."""


class Parser(argparse.ArgumentParser):
    """argparse that raises UsageProblem instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        """Called by argparse for words it cannot parse; raises UsageProblem."""
        raise UsageProblem(message)

    def arguments(self, words: Sequence[str]) -> argparse.Namespace:
        """The values of all flags. Raises UsageProblem, also for words that are left over."""
        arguments, rest = self.parse_known_args(list(words))
        if rest:
            raise _unknown_flag(self, rest[0])
        return arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One subcommand: what the help says about it, and where its work is done."""

    name: str
    """Words after `serinus`, e.g. `bench serve`."""
    summary: str
    """One line for the list of commands."""
    about: str
    """A paragraph for its own help."""
    examples: tuple[tuple[str, str], ...]
    """(command line, what it does)."""
    target: str
    """`module:function` that runs it: function(command, words) -> exit code."""


def need_model(command: Command, model_path: str) -> None:
    """Raises UsageProblem: no model is named."""
    if not model_path:
        raise UsageProblem(f"no model is named, expected a directory or a hub id: serinus {command.name} MODEL")


def epilog(examples: Sequence[tuple[str, str]], *, settings: bool = True) -> str:
    """The examples at the end of a help text, and where else settings may come from."""
    lines = ["examples:"]
    for line, meaning in examples:
        lines += [f"  # {meaning}", f"  $ {line}", ""]
    if settings:
        lines += [
            "Every flag may also be an environment variable (--page-size is SERINUS_PAGE_SIZE) or a line of a file,",
            "--config FILE (YAML or TOML, `page-size: 32`). Flags win over variables, variables over the file.",
        ]
    return "\n".join(lines).rstrip()


def make_parser(command: Command, *, settings: bool = True) -> Parser:
    """An empty parser for a command, with its description and examples."""
    return Parser(
        prog=f"serinus {command.name}",
        description=command.about,
        epilog=epilog(command.examples, settings=settings),
        formatter_class=_Formatter,
        allow_abbrev=False,
    )


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Room for long flags; no repeated metavar after each alias."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=44, width=118)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        value = self._format_args(action, self._get_default_metavar_for_optional(action))
        return f"{', '.join(action.option_strings)} {value}"

    def _format_usage(self, usage: Any, actions: Any, groups: Any, prefix: Any) -> str:
        words = [self._prog]
        named = [action for action in actions if not action.option_strings]
        words += [f"[{each.metavar}]" if each.nargs in ("?", "*") else str(each.metavar) for each in named]
        return f"usage: {' '.join([*words, '[flags]'])}\n\n"


def add_settings(parser: Parser, tree: type[ConfigTree], *, positional_model: bool = False) -> None:
    """Give a parser every setting of a tree, one group of flags per group of settings."""
    if positional_model:
        parser.add_argument("model", nargs="?", metavar="MODEL", help="directory of a checkpoint, or a hub id")
    defaults = tree()
    for name, group in groups_of(tree):
        title = inspect.cleandoc(group.__doc__ or name).splitlines()[0].rstrip(".")
        section = parser.add_argument_group(title)
        for owner, setting in settings_in(tree):
            if owner == name:
                _add_setting(section, name, setting, getattr(getattr(defaults, name), setting.name))
    _add_role_settings(parser, tree)
    section = parser.add_argument_group("Where settings come from")
    section.add_argument("--config", metavar="FILE", help="YAML or TOML file with settings by the names of their flags")


def _add_role_settings(parser: Parser, tree: type[ConfigTree]) -> None:
    """The flags for engines of one role: the pattern is explained once, instead of a line for each of them."""
    roles = roles_of(tree)
    if not roles:
        return
    names = [setting.key.removeprefix(f"{setting.role}-") for _, setting in settings_in(tree) if setting.role]
    text = (
        f"{' and '.join(f'--{role}-FLAG' for role in roles)} give engines of one role another value than --FLAG gives"
        f" all; FLAG is one of {', '.join(dict.fromkeys(names))}. They take what --FLAG takes; a switch goes"
        f" off by --no-{roles[0]}-FLAG."
    )
    section = parser.add_argument_group(
        "Engines of one role", "\n".join(textwrap.wrap(text, 112, break_on_hyphens=False))
    )
    for role, setting in settings_in(tree):
        if setting.role:
            _add_setting(section, role, setting, None)


def _add_setting(section: Any, group: str, setting: Setting, default: Any) -> None:
    dest = f"{group}.{setting.name}"
    kind, _ = KINDS[setting.kind]
    names = (setting.flag, *setting.aliases)
    shown = "" if default in (None, "", (), False) else f" (default: {default})"
    text = argparse.SUPPRESS if setting.role else (setting.help + shown).replace("%", "%%")
    if kind is bool:
        section.add_argument(*names, dest=dest, action="store_true", default=argparse.SUPPRESS, help=text)
        for inverse in setting.inverse:
            section.add_argument(
                inverse, dest=dest, action="store_false", default=argparse.SUPPRESS, help=argparse.SUPPRESS
            )
        return
    metavar = setting.metavar or ("{" + ",".join(setting.choices) + "}" if setting.choices else kind.__name__.upper())
    if kind is tuple:
        section.add_argument(
            *names, dest=dest, nargs="+", default=argparse.SUPPRESS, metavar=setting.metavar or "NAME", help=text
        )
        return
    section.add_argument(*names, dest=dest, default=argparse.SUPPRESS, metavar=metavar, help=text)


def read_config(tree: type[_TreeT], parser: Parser, words: Sequence[str]) -> tuple[_TreeT, argparse.Namespace]:
    """Split the words, add environment and file, check everything.

    Returns the tree, and what the parser had besides settings. Raises UsageProblem or ConfigError.
    """
    arguments = parser.arguments(words)
    settings = {f"{name}.{setting.name}": setting for name, setting in settings_in(tree)}
    flags: dict[str, dict[str, Any]] = {}
    for dest, value in vars(arguments).items():
        if dest in settings:
            group, name = dest.split(".")
            flags.setdefault(group, {})[name] = _value(settings[dest], value)
    model = getattr(arguments, "model", None)
    if model:
        named = flags.setdefault("model", {}).setdefault("model_path", model)
        if named != model:
            raise UsageProblem(f"two models are named, {model!r} and --model-path {named!r}, expected one")
    layers = [flags, read_environment(tree)]
    if getattr(arguments, "config", None):
        layers.append(read_file(tree, arguments.config))
    return build_tree(tree, *layers), arguments


def _value(setting: Setting, value: Any) -> Any:
    """A flag's value; a near miss among choices is said."""
    if not isinstance(value, str):
        return tuple(value) if isinstance(value, list) else value
    parsed = parse_text(setting, value, setting.flag)
    if setting.choices and parsed not in setting.choices:
        near = get_close_matches(value.lower(), setting.choices, n=1, cutoff=0.4)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise UsageProblem(f"{setting.flag} is {value!r}, expected one of {', '.join(setting.choices)}{hint}")
    return parsed


def _unknown_flag(parser: Parser, word: str) -> UsageProblem:
    """The refusal of a word that no flag and no argument is, with what was probably meant."""
    flag = word.split("=", 1)[0]
    if not flag.startswith("-"):
        return UsageProblem(f"unexpected argument {word!r}, expected flags")
    if flag in _FOREIGN:
        return UsageProblem(f"unknown flag {flag}: {_FOREIGN[flag]}")
    known = list(parser._option_string_actions)
    stem = f"--{flag.lstrip('-')}-"  # --tp or -tp for --tp-size
    near = sorted((name for name in known if name.startswith(stem)), key=len)
    base = next((f"--{flag.removeprefix(f'--{role}-')}" for role in ROLES if flag.startswith(f"--{role}-")), "")
    near = near or [base] * (base in known) or get_close_matches(flag, known, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]}?" if near else f"expected one of those that `{parser.prog} --help` lists"
    return UsageProblem(f"unknown flag {flag}: {hint}")
