"""Commands of the docs: each flag of each page is one that its command has; the quickstart and how-tos are run."""

from __future__ import annotations

import re
import shutil
from contextlib import suppress
from pathlib import Path

import pytest

from serinus.cli.main import COMMANDS, main

from .commands import REPO, blocks, markdown, run_page

RUN = [REPO / "docs" / "quickstart.md", *sorted((REPO / "docs" / "howto").glob("*.md"))]
SAYS = {
    "quickstart.md": ("/v1/chat/completions", "The blue box: 4711."),
    "serve.md": ("/generate", '"kv_integrity"'),
    "disaggregate.md": ("/generate", '"decode_engine":"decode-0"'),
    "tiers.md": ("serinus cache", "host full"),
    "canary.md": ("/generate", "KV integrity: verify_real_kv_hash at slot"),
    "heal.md": ("/generate", '"heals":1'),
    "ranks.md": ("serinus canary show", "of rank TP0 PP1"),
    "bench.md": ("serinus bench serve", "Successful requests:                     32"),
}
"""Page -> a command of it, and what the page says that one sees."""


def serinus_calls() -> list[tuple[str, str]]:
    """(page, command line) of every call of `serinus` in a console block of any page."""
    found = []
    for page in markdown():
        for block in blocks(page):
            for line in block.commands:
                call = re.sub(r"\s#\s.*", "", line)
                found += [(block.page, each) for each in re.findall(r"(?:^|[|(] *)(serinus [^|)]*)", call)]
    return found


def test_every_flag_in_the_docs_is_one_that_its_command_has(capsys: pytest.CaptureFixture[str]) -> None:
    known: dict[str, set[str]] = {}
    for command in COMMANDS:
        with suppress(SystemExit):
            main([*command.name.split(), "--help"])
        known[command.name] = set(re.findall(r"--[a-z][a-z0-9-]*", capsys.readouterr().out))
    wrong, seen = [], 0
    for page, call in serinus_calls():
        words = call.split()[1:]
        names = [name for name in (" ".join(words[:2]), words[0]) if name in known] if words else []
        if not names:
            wrong.append(f"{page}: {call!r} is no command")
            continue
        for flag in re.findall(r"(?<=\s)--[a-z][a-z0-9-]*", call):
            seen += 1
            plain = re.sub("^--(prefill|decode)-", "--", flag) if names[0] == "up" else flag
            if not {flag, plain} & (known[names[0]] | {"--version", "--help"}):
                wrong.append(f"{page}: `serinus {names[0]}` has no {flag}")
    assert not wrong, "\n".join(wrong)
    assert seen > 60


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.name)
def test_a_page_says_why_a_block_is_not_run(page: Path) -> None:
    all_of_them = blocks(page)
    assert any(not block.skipped for block in all_of_them), f"{page.name}: no command of it is run"
    assert all(len(block.skipped.split()) > 3 for block in all_of_them if block.skipped)
    assert page.name in SAYS


@pytest.mark.proof
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", RUN, ids=lambda page: page.name)
def test_the_commands_of_a_page_can_be_run(page: Path, tmp_path: Path) -> None:
    assert shutil.which("curl") is not None, "the pages ask by curl, which this machine lacks"
    results = run_page(page, tmp_path)
    failed = [f"{command}: exit code {code}: {output[-1500:]}" for command, code, output in results if code]
    assert not failed, "\n".join(failed)
    word, said = SAYS[page.name]
    outputs = [output for command, _, output in results if word in command]
    assert any(said in output for output in outputs), f"{page.name}: expected {said!r} of {word}: {outputs}"
    for name in ("run.svg", "story.html", "answers.jsonl"):
        if name in page.read_text(encoding="utf-8") and any(name in command for command, _, _ in results):
            assert (tmp_path / name).stat().st_size > 0
