"""The official JSON-Schema-Test-Suite (json_schema_suite/, MIT; the tests of two drafts without those it calls
optional): a schema is refused by the keyword that cannot be enforced, or its grammar agrees with every instance.

An instance is tried in each order of its properties (a grammar has one) and in each way to write its numbers.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from itertools import islice, permutations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serinus.core.errors import BadRequest
from serinus.core.grammar import Grammar
from serinus.text import GrammarCompiler, GrammarFailed, GrammarVocabulary, Tokenizer

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "STRUCTURED.md"
DRAFTS = ("draft2020-12", "draft7")
BY_DESIGN = {
    ("draft7", "ref", "ref overrides any sibling keywords"): "what stands beside $ref counts, as in later drafts",
    ("draft7", "ref", "$ref prevents a sibling $id from changing the base uri"): "the same",
}
"""Groups in which a grammar and the suite disagree, and why; and all of `format`: formats are enforced."""
WRITINGS_MAX = 2000


def suite(draft: str) -> Iterator[tuple[str, str, Any, list[tuple[Any, bool, str]]]]:
    """File, description, schema, and instances with whether each is valid and what is said of it."""
    for line in (HERE / "json_schema_suite" / f"{draft}.jsonl").read_text(encoding="utf-8").splitlines():
        yield json.loads(line)


def writings(value: Any) -> Iterator[Any]:
    """The same instance, written otherwise."""
    if isinstance(value, float) and value.is_integer():
        yield int(value)
    if isinstance(value, list):
        yield from map(list, product(*(list(writings(each)) for each in value)))
    elif isinstance(value, dict):
        for keys in permutations(value):
            yield from (dict(zip(keys, each, strict=True)) for each in product(*(writings(value[k]) for k in keys)))
    else:
        yield value


def accepts(vocabulary: GrammarVocabulary, tokenizer: Tokenizer, grammar: Grammar, instance: Any) -> bool:
    """Whether some writing of it is a complete answer."""
    for written in islice(writings(instance), WRITINGS_MAX):
        state = vocabulary.begin(grammar)
        text = json.dumps(written, ensure_ascii=False, separators=(",", ":"))
        try:
            state.follow(tokenizer.encode(text, add_special_tokens=False))
        except GrammarFailed:
            continue
        if vocabulary.allow([state], np.zeros((1, (vocabulary.width + 31) // 32), np.int32)) == [True]:
            return True
    return False


def refusal(compiler: GrammarCompiler, schema: Any) -> BadRequest | None:
    """Why a schema is refused; None = it is not."""
    try:
        compiler.compile(Grammar.of("json_schema", schema))
    except BadRequest as error:
        return error
    return None


def compiled(vocabulary: GrammarVocabulary, schema: Any) -> Grammar | str:
    """The grammar of a schema; or the place of what it is refused for."""
    error = refusal(vocabulary, schema)
    return Grammar.of("json_schema", schema) if error is None else str(error.value)


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Tokenizer) -> GrammarVocabulary:
    return GrammarVocabulary(tokenizer, width=tokenizer.vocab_size)


@pytest.mark.slow
@pytest.mark.parametrize("draft", DRAFTS)
def test_a_grammar_agrees_with_every_instance_of_the_suite(
    draft: str, vocabulary: GrammarVocabulary, tokenizer: Tokenizer
) -> None:
    wrong, tried = [], 0
    for file, about, schema, instances in suite(draft):
        grammar = compiled(vocabulary, schema)
        if isinstance(grammar, str) or file == "format" or (draft, file, about) in BY_DESIGN:
            continue
        for instance, valid, said in instances:
            tried += 1
            if accepts(vocabulary, tokenizer, grammar, instance) != valid:
                wrong.append((file, about, said, schema, instance))
    assert not wrong
    assert tried > 450


@pytest.mark.slow
def test_formats_are_enforced_where_the_suite_has_them_as_notes(
    vocabulary: GrammarVocabulary, tokenizer: Tokenizer
) -> None:
    enforced = 0
    for file, about, schema, instances in suite("draft2020-12"):
        grammar = compiled(vocabulary, schema) if file == "format" else ""
        if isinstance(grammar, str):
            continue
        enforced += 1
        texts = [instance for instance, _, _ in instances if isinstance(instance, str)]
        assert texts, about
        assert not any(accepts(vocabulary, tokenizer, grammar, text) for text in texts), about
    assert enforced == 10


@pytest.mark.parametrize("draft", DRAFTS)
def test_a_front_refuses_what_an_engine_would_with_the_same_words(
    draft: str, vocabulary: GrammarVocabulary, tokenizer: Tokenizer
) -> None:
    compiler, refused = GrammarCompiler(tokenizer, width=tokenizer.vocab_size), 0
    for _, about, schema, _ in suite(draft):
        expected, found = refusal(vocabulary, schema), refusal(compiler, schema)
        assert str(found) == str(expected), about
        refused += expected is not None
    assert refused > 90


@pytest.mark.parametrize("draft", DRAFTS)
def test_what_is_refused_is_named_and_the_page_lists_it(draft: str, vocabulary: GrammarVocabulary) -> None:
    refused: Counter[str] = Counter()
    count = 0
    for _, about, schema, _ in suite(draft):
        count += 1
        grammar = compiled(vocabulary, schema)
        if isinstance(grammar, str):
            if schema is not False:
                assert grammar.startswith("#/"), (about, schema, grammar)
            refused["`false`" if schema is False else f"`{grammar.rpartition('/')[2]}`"] += 1
    told = ", ".join(f"{name} {times}" for name, times in sorted(refused.items(), key=lambda each: (-each[1], each[0])))
    row = f"| {draft} | {count} | {count - refused.total()} | {told} |"
    assert row in PAGE.read_text(encoding="utf-8").splitlines(), f"docs/STRUCTURED.md lacks this row:\n{row}"
