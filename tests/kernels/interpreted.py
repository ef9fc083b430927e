"""Triton's interpreter without what it does in vain: half of the time that kernels take in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

from triton.runtime import interpreter

__all__ = ["speed_up"]


def speed_up() -> None:
    """Once, in a process that interprets.

    Its functions take the place of the language's once, not at each call of a part of a kernel. Whether sums and
    products of integers overflow is not computed: without `debug` nothing looks at the answer.
    """
    patch, patched = interpreter._patch_lang, set[int]()

    def patch_once(part: Callable[..., object]) -> SimpleNamespace:
        if id(part.__globals__) not in patched:
            patch(part)
            patched.add(id(part.__globals__))
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = patch_once
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
