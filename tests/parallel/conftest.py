"""Hypothesis settings of this room: a busy machine is no failure."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("serinus", deadline=None, print_blob=True)
settings.load_profile("serinus")
