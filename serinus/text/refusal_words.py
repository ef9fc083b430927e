"""Why the grammar library refuses a grammar, in words for the client that wrote it: what is wrong, where, what was
expected. Knows no library but the form of its messages; one of another form is told as it is, in one line."""

from __future__ import annotations

import re
from typing import Final

_PLACE: Final = re.compile(r"(?:at )?(\d+)\((\d+)\): ")
_LISTING: Final = re.compile(r"\n(?=[ \d]{4} \| ) *\d+ \| .*", re.DOTALL)
"""The lines of the grammar that the library shows below its message, numbered in four characters."""
_REGEX: Final = re.compile(r".*regex parse error:\n {4}(.*)\n {4}( *)(\^+)\nerror: (.*)", re.DOTALL)
"""The expression, in the line below it the characters that are meant, and what is wrong with them."""
_EBNF: Final = re.compile(r"(.*?):? at line (\d+), .* \^ (['\"])(.*)\3", re.DOTALL)
"""What is wrong, the line, and what is left of the rules from there on."""
_PLAIN: Final[tuple[tuple[re.Pattern[str], str], ...]] = tuple(
    (re.compile(form, re.DOTALL), words)
    for form, words in (
        (r".*lookarounds not supported.*", r"look-around and word boundaries (\\b) are not supported"),
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
        (r"Unsatisfiable schema: (.*)", r"no value can satisfy it: \1"),
    )
)  # fmt: skip
_CHARS: Final = 40


def refusal_words(said: str, *, own_rules: bool = False) -> str:
    """What the library said of a grammar, in plain words and one line. `own_rules`: its rules are those that the client
    wrote, so their lines are of use; else they were made of something else."""
    place = _PLACE.match(said)
    text = _LISTING.sub("", said[place.end() :] if place else said).strip()
    where = f"line {place[1]}: " if place and own_rules else ""
    if found := _REGEX.fullmatch(text):
        at, length = len(found[2]), len(found[3])
        piece = found[1][at:][: length if length > 1 else _CHARS]
        return f"{where}{_plain(found[4])} (character {at + 1} of the expression, {piece!r})"
    if found := _EBNF.fullmatch(text):
        left = f"at {found[4][:_CHARS]!r}" if found[4] else "where the rules end"
        return f"line {found[2]}: {_plain(found[1])} {left}"
    return where + _plain(text)


def _plain(text: str) -> str:
    line = " ".join(text.split()).removeprefix("failed to compile JSON schema: ")
    return next((form.sub(words, line) for form, words in _PLAIN if form.fullmatch(line)), line)
