"""What transformers calls the cache that a model is given: releases differ."""

from __future__ import annotations

import inspect
from typing import Any


def cache_argument(model: Any) -> str:
    """`cache`, or `past_key_values` before transformers 5.24."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
