"""Makes ranks of real engines do what they never should: run some code in the middle of a forward pass."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

__all__ = ["plant"]

_EVERYWHERE = """
import importlib.util, os, sys
from pathlib import Path


class Finder:
    def find_spec(self, name, path=None, target=None):
        if name != "serinus.runner.runner":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (load(module), change(module))
        return spec


def change(module):
    from serinus.models import NullHook, compose_hooks

    class Planted(NullHook):
        def can_replay(self, room):
            return False  # it acts between layers

        def __init__(self, rank):
            self.sign = Path(os.environ["PLANTED_SIGNS"], str(rank))

        def before_layer(self, layer_index):
            if self.sign.exists():
                code = self.sign.read_text()
                self.sign.unlink()
                exec(code)

    begin = module.Runner.__init__

    def init(runner, *args, **more):
        begin(runner, *args, **more)
        runner._hook = compose_hooks([runner._hook, Planted(runner._comm.rank)])

    module.Runner.__init__ = init


sys.meta_path.insert(0, Finder())
"""


def plant(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change all processes that are started from now on. Returns a folder: a rank that finds a file there with its
    number as name removes it, and runs the Python code in it, in its next step."""
    (folder / "sitecustomize.py").write_text(_EVERYWHERE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *os.environ.get("PYTHONPATH", "").split(":")]))
    monkeypatch.setenv("PLANTED_SIGNS", str(folder))
    return folder
