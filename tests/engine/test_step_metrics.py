"""What the gauges and counters say of the steps, however often they are scraped."""

from __future__ import annotations

from pathlib import Path

import pytest

from serinus.core.clock import ManualClock
from serinus.core.metrics import METRICS, Metrics
from serinus.engine.step_metrics import StepMetrics
from serinus.sched import Outcome
from serinus.testing.fake_mover import StoredPages
from serinus.testing.tiny_engine import TinyEngine

STEP = Outcome(decode_tokens=5)


class World:
    """A watch over steps of a tenth of a second, five tokens each: 50 tokens per second."""

    def __init__(self, every_steps: int = 0) -> None:
        self.engine = TinyEngine()
        self.clock = ManualClock()
        self.metrics = Metrics("e", "unified")
        self.watch = StepMetrics(self.metrics, self.clock.now(), every_steps=every_steps)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.clock.advance(0.1)
            self.watch.stepped(STEP, 0.1, self.engine.scheduler, self.clock.now())

    def scrape(self) -> float:
        self.watch.refresh(self.engine.scheduler, self.engine.cache, 0, self.clock.now())
        return self.metrics.get("gen_throughput")


def test_a_scrape_reads_the_throughput_and_changes_nothing() -> None:
    world = World()
    world.steps(12)
    assert [world.scrape() for _ in range(3)] == pytest.approx([50.0] * 3)
    world.steps(5)
    assert world.scrape() == pytest.approx(50.0)


def test_the_log_line_counts_from_the_last_one_however_often_it_is_scraped(caplog: pytest.LogCaptureFixture) -> None:
    world = World(every_steps=20)
    with caplog.at_level("INFO", logger="serinus"):
        world.steps(15)
        world.scrape()
        world.clock.advance(0.5)
        world.steps(5)
    (line,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("Decode batch")]
    assert "gen throughput (token/s): 40.00" in line  # 100 tokens in 2.5 s


def test_a_prefill_line_says_what_each_tier_below_the_device_saved(caplog: pytest.LogCaptureFixture) -> None:
    prompt = list(range(10, 30))
    stored: StoredPages = {}
    engine = TinyEngine(page_count=9, host_pages=33, stored=stored)
    watch = StepMetrics(Metrics("e", "unified"), engine.clock.now(), every_steps=1)

    def line(rid: str, prompt: list[int]) -> str:
        engine.add(rid, prompt, max_new_tokens=1)
        caplog.clear()
        with caplog.at_level("INFO", logger="serinus"):
            while not engine.scheduler.idle:
                outcome = engine.step()
                if outcome is not None:
                    watch.stepped(outcome, 0.1, engine.scheduler, engine.clock.now())
        engine.run()
        (said,) = [record.getMessage() for record in caplog.records]
        return said.split(", token usage")[0]

    first = "Prefill batch, #new-seq: 1, #new-token: 20, #cached-token: 0"
    assert line("cold", prompt).startswith(first)
    line("fills", [*range(40, 66)])  # pushes it to the host
    assert line("host", [*prompt, 1]).endswith("#new-token: 1, #cached-token: 20, #host-token: 20, #storage-token: 0")
    engine.run()
    engine.cache.reset()
    assert line("files", [*prompt, 2]).endswith("#new-token: 1, #cached-token: 20, #host-token: 0, #storage-token: 20")


def test_a_pause_is_not_counted_and_after_one_nothing_is_generated() -> None:
    world = World()
    world.steps(12)
    world.clock.advance(60)
    assert world.scrape() == 0.0
    world.steps(11)
    assert world.scrape() == pytest.approx(50.0)


def test_every_metric_is_fed_somewhere() -> None:
    home = Path(__file__).resolve().parents[2] / "serinus"
    text = "\n".join(file.read_text() for file in home.rglob("*.py") if file.name != "metrics.py")
    unfed = [spec.name for spec in METRICS if f'"{spec.name}"' not in text]
    assert not unfed, f"{unfed}: expected each to be set, added or observed somewhere"
