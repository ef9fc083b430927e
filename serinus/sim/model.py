"""SimModel: the arithmetic of the simulated cluster, behind the protocol of a model, for the real runner and pools.

It writes the words of toy.py: each position of a sequence has one 64-bit word for every head of every layer, keys and
values (or latent rows, which every slice of a stage has; each folds a share of them), made of the chain of tokens up to
there. A rank continues a sequence from the chain that it *reads* in the KV of the position before, and folds what it
reads through the row tables: of full layers all positions, of sliding ones the window. Folds go from stage to stage;
slice 0 of the last stage puts those of all slices together and makes logits in which the token that the fold stands for
is the only one. So wrong KV is a wrong token, on whatever rank it is.

Shapes: T = tokens, B = sequences, W = wanted rows, N = lanes (k and v of each layer of a part), S = slots, H = heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from serinus.core.parts import Part
from serinus.core.rng import splitmix64
from serinus.kernels import LayersKv, digest_values
from serinus.models import ForwardBatch, ForwardHook, ModelSpec
from serinus.parallel import Shard
from serinus.parallel.comm import Comm
from serinus.pool import DevicePool
from serinus.sim.damage import Damage
from serinus.sim.toy import ROOT, Lanes, expected_kv, is_linked, link, next_token

HEAD_SIZE = 2
"""Elements of a head: one word of the toy is two float32."""


def sim_spec(lanes: Lanes, vocab_size: int, context_length: int) -> ModelSpec:
    """What such a model looks like to the rooms around it."""
    return ModelSpec(
        path="", architecture="Simulated", layer_count=lanes.layers, hidden_size=lanes.heads * HEAD_SIZE,
        intermediate_size=2 * lanes.heads, head_count=2 * lanes.heads, kv_head_count=lanes.heads, head_size=HEAD_SIZE,
        vocab_size=vocab_size, context_length=context_length,
        layer_parts=tuple(
            Part.LATENT if lanes.halves == 1 else Part.SWA if slides else Part.FULL for slides in lanes.slides
        ),
        window=lanes.window or None, dtype="float32", eos_ids=(0,), signature="simulated",
    )  # fmt: skip


class PartKv:
    """The words of one part on one rank, as numpy sees the device pool; the rank has at least one layer of it."""

    def __init__(self, lanes: Lanes, layers: Sequence[int], shard: Shard, k_SHD: torch.Tensor) -> None:
        """`layers`: of this part, as the whole model counts them; `k_SHD`: the keys of the first one."""
        halves = lanes.halves
        self.which: NDArray[np.intp] = np.array(
            [
                (layer * halves + half) * lanes.heads + head
                for layer in layers
                for half in range(halves)
                for head in shard.kv_heads
            ],
            np.intp,
        )
        """The model's lanes that are here."""
        first_SH = k_SHD.view(torch.int64).numpy().view(np.uint64)[..., 0]
        slots, count = first_SH.shape
        width, step = first_SH.strides
        # One allocation: layer after layer, keys and then values (DevicePool).
        self.words_NSH: NDArray[np.uint64] = np.lib.stride_tricks.as_strided(
            first_SH, (halves * len(layers), slots, count), (slots * width, width, step)
        )
        self._lanes = lanes
        is_mine = (self.which % shard.tp == shard.tp_rank) | (halves == 2)  # of rows that all slices have, a share
        self.weights_PL = lanes.weight_PL[:, self.which] * is_mine.astype(np.uint64)
        self._odd, self._salt = lanes.odd_L[self.which], lanes.salt_L[self.which]
        self._inverse = lanes.inverse_L[self.which]
        self._shape = (-1, halves * len(layers), count)

    def put(self, slots: NDArray[np.integer], chain_T: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Write the words of tokens with these chains; returns them, [T, halves * layers, heads]."""
        words: NDArray[np.uint64] = (chain_T[:, None] * self._odd + self._salt).reshape(self._shape)
        self.words_NSH[:, slots] = words.transpose(1, 0, 2)
        return words

    def read(self, slots: NDArray[np.integer]) -> NDArray[np.uint64]:
        """What these slots hold: [slots, lanes of this part here]."""
        words: NDArray[np.uint64] = self.words_NSH[:, slots].transpose(1, 0, 2).reshape(len(slots), -1)
        return words

    def chains(self, slots: NDArray[np.integer]) -> NDArray[np.uint64]:
        """What chains these slots were made of, as each lane says: [slots, lanes]."""
        return (self.read(slots) - self._salt) * self._inverse

    def chain(self, slot: int) -> int:
        """The same of one slot, as the first lane says."""
        return self._lanes.chain(self.words_NSH[0, slot, 0], int(self.which[0]))

    def fold(self, slots: NDArray[np.integer], first: int) -> int:
        """What positions from `first` on, in these slots, add to the next token."""
        words = self.read(slots) * self.weights_PL[first : first + len(slots)]
        return int(np.bitwise_xor.reduce(words, axis=None))

    def pages_of(self, tokens: NDArray[np.int32], page_size: int) -> NDArray[np.uint8]:
        """The bytes of whole pages of a sequence, as pools write them out: [pages, page_bytes]."""
        count = len(tokens) // page_size
        words = expected_kv(self._lanes, tokens[: count * page_size], self.which)
        pages = words.reshape(count, page_size, *self._shape[1:]).transpose(0, 2, 1, 3)
        found: NDArray[np.uint8] = np.ascontiguousarray(pages).view(np.uint8).reshape(count, -1)
        return found


class SimModel:
    """models.Model of one rank of the simulated cluster."""

    dtype, has_kv_scales = torch.float32, False

    def __init__(
        self, spec: ModelSpec, shard: Shard, lanes: Lanes, pools: Mapping[Part, DevicePool], comm: Comm,
        damage: Damage | None = None,
    ) -> None:  # fmt: skip
        """`spec`: of the whole model; `pools`: this rank's, the same that the runner gives to `forward`; `damage`: what
        happens to its memory."""
        self.spec = spec.on(shard)
        self._shard, self._lanes, self._comm, self._damage = shard, lanes, comm, damage
        self.kv = {
            part: PartKv(lanes, own, shard, pools[part].k[0])
            for part in spec.parts
            if (own := [layer for layer in shard.layers if spec.layer_parts[layer] is part])
        }
        """Of the parts that have layers here."""
        self._first = self.spec.layer_parts[0]
        """Its first lane says how far the chain came."""
        self._tables: dict[Part, NDArray[np.int32]] = {}

    def activation(self, token_count: int) -> tuple[tuple[int, ...], torch.dtype]:
        return (token_count, 1), torch.int64

    def forward(
        self,
        batch: ForwardBatch,
        kv: LayersKv,
        tables: Mapping[Part, torch.Tensor],
        hook: ForwardHook,
        inflow: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See Model: int64 [W or T, 1], the fold behind each wanted row; before the last stage all T rows."""
        if not self._tables:
            self._tables = {part: tables[part].numpy() for part in self.spec.parts}
        if self._damage is not None:
            self._damage.begin(batch, tables)
        hook.before(batch)
        for layer in range(self.spec.layer_count):
            hook.before_layer(layer)
        tokens = batch.tokens_T.tolist()
        ends: list[int] = batch.attention.q_starts_B1.tolist()
        rows, contexts = batch.attention.rows_B.tolist(), batch.attention.context_B.tolist()
        slots = {part: batch.slots_of(part).numpy() for part in self.spec.parts}
        folds_T1 = torch.zeros((len(tokens), 1), dtype=torch.int64) if inflow is None else inflow
        folds = folds_T1.numpy().view(np.uint64)
        wanted = None if batch.wanted_W is None else set(batch.wanted_W.tolist())
        stored: dict[Part, list[NDArray[np.uint64]]] = {part: [] for part in self.kv}
        for index, (row, end) in enumerate(zip(rows, contexts, strict=True)):
            span = slice(ends[index], ends[index + 1])
            own_slots = {part: slots[part][span] for part in slots}
            for part, words in self._compute(row, end, tokens[span], own_slots).items():
                stored[part].append(words)
            last = span.stop - 1
            if wanted is None or last in wanted:
                folds[last, 0] ^= np.uint64(self._fold(row, end))
        self._tell_stored(hook, {part: np.concatenate(words) for part, words in stored.items()})
        if self._damage is not None:
            self._damage.midway(batch)
        hook.after(batch)
        if not self._shard.is_last or batch.wanted_W is None:
            return folds_T1
        return folds_T1.index_select(0, batch.wanted_W)

    def logits(self, hidden_BE: torch.Tensor) -> torch.Tensor | None:
        """See Model: the token that all slices' folds stand for, and nothing else."""
        shares_BR = self._comm.gather_last(hidden_BE)
        if shares_BR is None:
            return None
        logits_BV = torch.zeros((len(shares_BR), self.spec.vocab_size))
        for row, fold in enumerate(np.bitwise_xor.reduce(shares_BR.numpy().view(np.uint64), axis=1).tolist()):
            logits_BV[row, next_token(fold, self.spec.vocab_size)] = 1.0
        return logits_BV

    def final_hidden(self, hidden_BE: torch.Tensor) -> torch.Tensor | None:
        """None: folds are no hidden states."""
        return None

    def _tell_stored(self, hook: ForwardHook, stored: Mapping[Part, NDArray[np.uint64]]) -> None:
        """Have digested what was stored, layer by layer."""
        seen = dict.fromkeys(stored, 0)
        for layer, part in enumerate(self.spec.layer_parts):
            at, written = seen[part], hook.writes(layer)
            seen[part] += part.halves
            if written is not None:
                rows = (torch.from_numpy(stored[part][:, at + half].view(np.int64)) for half in range(part.halves))
                digest_values(written, *(row_TH.contiguous() for row_TH in rows))

    def _compute(
        self, row: int, end: int, tokens: list[int], slots: Mapping[Part, NDArray[np.int64]]
    ) -> Mapping[Part, NDArray[np.uint64]]:
        """Write the KV of one sequence's tokens of this step; returns what was stored, by part."""
        start = end - len(tokens)
        for part, table in self._tables.items():
            assert np.array_equal(table[row, start:end], slots[part]), f"sim: row {row} is written where it is not"
        before = self._before(row, start) if start else ROOT
        chain = np.empty(len(tokens), np.uint64)
        for index, token in enumerate(tokens):
            before = link(before, token)
            chain[index] = before
        return {part: own.put(slots[part], chain) for part, own in self.kv.items()}

    def _fold(self, row: int, end: int) -> int:
        fold = 0
        for part, own in self.kv.items():
            first = max(0, end - self._lanes.window) if part is Part.SWA else 0
            fold ^= own.fold(self._tables[part][row, first:end], first)
        return fold

    def _before(self, row: int, start: int) -> int:
        """The chain before a piece of work, as the KV of the position before it says. What the window holds of the
        positions before must fit it, in every sliding lane; if not, everything from here on is wrong."""
        before = self.kv[self._first].chain(int(self._tables[self._first][row, start - 1]))
        own = self.kv.get(Part.SWA)
        if own is not None:
            first = max(0, start + 1 - self._lanes.window)
            chains = own.chains(self._tables[Part.SWA][row, first:start])
            path = np.concatenate(([np.uint64(ROOT)], chains[:, 0])) if not first else chains[:, 0]
            if int(path[-1]) != before or (chains != chains[:, :1]).any() or not is_linked(path):
                return splitmix64(before ^ 1)
        return before
