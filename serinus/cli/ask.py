"""Commands that ask a running server one question: their arguments, the question, and what is refused."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from serinus.cli.parser import Command, Parser, UsageProblem, make_parser
from serinus.core.config import environment
from serinus.core.errors import ConfigError

_URL = "http://127.0.0.1:30000"
_ASK_S_MAX = 30.0


def asking_parser(command: Command, *, path: str, limit: int, of: str) -> Parser:
    """The flags of a command that shows what `GET path` says: `url`, `limit`, `api_key` and `json`.

    Args:
        limit: the default of --limit.
        of: what the limit counts, for the help.
    """
    parser = make_parser(command, settings=False)
    parser.add_argument("url", nargs="?", default=_URL, metavar="URL", help=f"engine or router; default: {_URL}")
    parser.add_argument("--limit", type=int, default=limit, metavar="N", help=f"{of} at most; default: {limit}")
    parser.add_argument("--api-key", default="", help="admin key; default: SERINUS_ADMIN_API_KEY")
    parser.add_argument("--json", action="store_true", help=f"print the JSON of GET {path} instead")
    return parser


def read_asked(parser: Parser, words: Sequence[str]) -> argparse.Namespace:
    """The values of the flags; a URL without a scheme is one of http. Raises UsageProblem: an unknown flag, or a limit
    below 1."""
    arguments = parser.arguments(words)
    if arguments.limit < 1:
        raise UsageProblem(f"--limit is {arguments.limit}, expected at least 1")
    arguments.url = ("" if "://" in arguments.url else "http://") + arguments.url.rstrip("/")
    return arguments


def ask_server(
    arguments: argparse.Namespace, path: str, *, mark: str, params: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """The JSON object that `GET path` of a server answers.

    Args:
        mark: a key that the answer of an engine has; that of a router has `engines`.
    Raises:
        ConfigError: the server does not answer, refuses, or is no Serinus server.
    """
    import httpx

    from serinus.front import client_tls

    name = path.lstrip("/")
    variables = environment()
    key = arguments.api_key or variables.get("SERINUS_ADMIN_API_KEY", "") or variables.get("SERINUS_API_KEY", "")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    where = f"{arguments.url}{path}"
    try:
        answer = httpx.get(where, params=params, headers=headers, timeout=_ASK_S_MAX, verify=client_tls())
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ConfigError(
            f"{name}: {arguments.url} does not answer ({error}), expected a running engine or router"
        ) from error
    if answer.status_code != 200:
        hint = "; give the admin key with --api-key" if answer.status_code == 401 else ""
        raise ConfigError(f"{name}: {where} answered {answer.status_code}: {answer.text[:300]}{hint}")
    try:
        view = answer.json()
    except ValueError:
        view = None
    if not isinstance(view, dict) or not ("engines" in view or mark in view):
        raise ConfigError(f"{name}: {where} answered something else, expected a Serinus engine or router")
    return view
