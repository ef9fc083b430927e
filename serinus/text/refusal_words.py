"""Why the grammar library refuses a grammar, in words for the client that wrote it: what is wrong, where, what was
expected. Knows no library but the form of its messages; one of another form is told as it is, in one line."""

from __future__ import annotations

import re
from typing import Final

_PLACE: Final = re.compile(r"(?:at )?(\d+)\((\d+)\): ")
_LISTING: Final = re.compile(r"\n(?=[ \d]{4} \| ) *\d+ \| .*", re.DOTALL)
"""The lines of the grammar that the library shows below its message, numbered in four characters."""
_PLAIN: Final[tuple[tuple[re.Pattern[str], str], ...]] = tuple(
    (re.compile(form, re.DOTALL), words)
    for form, words in (
        (r"repetition operator missing expression", "nothing stands before it that could be repeated"),
        (r"Expected token (.+?), found .*\(at \"(.*)\" \(.*\)\)", r"'\2' stands where \1 was expected"),
        (r"lexer error", "a text or an expression has no end, or a character is none that rules have"),
        (r"unknown name: \"(.*)\"", r"the rule '\1' is not defined"),
        (r"no start rule found", "the rule `start` is missing, by which the answer begins"),
        (r"Rule '(.*)' not found", r"the rule '\1' is not defined"),
        (r"Rule '(.*)' already exists", r"the rule '\1' is defined twice"),
        (r"No 'root' rule found", "the rule `root` is missing, by which the answer begins"),
        (r"Expected name", "a name or a text was expected"),
        (r"Expected integer", "a number was expected"),
        (r"Expected ((?!.* got ).*)", r"\1 was expected"),
        (r"Unexpected end of input", "a text or a set of characters has no end"),
        (r"Unimplemented keys: \[(.*)\]", r"these keywords cannot be enforced: \1"),
        (r"Invalid type: (.*)",
         r"'\1' is no type, expected string, number, integer, boolean, object, array or null"),
        (r"Unknown format: (.*)", r"the format '\1' cannot be enforced"),
        (r"(?:Pointer|Anchor) '(.*)' does not exist", r"it refers to '\1', which the schema does not have"),
        (r"NoExtensionBias.*", "no text fits it"),
        (r"Unsatisfiable schema: (.*)", r"no value can satisfy it: \1"),
    )
)  # fmt: skip
_CHARS: Final = 40
_LINE_CHARS: Final = 300
"""Of a message, which may quote the whole grammar: forms are looked for in so many."""


def refusal_words(said: str, *, own_rules: bool = False) -> str:
    """What the library said of a grammar, in plain words and one line. `own_rules`: its rules are those that the client
    wrote, so their lines are of use; else they were made of something else."""
    place = _PLACE.match(said)
    text = _LISTING.sub("", said[place.end() :] if place else said).strip()
    return (f"line {place[1]}: " if place and own_rules else "") + (_of_regex(text) or _of_ebnf(text) or _plain(text))


def _of_regex(text: str) -> str:
    """`regex parse error:`, the expression, below it `^` under what is meant, `error: ...`; empty = no such message."""
    if "lookarounds not supported" in text:
        return "look-around and word boundaries (\\b) are not supported"
    head, _, why = text.rpartition("\nerror: ")
    _, found, shown = head.partition("regex parse error:\n")
    if not found:
        return ""
    expression, _, marks = shown.partition("\n")
    at, length = len(marks) - len(marks.lstrip(" ")), marks.count("^")
    if not length or marks.strip(" ") != "^" * length:  # an expression of several lines
        return _plain(why)
    piece = expression[at:][: length if length > 1 else _CHARS]
    return f"{_plain(why)} (character {at - 3} of the expression, {piece!r})"  # both lines begin with four spaces


def _of_ebnf(text: str) -> str:
    """`... at line 1, 'what was read' ^ 'what is left'`; empty = none."""
    why, found, rest = text.partition(" at line ")
    line, _, rest = rest.partition(", ")
    if not found or not line.isdigit():
        return ""
    left = rest.rpartition(" ^ ")[2][1:-1][:_CHARS]
    return f"line {line}: {_plain(why.rstrip(':'))} {f'at {left!r}' if left else 'where the rules end'}"


def _plain(text: str) -> str:
    line = " ".join(text[: 2 * _LINE_CHARS].split()).removeprefix("failed to compile JSON schema: ")[:_LINE_CHARS]
    return next((form.sub(words, line) for form, words in _PLAIN if form.fullmatch(line)), line)
