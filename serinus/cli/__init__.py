"""cli: the `serinus` command. Reads flags, starts processes, shows people what happens.

The only room that prints. Every subcommand loads what it needs when it runs, so that `--help` answers at once.
"""

from serinus.cli.http_doc import http_markdown
from serinus.cli.main import main
from serinus.cli.metrics_doc import metrics_markdown
from serinus.cli.parser import Command, UsageProblem, read_config
from serinus.cli.settings_doc import settings_markdown

__all__ = ["Command", "UsageProblem", "http_markdown", "main", "metrics_markdown", "read_config", "settings_markdown"]
