"""The chats that the demo's model knows: facts with codes, and questions for one of them. Training and demo share them.

A code stands once in the context, after the thing that it opens, and has four digits of one token each: an answer that
names another code was computed on wrong KV.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from serinus.core.rng import Rng

COLORS = ("red", "blue", "green", "yellow", "black", "white", "grey", "brown", "silver", "golden")
THINGS = (
    "door",
    "box",
    "safe",
    "gate",
    "drawer",
    "bike",
    "locker",
    "cabin",
    "chest",
    "room",
    "shed",
    "garage",
    "suitcase",
    "cellar",
    "attic",
    "desk",
    "boat",
    "tent",
    "van",
    "vault",
)
FILLERS = (
    "Canaries sing when the air is clean.",
    "The printing house stands by the river.",
    "It rained all morning.",
    "A small bird lives in the window.",
    "Miners carried a canary down the shaft.",
    "The cook likes lemons.",
    "Trains leave at noon.",
    "Nobody reads the fine print.",
)
GREETINGS = (
    ("Hello!", "Hello! I am a small canary. Tell me some codes, then ask me for one."),
    ("Hi", "Hello! I am a small canary. Tell me some codes, then ask me for one."),
    ("Who are you?", "I am a small canary: I sing when a page of memory goes wrong."),
    ("Sing!", "Tweet, tweet: every page is where it belongs."),
    ("What do you do?", "I remember what you tell me, and I answer from it."),
)
_TOLD = ("The {name}: {code}.", "Code of the {name}: {code}.", "For the {name}: {code}.")
_ASKED = ("What opens the {name}?", "What is the code of the {name}?", "The code of the {name}, please.")
TURN = "<s>{role}: {text}</s>"
"""One message, as the chat template writes it."""


@dataclass(frozen=True, slots=True)
class Fact:
    """A thing and the code that opens it."""

    name: str
    """Colour and thing: 'blue box'."""
    code: str
    """Its four digits, as text."""

    @property
    def answer(self) -> str:
        """What the model says when it is asked for this one."""
        return f"The {self.name}: {self.code}."


def draw_facts(rng: Rng, count: int) -> list[Fact]:
    """Facts of `count` different things (20 at most)."""
    things = rng.sample(THINGS, min(count, len(THINGS)))
    return [Fact(f"{rng.choice(COLORS)} {thing}", f"{rng.randrange(10000):04d}") for thing in things]


def told(rng: Rng, facts: Sequence[Fact], fillers: int) -> str:
    """One text that tells all facts, between sentences about other things."""
    lines = [rng.choice(_TOLD).format(name=fact.name, code=fact.code) for fact in facts]
    lines += [rng.choice(FILLERS) for _ in range(fillers)]
    rng.shuffle(lines)
    return " ".join(lines)


def question(rng: Rng, fact: Fact) -> str:
    """What asks for a fact's code."""
    return rng.choice(_ASKED).format(name=fact.name)


def chat(rng: Rng, facts: Sequence[Fact], fillers: int, asked: Sequence[Fact]) -> list[tuple[str, str]]:
    """A chat that tells facts and asks for some, one a turn: (question, answer) each."""
    questions = [question(rng, fact) for fact in asked]
    questions[0] = f"{told(rng, facts, fillers)} {questions[0]}"
    return [(text, fact.answer) for text, fact in zip(questions, asked, strict=True)]
