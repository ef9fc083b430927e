"""`serinus batch`: the requests of a file, answered into a file, by an engine of its own or by a running server.

A run that was ended goes on where it was. Knows the command line; batch_run.py asks, batch_file.py reads and writes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from serinus.cli.batch_file import done_before, line_count
from serinus.cli.parser import Command, Parser, UsageProblem, add_settings, make_parser, read_config
from serinus.cli.shape import check_shape
from serinus.core.config import ServeConfig
from serinus.core.log import setup_logging
from serinus.models import check_path


def _parser(command: Command) -> Parser:
    parser = make_parser(command)
    files = parser.add_argument_group("Which requests")
    files.add_argument("-i", "--input-file", metavar="FILE", help="requests, a line of JSON each")
    files.add_argument("-o", "--output-file", metavar="FILE", help="answers; what it has already is not asked again")
    files.add_argument("--url", default="", metavar="URL", help="ask this server (its key: --api-key), start no engine")
    files.add_argument("--max-concurrency", type=int, default=128, metavar="N", help="under way at once (default: 128)")
    files.add_argument("--disable-tqdm", action="store_true", help="no progress bar")
    add_settings(parser, ServeConfig, positional_model=True)
    return parser


def run(command: Command, words: Sequence[str]) -> int:
    """Answer a file. Exit code 0, or 1 where a line is bad, an answer is an error or the server was lost.

    Raises UsageProblem, ConfigError.
    """
    config, arguments = read_config(ServeConfig, _parser(command), words)
    if not arguments.input_file or not arguments.output_file:
        raise UsageProblem("a file is missing, expected both: -i requests.jsonl -o answers.jsonl")
    if Path(arguments.input_file).resolve() == Path(arguments.output_file).resolve():
        raise UsageProblem(f"-i and -o are both {arguments.input_file}, expected two files")
    if bool(config.model.model_path) == bool(arguments.url):
        raise UsageProblem("expected either a model, serinus batch MODEL, or a running server, --url http://host:port")
    if arguments.max_concurrency < 1:
        raise UsageProblem(f"--max-concurrency is {arguments.max_concurrency}, expected at least 1")
    total = line_count(arguments.input_file)  # says that there is no such file before an engine is loaded
    answered, bad = done_before(arguments.output_file)
    if not arguments.url:
        check_path(config.model.model_path)
        check_shape(config)
    setup_logging(config.server.log_level, "batch", config.server.log_format)
    from serinus.cli.batch_run import answer_all

    return asyncio.run(answer_all(config, arguments, total, answered, bad))
