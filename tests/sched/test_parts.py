"""A third part is data: the scheduler runs any set of parts, with windows or without, by the same rules."""

from __future__ import annotations

import pytest

from serinus.cache import PartGeometry
from serinus.core.parts import Part
from serinus.testing.builders import make_request
from serinus.testing.fake_runner import fake_continue
from serinus.testing.tiny_engine import TinyEngine

SHAPES = {
    "two windows": {Part.SWA: (12, 6), Part.LATENT: (14, 11)},
    "a window and a part that covers whole sequences": {Part.SWA: (12, 6), Part.LATENT: (24, None)},
    "a part that covers whole sequences": {Part.LATENT: (24, None)},
}


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("host", [0, 65])
@pytest.mark.parametrize("name", SHAPES)
def test_answers_do_not_depend_on_the_parts_that_a_model_has(name: str, host: int, depth: int) -> None:
    beside = {part: PartGeometry(pages=count, host_pages=host, window=w) for part, (count, w) in SHAPES[name].items()}
    engine = TinyEngine(
        page_count=20, host_pages=host, beside=beside, depth=depth, chunked_prefill_size=8, growth_tokens=0
    )
    prompts = {f"r{i}": [*range(10, 26), *range(100 + 10 * i, 110 + 10 * i)] for i in range(6)}
    for rid, prompt in prompts.items():
        engine.add(rid, prompt, max_new_tokens=20)
    engine.run()
    for rid, prompt in prompts.items():
        answer = fake_continue(make_request(rid, prompt), 20, 1000, windows=engine.runner.windows)
        assert engine.answers[rid].tokens == answer, rid
    pressed, cached = engine.scheduler.stats().totals, engine.cache.stats()
    assert pressed.retracted or cached.evicted_pages or cached.window_evicted_pages, "the pools were large enough"
    engine.check_drained()
