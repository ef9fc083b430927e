"""Random cases of the Triton column's ops between device and host beside the reference: sampling, and pages."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from serinus.core.history import TokenHistory
from serinus.kernels import PoolLane, RowSampling
from serinus.kernels.ref.pull_pages import pull_pages as reference
from serinus.kernels.triton.pull_pages import PagePull

from .triton_columns import columns, far_apart

__all__ = ["choose_tokens", "hashed_pages", "pages", "pull_pages", "pulled", "top_tokens"]


def made_logits(rng: random.Random, device: str, rows: int, vocab: int) -> torch.Tensor:
    """Logits of any spread, some of them no numbers or without end, as rows of a wider matrix."""
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    dtype = rng.choice((torch.float32, torch.bfloat16, torch.float16))
    logits = (torch.randn(rows, vocab + 3, generator=generator) * rng.choice((0.0, 0.5, 3.0, 30.0))).to(dtype)
    for value in rng.sample((math.inf, -math.inf, math.nan, 6e4), rng.choice((0, 0, 2))):
        logits[rng.randrange(rows), rng.randrange(vocab)] = value
    return logits.to(device)[:, :vocab]


def row_of(rng: random.Random, vocab: int) -> RowSampling:
    """Any parameters of a row."""
    history = TokenHistory(np.array([rng.randrange(vocab) for _ in range(rng.randint(0, 60))], np.int32))
    for _ in range(rng.randint(0, 40)):
        history.add(rng.randrange(vocab))
    ids = np.array(sorted(rng.sample(range(vocab + 9), min(vocab, 20))), np.int32)
    values = np.array([rng.uniform(-3, 3) for _ in ids], np.float32)
    return RowSampling(
        seed=rng.randrange(-(1 << 63), 1 << 63), position=rng.randrange(1 << 40),
        temperature=rng.choice((0.0, 0.6, 1.0, 1.0, 5.0)), top_k=rng.choice((0, 0, 1, 5, 40, vocab)),
        top_p=rng.choice((1.0, 1.0, 0.05, 0.5, 0.95)), min_p=rng.choice((0.0, 0.0, 0.1)),
        bias=rng.choice((None, None, (ids, values))), history=rng.choice((None, history)),
        repetition_penalty=rng.choice((1.0, 1.0, 1.3)), frequency_penalty=rng.choice((0.0, 0.0, 0.7)),
        presence_penalty=rng.choice((0.0, 0.4)), forbidden=rng.choice(((), (), (0, vocab - 1, vocab + 4))),
    )  # fmt: skip


def choose_tokens(seed: int, device: str) -> str:
    """Tokens of rows with any parameters."""
    rng = random.Random(seed)
    ref, fast = columns(device, "choose_tokens")
    vocab = rng.choice((1, 17, 300, 4099) if device == "cpu" else (1, 17, 300, 4099, 151_936))
    rows = rng.randint(1, 4)
    logits = made_logits(rng, device, rows, vocab)
    specs = [row_of(rng, vocab) for _ in range(rows)]
    if seed % 4 == 1:
        specs[0].repetition_penalty, specs[0].history = 1.3, TokenHistory(np.array([0, vocab - 1], np.int32))
    if seed % 4 == 0:
        specs = [RowSampling(seed=i, position=seed, temperature=0.8 * (seed % 8 > 0)) for i in range(rows)]
    found, expected = (column.choose_tokens(logits, specs).tolist() for column in (fast, ref))
    # Of equal scores torch takes any on a GPU, the lowest id on a CPU, as is said.
    found_cpu = ref.choose_tokens(logits.cpu(), specs).tolist()
    return "" if found in (expected, found_cpu) else f"tokens {found}, expected {expected} or {found_cpu} of {specs}"


def top_tokens(seed: int, device: str) -> str:
    """Log-probabilities and lists of them."""
    rng = random.Random(seed)
    ref, fast = columns(device, "top_tokens")
    rows, vocab = rng.randint(1, 3), rng.choice((1, 40, 5000))
    logits = made_logits(rng, device, rows, vocab)
    chosen, counts = [rng.randrange(vocab) for _ in range(rows)], [rng.choice((0, 0, 3, 50)) for _ in range(rows)]
    wrong = ""
    for one, other in zip(fast.top_tokens(logits, chosen, counts), ref.top_tokens(logits, chosen, counts), strict=True):
        wrong += "" if one.ids == other.ids else f" ids {one.ids}, expected {other.ids}"
        found, expected = ((each.logprob, *each.logprobs) for each in (one, other))
        wrong += far_apart("log-probabilities", torch.tensor(found), torch.tensor(expected))
    return wrong


def pages(seed: int, device: str) -> str:
    """Pages out of and into pools, to rows of the device and of the host."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    ref, fast = columns(device, "gather_pages", "scatter_pages")
    page, heads, size, count = rng.choice((1, 4, 16)), rng.choice((1, 3)), rng.choice((3, 16)), rng.choice((0, 1, 5))
    shape = (12 * page, heads, size)
    kv = [
        tuple(torch.randn(shape, generator=generator).half().to(device) for _ in range(2))
        for _ in range(rng.choice((1, 3)))
    ]
    width = page * heads * size * 2 * 2 * len(kv)
    ids = torch.randperm(12, generator=generator)[:count].numpy()
    rows = torch.randperm(count + 2, generator=generator)[:count].numpy() if rng.random() < 0.5 else None
    where = rng.choice(("cpu", device))
    sizes = (count + 2 if rows is not None else count, width + 8)
    pinned = where != device and rng.random() < 0.7
    found = torch.zeros(sizes, dtype=torch.uint8, device=where, pin_memory=pinned)[:, :width]
    expected = torch.zeros(sizes, dtype=torch.uint8, device=where)[:, :width]
    if rows is not None and where != "cpu":
        rows, where = None, device
        found, expected = found[:count], expected[:count]
    fast.gather_pages(kv, ids, page, found, rows)
    if pinned:
        torch.cuda.synchronize()
    ref.gather_pages(kv, ids, page, expected, rows)
    wrong = "" if torch.equal(found, expected) else " gathered"
    one, other = ([tuple(torch.zeros_like(half) for half in pair) for pair in kv] for _ in range(2))
    fast.scatter_pages(one, ids, page, found, rows)
    ref.scatter_pages(other, ids, page, found, rows)
    same = all(torch.equal(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True))
    return wrong + ("" if same else " scattered")


def hashed_pages(seed: int, device: str) -> str:
    """Pages out, in and where they lie, with their hashes."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    ref, fast = columns(device, "hashed_pages")
    widths, count = rng.choice(((64, 64), (512, 512, 96), (6, 10))), rng.choice((1, 4))
    lanes = [torch.randint(0, 256, (9, width), generator=generator, dtype=torch.uint8).to(device) for width in widths]
    ids = torch.randperm(9, generator=generator)[:count].numpy()
    found, expected = (np.zeros((count, sum(widths)), np.uint8) for _ in range(2))
    hashes = [ops.hashed_pages(lanes, ids, rows, seed) for ops, rows in ((fast, found), (ref, expected))]
    wrong = "" if np.array_equal(*hashes) and np.array_equal(found, expected) else " outward"
    wrong += "" if np.array_equal(fast.hashed_pages(lanes, ids, None, seed), hashes[1]) else " in place"
    filled = [torch.zeros_like(lane) for lane in lanes]
    same = np.array_equal(fast.hashed_pages(filled, ids, found, seed, True), hashes[1])
    same &= all(
        torch.equal(a[torch.from_numpy(ids)], b[torch.from_numpy(ids)]) for a, b in zip(filled, lanes, strict=True)
    )
    return wrong + ("" if same else " inward")


def pull_pages(seed: int, device: str) -> str:
    """Pages of another pool, of any layout, with their sums; and sums of pages where they lie."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    widths, count = rng.choice(((64, 64), (512, 512, 96), (8, 16), (17_000,))), rng.choice((0, 1, 4))

    def lanes(pages: int, page_first: bool) -> list[torch.Tensor]:
        made = torch.randint(0, 256, (pages * sum(widths),), generator=generator, dtype=torch.uint8).to(device)
        if page_first:
            return list(made.view(pages, -1).split(list(widths), dim=1))
        return [part.view(pages, -1) for part in made.split([pages * width for width in widths])]

    own, sources = lanes(9, rng.random() < 0.5), lanes(12, rng.random() < 0.5)
    sums = rng.choice(((), (1,) * len(widths), (len(widths),)))
    wrong = _pulled(rng, seed, own, sources, count, sums)
    return wrong or _slices(rng, seed, device)


def _slices(rng: random.Random, seed: int, device: str) -> str:
    """Layers and heads of pages of ranks of another layout, page first or not."""
    generator = torch.Generator().manual_seed(seed)
    head, tokens = rng.choice((8, 16, 24, 256)), rng.choice((1, 4, 16))
    strips, heads = rng.choice((2, 5, 8)), rng.choice((1, 2, 3))

    def lane(pages: int) -> torch.Tensor:
        """[pages, strips, tokens, bytes of the heads taken] of a pool with more strips and heads."""
        more, before, first = rng.choice((0, 0, 2)), rng.choice((0, 1)), rng.choice((0, 1))
        sizes = (pages, strips + 1, tokens, (heads + before + more) * head)
        made = torch.randint(0, 256, (math.prod(sizes),), generator=generator, dtype=torch.uint8).to(device)
        by_page = made.view(sizes) if rng.random() < 0.5 else made.view(sizes[1], pages, *sizes[2:]).transpose(0, 1)
        return by_page[:, first : first + strips, :, before * head : (before + heads) * head]

    own, sources = lane(6), lane(7)
    halves = [half.split([1, strips - 1], dim=1) for half in (own, sources)]
    if rng.random() < 0.5:
        return _pulled(rng, seed, list(halves[0]), list(halves[1]), 3, rng.choice(((), (1, 1))))
    return _pulled(rng, seed, [own], [sources], 3, ())


def _pulled(
    rng: random.Random, seed: int, own: list[torch.Tensor], sources: list[torch.Tensor], count: int,
    sums: tuple[int, ...],
) -> str:  # fmt: skip
    """`own` are views of one tensor, of which nothing else may change."""
    pages, taken = (np.array(rng.sample(range(len(side[0])), count), np.int64) for side in (own, sources))
    whole = own[0]._base
    assert whole is not None, "lanes are views"
    before = whole.clone()
    expected = reference(own, pages, seed << 50, sources, taken, sums)
    wanted = whole.clone()
    whole.copy_(before)
    found = pulled(own, pages, seed << 50, sources, taken, sums)
    wrong = "" if torch.equal(found, expected) and found.shape == (count, max(1, len(sums))) else " sums"
    wrong += "" if torch.equal(whole, wanted) else " pages"
    in_place = pulled(own, pages, seed << 50, (), None, sums)
    return wrong + ("" if torch.equal(in_place, expected) else " sums in place")


def pulled(
    lanes: Sequence[torch.Tensor], pages: NDArray[np.int64], seed: int, sources: Sequence[torch.Tensor],
    source_pages: NDArray[np.int64] | None, sums: Sequence[int] = (),
) -> torch.Tensor:  # fmt: skip
    """As the reference, by the kernel; it runs twice over the same job, the second time as it was kept."""
    device, count = lanes[0].device, len(pages)
    pull = PagePull([PoolLane.of(lane) for lane in lanes], [PoolLane.of(lane) for lane in sources], sums, device)
    pull.check(pages, source_pages)
    words = np.full(pull.word_count(count), -1)
    pull.fill(words, pages, seed, source_pages)
    for _ in range(2):
        job = torch.tensor(words, device=device)
        pull.launch(job, count)
    return job[: count * pull.sums].view(count, pull.sums)
