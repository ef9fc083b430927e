"""Lets the tests of this room import their world by its full name; a busy machine is no failure."""

from __future__ import annotations

import sys
from pathlib import Path

from hypothesis import settings

ROOT = str(Path(__file__).resolve().parents[2])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

settings.register_profile("serinus", deadline=None, print_blob=True)
settings.load_profile("serinus")
