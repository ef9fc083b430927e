"""The `console` blocks of Markdown pages as data, and how those of one page are run, in order, on a small model."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from serinus.core.clock import WallClock
from serinus.core.free_ports import free_ports

__all__ = ["MODEL", "REPO", "Block", "blocks", "markdown", "run_page"]

REPO = Path(__file__).parents[2]
MODEL = REPO / "serinus" / "cli" / "demo" / "model"
_READY_S_MAX, _RUN_S_MAX = 400.0, 900.0
_PORT = re.compile(r"\b(?:3000[0-9]|8000)\b")
_DEFAULT_PORTS = {"serve": "30000", "up": "8000", "router": "8000"}


@dataclass(frozen=True)
class Block:
    """One block of a page."""

    page: str
    commands: tuple[str, ...]
    skipped: str
    """Why it is not run: the comment above it; empty = it is."""


def markdown() -> list[Path]:
    """Every page of the repository."""
    return [*sorted(REPO.glob("*.md")), *sorted((REPO / "docs").rglob("*.md"))]


def blocks(page: Path) -> list[Block]:
    """The console blocks of a page: lines that begin with `$ `, joined where they end in a backslash."""
    found = re.findall(r"(?:<!-- not run: (.+?) -->\n)?```console\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    return [
        Block(
            page=page.relative_to(REPO).as_posix(), skipped=reason,
            commands=tuple(
                line[2:].strip() for line in text.replace("\\\n", " ").splitlines() if line.startswith("$ ")
            ),
        )
        for reason, text in found
    ]  # fmt: skip


@contextmanager
def _server(command: str, port: int, folder: Path, environment: dict[str, str]) -> Iterator[None]:
    """A server of the page, until the end of it."""
    log = folder / f"server-{port}.log"
    with log.open("ab") as out:
        process = subprocess.Popen(
            ["bash", "-c", f"exec {command}"], cwd=folder, env=environment, stdout=out, stderr=out,
            start_new_session=True,
        )  # fmt: skip
    clock = WallClock()
    end = clock.now() + _READY_S_MAX
    try:
        while not _answers(port):
            assert process.poll() is None, f"{command} ended: {log.read_text()[-2000:]}"
            assert clock.now() < end, f"{command} is not ready after {_READY_S_MAX:.0f} s: {log.read_text()[-2000:]}"
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=0.3)
        yield
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.wait(timeout=60)


def _answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def run_page(page: Path, folder: Path) -> list[tuple[str, int, str]]:
    """Run the commands of a page in `folder`: (command as the page has it, exit code, output) of each but the servers.

    MODEL is the demo's, ports are free ones, and servers run until the end of the page, or until another one takes
    their port. Raises AssertionError: a server does not come up.
    """
    (folder / "bin").mkdir()
    tool = folder / "bin" / "serinus"
    tool.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m serinus "$@"\n')
    tool.chmod(0o755)
    environment = {
        **os.environ, "PATH": f"{tool.parent}:{os.environ['PATH']}", "PYTHONPATH": str(REPO),
        "SERINUS_MAX_TOTAL_TOKENS": "8192", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    commands = [command for block in blocks(page) if not block.skipped for command in block.commands]
    names = sorted({*_DEFAULT_PORTS.values(), *_PORT.findall(" ".join(commands))})
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    results, running = [], dict[int, ExitStack]()
    try:
        for command in commands:
            text = _PORT.sub(lambda found: str(ports[found[0]]), re.sub(r"\bMODEL\b", str(MODEL), command))
            kind = re.match(r"serinus (serve|up|router)\b", text)
            if kind is None:
                done = subprocess.run(
                    ["bash", "-c", text], cwd=folder, env=environment, capture_output=True, text=True, check=False,
                    timeout=_RUN_S_MAX,
                )  # fmt: skip
                results.append((command, done.returncode, done.stdout + done.stderr))
                continue
            found = re.search(r"--port (\d+)", text)
            port = int(found[1]) if found else ports[_DEFAULT_PORTS[kind[1]]]
            if port in running:
                running.pop(port).close()
            running[port] = ExitStack()
            running[port].enter_context(
                _server(text if found else f"{text} --port {port}", port, folder, environment)
            )  # fmt: skip
    finally:
        for stack in running.values():
            stack.close()
    return results
