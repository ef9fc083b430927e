"""From a seed to a scenario: which work, which faults, how bad the network is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from serinus.core.rng import Rng
from serinus.sim.one_sided import ONE_SIDED
from serinus.sim.options import (
    Cancel,
    Crash,
    EngineShape,
    Fault,
    Options,
    Partition,
    Pause,
    Scenario,
    Shape,
    Work,
)

_CANARIES = 0.08
"""Worlds with a canary; they take longer."""
_ONE_TIER = 0.4
"""Worlds with damage that have no host tier."""
MODES = ("raise", "heal")
"""What canaries do in worlds with damage."""
_SLIDING = 0.2
"""Worlds in which layers slide."""
_LATENT = 0.1
"""Of the others, worlds with latent rows."""

_RANKED = 0.15
"""Worlds in which requests have priorities and deadlines."""
_UNEQUAL = 0.3
"""Worlds of NIXL and Mooncake in which the engines have unequal ranks and page sizes."""
_STAGES = 0.5
"""Worlds in which the second decode engine has two stages instead of two slices."""
_OVERLAPS = 0.5
"""Engines of one rank that begin steps before the ones before them are read."""
_CROWDED = 0.4
"""Of the worlds in which a decode engine does: those in which it computes many prompts side by side."""
_SPAN_S = 1.5
"""Work and faults begin within this time."""


def draw(
    seed: int, *, backend: str = "", slides: bool | None = None, canary: str | None = None, ranked: bool | None = None,
    latent: bool | None = None, unequal: bool | None = None, crowded: bool | None = None,
) -> Scenario:  # fmt: skip
    """The scenario of a seed. `backend` fixes how pages travel, `slides` whether some layers see a window only,
    `latent` whether, where none does, each layer has one row for keys and values, `unequal` whether engines that reach
    into each other's memory have unequal ranks and page sizes, `canary` whether there is one: sound (it must be
    silent), damaged (it must not), or empty = there is none; `ranked` whether requests have priorities and
    deadlines; `crowded` whether an engine that begins steps early computes many prompts side by side."""
    rng = Rng(seed).split("scenario")
    more = Rng(seed).split("more")  # of its own, so that what came later does not change what was drawn before
    shape = replace(_shape(rng, backend), optimistic=more.random() < 0.5)
    prefetch = more.choice(("none", "best_effort", "timeout", "wait_complete"))
    shape = replace(shape, engines=tuple(replace(e, prefetch=prefetch) if e.host_pages else e for e in shape.engines))
    if shape.backend == "local" and not backend and Rng(seed).split("shared memory").random() < 0.5:
        shape = replace(shape, backend="shm")
    if shape.backend == "pull" and not backend and Rng(seed).split("device memory").random() < 0.5:
        shape = replace(shape, backend="ipc")
    cuts = Rng(seed).split("unequal")
    is_unequal = shape.backend in ONE_SIDED and (cuts.random() < _UNEQUAL if unequal is None else unequal)
    if is_unequal:
        by_name, sizes = _ranks(cuts)
        sizes = dict.fromkeys(sizes, 4) if shape.backend == "ipc" else sizes  # slices of pages of equal size
        shape = replace(shape, engines=tuple(_reshaped(shape.engines, by_name, sizes)))
    window = Rng(seed).split("sliding")
    if window.random() < _SLIDING if slides is None else slides:
        shape = _sliding(window, shape)
    elif Rng(seed).split("latent").random() < _LATENT if latent is None else latent:
        shape = replace(shape, slides="L" * shape.layers, heads=1)
    if (shape.backend not in ONE_SIDED or is_unequal) and Rng(seed).split("stages").random() < _STAGES:
        engines = [replace(e, tp=1, pp=2) if e.name == "d1" else e for e in shape.engines]
        shape = replace(shape, engines=tuple(engines))
    if shape.backend not in ("push", "pull"):
        ahead = Rng(seed).split("overlap")
        engines = [replace(e, overlaps=ahead.random() < _OVERLAPS and e.tp * e.pp == 1) for e in shape.engines]
        shape = replace(shape, engines=tuple(engines))
    decodes = [engine.name for engine in shape.engines if engine.role == "decode"]
    prefills = [engine.name for engine in shape.engines if engine.role == "prefill"]
    works = _works(rng, shape, decodes, prefills)
    scenario = Scenario(
        seed=seed, shape=shape, options=_options(rng, more), works=works, faults=_faults(rng, works, decodes, prefills)
    )
    ranks = Rng(seed).split("ranked")
    if ranks.random() < _RANKED if ranked is None else ranked:
        scenario = _ranked(ranks, scenario)
    crowds = Rng(seed).split("crowd")
    early = [engine.name for engine in scenario.shape.engines if engine.overlaps and engine.role == "decode"]
    if early and (crowds.random() < _CROWDED if crowded is None else crowded):
        scenario = _crowded(crowds, scenario, crowds.choice(early))
    watched = Rng(seed).split("canary")
    if canary is None:
        canary = watched.choice(("sound", "damaged")) if watched.random() < _CANARIES else ""
    return _with_canary(watched, scenario, canary) if canary else scenario


def _shape(rng: Rng, backend: str) -> Shape:
    backend = backend or rng.choice(("local", "tcp", "push", "pull"))
    pages = rng.choice((8, 9, 10, 13))
    if backend in ONE_SIDED:  # whole pages go from rank to rank: equal layouts
        tp, pp = rng.choice(((1, 1), (2, 1), (1, 2)))
        ranks = dict.fromkeys(("p0", "p1", "d0", "d1"), (tp, pp))
        sizes = dict.fromkeys(ranks, 4)
    else:
        ranks, sizes = _ranks(rng)
    chunk, host = rng.choice((8, 16, 40)), rng.choice((0, 0, 9, 25))
    policy = rng.choice(("write_through", "write_through_selective", "write_back"))
    engines = tuple(
        EngineShape(
            name=name, role="prefill" if name[0] == "p" else "decode", tp=tp, pp=pp, page_size=sizes[name], chunk=chunk,
            host_pages=host, write_policy=policy,
            pages=1 + (pages - 1) * (2 if name == "p0" else 1) * 4 // sizes[name],
        )
        for name, (tp, pp) in ranks.items()
    )  # fmt: skip
    secret = rng.choice(("", "", "", "open sesame"))
    return Shape(engines=engines, backend=backend, secret=secret)


def _ranks(rng: Rng) -> tuple[dict[str, tuple[int, int]], dict[str, int]]:
    """Unequal ones: (tp, pp) and page size, by engine."""
    ranks = {"p0": (2, 2), "p1": rng.choice(((2, 2), (1, 1))), "d0": (1, 1), "d1": (2, 1)}
    other = rng.choice((4, 4, 2, 8))
    return ranks, {"p0": rng.choice((4, other)), "p1": other, "d0": 4, "d1": rng.choice((4, other))}


def _reshaped(
    engines: tuple[EngineShape, ...], ranks: Mapping[str, tuple[int, int]], sizes: Mapping[str, int]
) -> Iterator[EngineShape]:  # fmt: skip
    """The same engines with other ranks and page sizes, and room for as many tokens."""
    for engine in engines:
        size, (tp, pp) = sizes[engine.name], ranks[engine.name]
        pages = 1 + (engine.pages - 1) * engine.page_size // size
        yield replace(engine, tp=tp, pp=pp, page_size=size, pages=pages)


def _with_canary(rng: Rng, scenario: Scenario, kind: str) -> Scenario:
    """Canaries; copies between tiers do not fail with an error, as what they leave behind would be damage too."""
    shape, options = scenario.shape, replace(scenario.options, restore=0.0)
    if kind == "sound":
        return replace(scenario, shape=replace(shape, canary=rng.choice(("none", "all"))), options=options)
    checked = shape.backend not in ONE_SIDED
    options = replace(
        options, flip=round(rng.random() * 0.3, 4) * checked, stray=round(rng.random() * 0.3 + 0.01, 4)
    )  # fmt: skip
    return _damaged(Rng(scenario.seed).split("damage"), replace(scenario, shape=shape, options=options))


def _damaged(rng: Rng, scenario: Scenario) -> Scenario:
    """KV, stamps, rows and copies are damaged, some ways in each world; in some worlds there is one tier only."""
    shape = scenario.shape
    if rng.random() < _ONE_TIER:
        engines = tuple(replace(engine, host_pages=0, prefetch="none") for engine in shape.engines)
        shape = replace(shape, engines=engines)
    kinds = ("page", "bit", "stamp", "row", "midway", *(("host", "copy") if shape.engines[0].host_pages else ()))
    chances = {
        kind: round(rng.random() * 0.15 + 0.01, 4)
        for kind in kinds
        if rng.random() < (0.8 if kind in ("host", "copy") else 0.4)
    }
    options = replace(scenario.options, **chances)
    if chances and rng.random() < 0.5:
        options = replace(options, stray=0.0)
    coverage = rng.choice(("full", "full", "rotating:3", "rotating:16"))
    if coverage != "full":  # a row that is written anew takes the damage back before its turn: not seen (CANARY.md)
        options = replace(options, row=0.0)
    shape = replace(shape, canary="all", coverage=coverage, mode=rng.choice(MODES))
    return replace(scenario, shape=shape, options=options)


def _sliding(rng: Rng, shape: Shape) -> Shape:
    """Layers slide. Pages of prefill engines are then not smaller than those of decode engines."""
    window = rng.choice((2, 3, 5, 6, 9))
    decode = min(e.page_size for e in shape.engines if e.role == "prefill")
    engines = []
    for engine in shape.engines:
        size = engine.page_size if engine.role == "prefill" else min(engine.page_size, decode)
        pages = -(-window // size)
        least = pages + max(1, pages // 8) + 1  # what one request needs
        engines.append(
            replace(
                engine, page_size=size, pages=1 + (engine.pages - 1) * engine.page_size // size,
                swa_pages=1 + least + rng.choice((0, 1, 4, 8, 12)),
            )
        )  # fmt: skip
    return replace(shape, engines=tuple(engines), slides=rng.choice(("FS", "SF", "SS", "FS")), window=window)


def _works(rng: Rng, shape: Shape, decodes: list[str], prefills: list[str]) -> tuple[Work, ...]:
    """Prompts that share beginnings, so that caches matter."""
    stem = [rng.randrange(shape.vocab_size) for _ in range(12)]
    works: list[Work] = []
    burst = rng.choice((0.0, 0.1, 1.0))
    for index in range(rng.randint(2, 8)):
        shared = stem[: rng.choice((0, 4, 8, 10))]
        own = [rng.randrange(shape.vocab_size) for _ in range(rng.randint(1, 12))]
        again = works and rng.random() < 0.3
        tokens = rng.choice(works).prompt if again else tuple(shared + own)
        works.append(
            Work(
                rid=f"r{index}",
                at=round(rng.random() * _SPAN_S * burst, 3),
                prompt=tokens,
                new_tokens=rng.randint(1, 6),
                decode=rng.choice(decodes),
                prefill=rng.choice(prefills) if rng.random() < 0.9 else "",
                salt=rng.choice(("", "", "", "s")),
            )
        )
    return tuple(works)


def _crowded(rng: Rng, scenario: Scenario, name: str) -> Scenario:
    """Most requests come to one engine at about one time, which computes their prompts itself, in chunks that fill its
    steps."""
    shape, works = scenario.shape, list(scenario.works)
    engines = [replace(e, pages=3 * e.pages - 2, chunk=8) if e.name == name else e for e in shape.engines]
    for index in range(len(works), len(works) + rng.randint(4, 10)):
        own = [rng.randrange(shape.vocab_size) for _ in range(rng.randint(1, 14))]
        prompt = rng.choice(works).prompt[: rng.choice((0, 0, 4, 8))] + tuple(own)
        works.append(replace(rng.choice(works), rid=f"r{index}", prompt=prompt, new_tokens=rng.randint(1, 6)))
    crowd = [
        replace(work, decode=name, prefill="", at=round(work.at * 0.05, 4)) if rng.random() < 0.8 else work
        for work in works
    ]
    return replace(scenario, shape=replace(shape, engines=tuple(engines)), works=tuple(crowd))


def _ranked(rng: Rng, scenario: Scenario) -> Scenario:
    """Engines run few requests at once, by priority; some requests must end within a time."""
    shape = replace(scenario.shape, ranked=True, rows=rng.choice((1, 1, 2, 4)), ageing_s=rng.choice((0.0, 0.05, 0.5)))
    works = tuple(
        replace(work, priority=rng.choice((-2, 0, 0, 1, 7)), timeout_s=rng.choice((0.0, 0.0, 0.1, 0.4, 2.0, 40.0)))
        for work in scenario.works
    )
    return replace(scenario, shape=shape, works=works)


def _options(rng: Rng, more: Rng) -> Options:
    def maybe(chance: float, most: float) -> float:
        return round(rng.random() * most, 4) if rng.random() < chance else 0.0

    return Options(
        delay_s=maybe(0.8, 0.05),
        late_s=maybe(0.7, 2.0),
        drop=maybe(0.4, 0.2),
        duplicate=maybe(0.4, 0.2),
        reorder=maybe(0.4, 0.3),
        corrupt=maybe(0.3, 0.08),
        overtake=maybe(0.4, 0.5),
        lose_piece=maybe(0.2, 0.3),
        allocation=maybe(0.2, 0.2),
        restore=maybe(0.2, 0.3),
        rank_delay_s=maybe(0.5, more.choice((0.05, 0.05, 0.3))),
        write_late_s=maybe(0.7, rng.choice((0.3, 3.0))),
        lose_op=round(more.random() * 0.2, 4) if more.random() < 0.25 else 0.0,
    )


def _faults(rng: Rng, works: tuple[Work, ...], decodes: list[str], prefills: list[str]) -> tuple[Fault, ...]:
    faults: list[Fault] = []
    engines = decodes + prefills

    def when() -> float:
        return round(rng.random() * _SPAN_S, 3)

    for work in works:
        if rng.random() < 0.3:
            faults.append(Cancel(rid=work.rid, at=round(work.at + rng.random() * rng.choice((0.03, 0.1, 0.3, 1.0)), 4)))
    if rng.random() < 0.35:
        faults.append(Crash(engine=rng.choice(prefills), at=when(), down_s=rng.choice((0.1, 1.0))))
    if rng.random() < 0.25:
        faults.append(Crash(engine=rng.choice(decodes), at=when(), down_s=rng.choice((0.05, 0.3, 1.0))))
    if rng.random() < 0.3:
        faults.append(Pause(engine=rng.choice(engines), at=when(), for_s=rng.choice((0.2, 1.0, 40.0))))
    if rng.random() < 0.3:
        pair = [rng.choice(decodes), rng.choice(prefills)]
        rng.shuffle(pair)
        faults.append(Partition(source=pair[0], target=pair[1], at=when(), for_s=rng.choice((0.5, 3.0, 12.0))))
    return tuple(faults)
