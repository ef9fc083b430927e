"""Owners of pages: one state per page, vectorised checked moves, an array stack of free pages, named counted holds.

Always on, also in production: a double free, a stolen page or a page listed twice fails at its call site with the
page, what it is, what was expected, and its last operations. Knows nothing of tokens, trees or bytes.

    FREE -> REQUEST(rid) -> TREE(node) -> FREE
    FREE -> COPY(op) -> REQUEST | TREE | FREE        while a copy fills it
    any owned state -> QUARANTINED -> FREE           quarantined by the canary, later released
                                   -> RETIRED        it failed twice: never handed out again

A page with holds may lose its owner (it becomes FREE), but it is handed out again only when its last hold is gone.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from operator import itemgetter
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from serinus.core.errors import InvariantError
from serinus.core.handoff import PageTrace

Pages = NDArray[np.int32]
"""Page ids, each in [1, page_count)."""

Owner = int
"""A state with the number of its owner: `number << 3 | state`. Made by `PageLedger.request_owner`, `tree_owner`,
`copy_owner`."""

STATE_BITS = 3
STATE_MASK = (1 << STATE_BITS) - 1
LOG_OPERATIONS = 4096
TRACES_KEPT = 4096


class PageState(IntEnum):
    """What a page is; the value is what the ledger's array holds in its low bits."""

    FREE = 0
    """The page has no owner."""
    REQUEST = 1
    """Of one running request: its row lists the page, and no other request may read it."""
    TREE = 2
    """Of one tree node: its bytes are those of a prefix, and requests with a lease of the node may read them."""
    COPY = 3
    """A copy or a transfer is filling it."""
    QUARANTINED = 4
    """The canary found its KV wrong."""
    PADDING = 5
    """Page 0: written by padded rows, never owned, never read."""
    RETIRED = 6
    """Its KV was found wrong twice: it is never handed out again."""


LEGAL_MOVES: Mapping[PageState, frozenset[PageState]] = {
    PageState.FREE: frozenset({PageState.REQUEST, PageState.COPY}),
    PageState.REQUEST: frozenset({PageState.TREE, PageState.FREE, PageState.COPY, PageState.QUARANTINED}),
    PageState.TREE: frozenset({PageState.TREE, PageState.FREE, PageState.QUARANTINED}),
    PageState.COPY: frozenset({PageState.REQUEST, PageState.TREE, PageState.FREE, PageState.QUARANTINED}),
    PageState.QUARANTINED: frozenset({PageState.FREE, PageState.RETIRED}),
    PageState.PADDING: frozenset(),
    PageState.RETIRED: frozenset(),
}
"""From each state, where a page may go. Out of FREE only through `take`, which reads the free stack."""

FREE_OWNER: Owner = 0
_REQUEST, _TREE, _COPY = int(PageState.REQUEST), int(PageState.TREE), int(PageState.COPY)  # members are slow to look up
_LEGAL = [[PageState(target) in LEGAL_MOVES[PageState(source)] for target in PageState] for source in PageState]


def tree_owner(node_id: int) -> Owner:
    """The owner code of tree node `node_id` (> 0)."""
    return node_id << STATE_BITS | _TREE


def copy_owner(op_id: int) -> Owner:
    """The owner code of copy `op_id` (> 0)."""
    return op_id << STATE_BITS | _COPY


@dataclass(frozen=True, slots=True, kw_only=True)
class PageCounts:
    """How many pages are in which state; the fields sum to page_count - 1 (page 0 is padding)."""

    free: int
    """On the free stack: can be handed out now."""
    parked: int
    """Freed, but something still holds them."""
    request: int
    """Pages of running requests."""
    tree: int
    """Pages that tree nodes own."""
    copy: int
    """Pages that a copy or a transfer is filling."""
    quarantined: int
    """In quarantine: their KV was found wrong."""
    retired: int
    """Their KV was found wrong twice: never handed out again."""


class PageLedger:
    """States, holds and free stack of the pages of one tier and part.

    Cost: every operation is a handful of numpy calls on the pages it names; none depends on page_count.
    """

    def __init__(self, page_count: int) -> None:
        assert page_count >= 2, f"cache: page 0 is padding, so a pool needs 2 pages, got {page_count}"
        self.page_count = page_count
        self.owner_P: NDArray[np.int64] = np.zeros(page_count, np.int64)
        """Owner code of each page; read it, never write it."""
        self.owner_P[0] = PageState.PADDING
        self.hold_P: NDArray[np.int32] = np.zeros(page_count, np.int32)
        """Holds on each page, over all names; read it, never write it."""
        self.held_count = 0
        """Pages with at least one hold."""
        self._named_holds: dict[str, NDArray[np.int32]] = {}
        self._entered_SP: NDArray[np.int64] = np.zeros((len(PageState), page_count), np.int64)
        self._iota: NDArray[np.int64] = np.arange(page_count, dtype=np.int64)
        self._mark_P: NDArray[np.int64] = np.zeros(page_count, np.int64)
        self._stack: Pages = np.arange(page_count - 1, -1, -1, dtype=np.int32)
        self.free_pages = page_count - 1
        """Pages that can be handed out now; read it, never write it."""
        self._count = [0] * len(PageState)
        self._count[PageState.FREE] = page_count - 1
        self._operation = 1
        self._log: deque[tuple[int, str, Owner, Owner]] = deque(maxlen=LOG_OPERATIONS)
        self._number_of: dict[str, int] = {}
        self._rid_of: dict[int, str] = {}
        self._pages_of: dict[int, int] = {}
        self._next_number = 1
        self._traces: dict[int, PageTrace] = {}
        self._trace_P: NDArray[np.int64] = np.zeros(page_count, np.int64)
        self._trace_count = 0

    @property
    def request_ids(self) -> tuple[str, ...]:
        """The requests known to the ledger, oldest first."""
        return tuple(self._number_of)

    @property
    def hold_names(self) -> tuple[str, ...]:
        """Names under which pages are held now."""
        return tuple(name for name, count_P in self._named_holds.items() if count_P.any())

    def counts(self) -> PageCounts:
        """How many pages are in each state."""
        count = self._count
        return PageCounts(
            free=self.free_pages,
            parked=count[PageState.FREE] - self.free_pages,
            request=count[PageState.REQUEST],
            tree=count[PageState.TREE],
            copy=count[PageState.COPY],
            quarantined=count[PageState.QUARANTINED],
            retired=count[PageState.RETIRED],
        )

    # Requests

    def request_owner(self, rid: str) -> Owner:
        """The owner code of request `rid`; the first call makes it known, `forget_request` ends that."""
        number = self._number_of.get(rid)
        if number is None:
            number = self._next_number
            self._next_number += 1
            self._number_of[rid] = number
            self._rid_of[number] = rid
            self._pages_of[number] = 0
        return number << STATE_BITS | _REQUEST

    def owner_rid(self, page: int) -> str:
        """The request that owns `page`. Raises InvariantError if none does."""
        owner = int(self.owner_P[page])
        if owner & STATE_MASK != _REQUEST:
            raise InvariantError(
                f"cache: O1 page {page} is {self.describe(owner)}, expected a request's; {self.history(page)}"
            )
        return self._rid_of[owner >> STATE_BITS]

    @property
    def operation(self) -> int:
        """Number of the next operation."""
        return self._operation

    def taken_at(self, page: int) -> int:
        """Number of the operation that handed `page` out last; 0 = it never was."""
        return int(self._entered_SP[[PageState.REQUEST, PageState.COPY], page].max())

    def pages_of_request(self, rid: str) -> int:
        """How many pages `rid` owns; 0 for a request that never took any."""
        number = self._number_of.get(rid)
        return 0 if number is None else self._pages_of[number]

    def forget_request(self, rid: str) -> None:
        """The request is over. Raises InvariantError (O3) if it still owns pages: they would be lost for ever."""
        number = self._number_of.get(rid)
        if number is None:
            return
        if self._pages_of[number]:
            owner = number << STATE_BITS | _REQUEST
            lost = np.flatnonzero(self.owner_P == owner)
            raise InvariantError(
                f"cache: O3 request {rid} ended and still owns pages {lost[:16].tolist()} ({len(lost)} of them),"
                f" expected none; {self.history(int(lost[0]))}"
            )
        del self._number_of[rid], self._rid_of[number], self._pages_of[number]

    # Moves

    def take(self, owner: Owner, count: int, verb: str = "take") -> Pages:
        """Hand out `count` free pages to a request or a copy, low ids first while the pool is fresh.

        Raises InvariantError if there are fewer than `count`: look at `free_pages` first.
        """
        return self.take_each([(owner, count)], verb)

    def take_each(self, counts: Sequence[tuple[Owner, int]], verb: str = "take") -> Pages:
        """The same for several owners of one kind, of so many pages each: those of the first, then those of the second,
        and on. An operation for each. Raises as `take`: InvariantError. Cost: that for one, and 0.5 us an owner."""
        first, owner, each = self._operation, counts[0][0], [count for _, count in counts]
        state, count = owner & STATE_MASK, sum(each)
        if not _LEGAL[FREE_OWNER][state]:
            self._refuse(FREE_OWNER, owner, verb)
        if not 0 <= count <= self.free_pages:
            raise InvariantError(f"cache: {count} pages to take, expected 0 to the {self.free_pages} free ones")
        left = self.free_pages - count
        pages = self._stack[left : self.free_pages][::-1].copy()
        index = pages.astype(np.intp)
        self._check_owner(index, FREE_OWNER, owner, verb)
        if self.held_count and np.count_nonzero(self.hold_P[index]):
            page = int(pages[np.flatnonzero(self.hold_P[index])[0]])
            raise InvariantError(f"cache: page {page} is held, expected no holds when handed out; {self.history(page)}")
        self.free_pages = left
        if self._traces:
            self._trace_P[index] = 0
        self.owner_P[index] = np.repeat([owner for owner, _ in counts], each)
        self._operation = first + len(counts)
        self._entered_SP[state][index] = np.repeat(np.arange(first, self._operation), each)
        self._count[PageState.FREE] -= count
        self._count[state] += count
        for operation, (owner, own) in enumerate(counts, first):
            if state == _REQUEST:
                self._pages_of[owner >> STATE_BITS] += own
            self._log.append((operation, verb, FREE_OWNER, owner))
        return pages

    def move(self, pages: Pages, source: Owner, target: Owner, verb: str) -> None:
        """Move distinct `pages`, all of them owned by `source`, to `target` (owned, or FREE_OWNER).

        Raises InvariantError, with nothing changed, for a page with another owner, a page listed twice, or a move
        that LEGAL_MOVES does not have. Pages that become free go onto the stack unless they are held.
        """
        state = source & STATE_MASK
        if state == FREE_OWNER or not _LEGAL[state][target & STATE_MASK]:
            self._refuse(source, target, verb)
        if not len(pages):
            return
        index = self._index(pages)
        self._check_owner(index, source, target, verb)
        self._check_distinct(index, verb)
        self.owner_P[index] = target
        self._record(index, source, target, verb)
        if target == FREE_OWNER:
            self._push(pages if not self.held_count else pages[self.hold_P[index] == 0])

    def evict(self, taken: Sequence[tuple[int, Pages]]) -> None:
        """Free pages of several tree nodes, each named by its id, in one move."""
        if len(taken) == 1:
            ((node_id, pages),) = taken
            self.move(pages, tree_owner(node_id), FREE_OWNER, "evict")
            return
        taken = [(node_id, pages) for node_id, pages in taken if len(pages)]
        if not taken:
            return
        pages = np.concatenate([each for _, each in taken])
        index = self._index(pages)
        owners = np.repeat([tree_owner(node_id) for node_id, _ in taken], [len(each) for _, each in taken])
        wrong = self._owners(index) != owners
        if np.count_nonzero(wrong):
            first = int(wrong.argmax())
            self._wrong_owner(int(index[first]), int(owners[first]), FREE_OWNER, "evict")
        self._check_distinct(index, "evict")
        self.owner_P[index] = FREE_OWNER
        self._record(index, _TREE, FREE_OWNER, "evict")
        self._push(pages if not self.held_count else pages[self.hold_P[index] == 0])

    # Holds

    def hold(self, name: str, pages: Pages) -> Pages:
        """Add one hold called `name` to each of the distinct `pages`; returns those that had none before.

        Raises InvariantError for a free page: a hold cannot protect a page that may already have a new owner.
        """
        index = self._index(pages)
        states = self._owners(index) & STATE_MASK
        self._check_distinct(index, f"hold {name}")
        free = (states == PageState.FREE) | (states == PageState.PADDING)
        if np.count_nonzero(free):
            page = int(index[free.argmax()])
            if not page:
                self._no_such_page(page)
            raise InvariantError(f"cache: page {page} is FREE, expected an owner to hold it from; {self.history(page)}")
        named = self._named_holds.get(name)
        if named is None:
            named = self._named_holds[name] = np.zeros(self.page_count, np.int32)
        named[index] += 1
        fresh: Pages = pages[self.hold_P[index] == 0]
        self.hold_P[index] += 1
        self.held_count += len(fresh)
        return fresh

    def unhold(self, name: str, pages: Pages) -> Pages:
        """Take one hold called `name` off each of the distinct `pages`; returns those that have none left.

        Those of them without an owner become free at once. Raises InvariantError for a page without such a hold.
        """
        index = self._index(pages)
        self._owners(index)
        self._check_distinct(index, f"unhold {name}")
        named = self._named_holds.get(name)
        missing = np.ones(len(index), np.bool_) if named is None else named[index] == 0
        if named is None or missing.any():
            if not len(index):
                return pages
            page = int(index[missing.argmax()])
            raise InvariantError(
                f"cache: page {page} has no hold {name!r}, expected at least one; {self.history(page)}"
            )
        named[index] -= 1
        self.hold_P[index] -= 1
        bare: Pages = pages[self.hold_P[index] == 0]
        self.held_count -= len(bare)
        self._push(bare[self.owner_P[bare] == FREE_OWNER])
        return bare

    def holds_of(self, page: int) -> dict[str, int]:
        """The holds on one page by name."""
        return {name: int(count_P[page]) for name, count_P in self._named_holds.items() if count_P[page]}

    # Handoffs

    def trace(self, trace: PageTrace) -> None:
        """These pages came by a handoff, or were sent with one: the latest is told until a page is handed out again.
        Of the latest handoffs alone, and of pages that are here."""
        self._trace_count += 1
        self._traces[self._trace_count] = trace
        self._trace_P[trace.span.pages] = self._trace_count
        self._traces.pop(self._trace_count - TRACES_KEPT, None)

    def trace_of(self, page: int) -> PageTrace | None:
        """The latest handoff that moved this page, as far as it is known."""
        return self._traces.get(int(self._trace_P[page]))

    def traces_of(self, pages: Pages) -> list[PageTrace]:
        """The latest handoff of each of these pages, each once, the latest first."""
        numbers = np.unique(self._trace_P[pages])[::-1]
        return [trace for number in numbers.tolist() if (trace := self._traces.get(number)) is not None]

    # Words

    def describe(self, owner: Owner) -> str:
        """An owner code in words, as in `REQUEST(r7)`."""
        state = PageState(owner & STATE_MASK)
        number = owner >> STATE_BITS
        if state is PageState.REQUEST:
            return f"REQUEST({self._rid_of.get(number) or f'ended request #{number}'})"
        return f"{state.name}({number})" if number else state.name

    def history(self, page: int) -> str:
        """The last operation that brought `page` into each state, oldest first, its handoff and its holds."""
        log, lines = self._log, []
        entered = zip(PageState, self._entered_SP[:, page].tolist(), strict=True)
        for state, operation in sorted(entered, key=itemgetter(1)):
            if not operation:
                continue
            at = bisect_right(log, operation, key=itemgetter(0)) - 1
            if at >= 0:
                _, verb, source, target = log[at]
                lines.append(f"#{operation} {verb}: {self.describe(source)} -> {self.describe(target)}")
            else:
                lines.append(f"#{operation} became {state.name}, long ago")
        if (trace := self.trace_of(page)) is not None:
            lines.append(trace.words(page))
        holds = self.holds_of(page)
        return f"page {page}'s last operations: {'; '.join(lines) or 'none'}" + (f"; held by {holds}" if holds else "")

    def check(self) -> None:
        """O1, O4, O6 and the free stack against the states. Raises InvariantError. Cost: O(page_count)."""
        state_P = self.owner_P & STATE_MASK
        actual = np.bincount(state_P, minlength=len(PageState)).tolist()
        expected = [*self._count[: PageState.PADDING], 1, *self._count[PageState.PADDING + 1 :]]
        if actual != expected:
            raise InvariantError(f"cache: O4 pages by state are {actual}, expected {expected}")
        if self.owner_P[0] != PageState.PADDING:
            raise InvariantError(f"cache: O6 page 0 is {self.describe(int(self.owner_P[0]))}, expected PADDING")
        stack = self._stack[: self.free_pages]
        ready_P = (state_P == PageState.FREE) & (self.hold_P == 0)
        listed_P = np.zeros(self.page_count, np.bool_)
        listed_P[stack] = True
        if np.count_nonzero(ready_P) != self.free_pages or np.count_nonzero(listed_P != ready_P):
            stack, odd = np.sort(stack), np.flatnonzero(listed_P != ready_P)
            page = int(odd[0]) if len(odd) else int(stack[:-1][stack[1:] == stack[:-1]][0])
            raise InvariantError(
                f"cache: O1 free stack and free unheld pages differ at {odd[:16].tolist()}; {self.history(page)}"
            )
        total_P = sum(self._named_holds.values(), np.zeros(self.page_count, np.int32))
        if np.count_nonzero(total_P != self.hold_P) or np.count_nonzero(self.hold_P > 0) != self.held_count:
            raise InvariantError("cache: O1 holds by name do not sum to the holds per page")
        owned = {}
        if actual[PageState.REQUEST]:
            numbers, pages = np.unique(self.owner_P[state_P == PageState.REQUEST] >> STATE_BITS, return_counts=True)
            owned = dict(zip(numbers.tolist(), pages.tolist(), strict=True))
        counted = {number: count for number, count in self._pages_of.items() if count}
        if owned != counted:
            raise InvariantError(f"cache: O3 pages by request are {owned}, expected {counted}")

    # Inside

    def _index(self, pages: Pages) -> NDArray[np.intp]:
        if pages.dtype != np.int32 or pages.ndim != 1:
            raise InvariantError(f"cache: pages are {pages.dtype}[{pages.ndim}-d], expected a vector of int32")
        return pages.view(np.uint32).astype(np.intp)  # a negative id becomes a huge one, not one from the end

    def _owners(self, index: NDArray[np.intp]) -> NDArray[np.int64]:
        try:
            return self.owner_P[index]
        except IndexError:
            page = int(index[(index >= self.page_count).argmax()])
            self._no_such_page(page)

    def _no_such_page(self, page: int) -> NoReturn:
        named = page if page < 1 << 31 else page - (1 << 32)
        raise InvariantError(f"cache: O6 page {named} is named, expected 1 to {self.page_count - 1}")

    def _refuse(self, source: Owner, target: Owner, verb: str) -> NoReturn:
        words = f"{verb} from {self.describe(source)} to {self.describe(target)}"
        raise InvariantError(f"cache: {words} is no legal move (out of FREE by take alone)")

    def _check_owner(self, index: NDArray[np.intp], source: Owner, target: Owner, verb: str) -> None:
        wrong = self._owners(index) != source
        if np.count_nonzero(wrong):  # a fifth of the time of wrong.any()
            self._wrong_owner(int(index[wrong.argmax()]), source, target, verb)

    def _wrong_owner(self, page: int, source: Owner, target: Owner, verb: str) -> NoReturn:
        if not page:
            self._no_such_page(page)
        raise InvariantError(
            f"cache: O1 page {page} is {self.describe(int(self.owner_P[page]))}, expected {self.describe(source)}"
            f" to {verb} it to {self.describe(target)}; {self.history(page)}"
        )

    def _check_distinct(self, index: NDArray[np.intp], verb: str) -> None:
        """Raise if a page is listed twice: the last write of its mark wins, so the first does not read back."""
        count = len(index)
        if count < 2:
            return
        iota = self._iota[:count] if count <= self.page_count else np.arange(count)
        self._mark_P[index] = iota
        twice = self._mark_P[index] != iota
        if np.count_nonzero(twice):
            page = int(index[twice.argmax()])
            raise InvariantError(f"cache: O1 page {page} is listed twice in one {verb}; {self.history(page)}")

    def _record(self, index: NDArray[np.intp], source: Owner, target: Owner, verb: str) -> None:
        """Count the move and note it as the last one that brought these pages into the target's state."""
        count = len(index)
        source_state, target_state = source & STATE_MASK, target & STATE_MASK
        self._count[source_state] -= count
        self._count[target_state] += count
        if source_state == _REQUEST:
            self._pages_of[source >> STATE_BITS] -= count
        if target_state == _REQUEST:
            self._pages_of[target >> STATE_BITS] += count
        operation = self._operation
        self._operation = operation + 1
        self._entered_SP[target_state][index] = operation
        self._log.append((operation, verb, source, target))

    def _push(self, pages: Pages) -> None:
        """Put pages on the free stack, so that the next take hands them out in their present order."""
        end = self.free_pages + len(pages)
        self._stack[self.free_pages : end] = pages[::-1]
        self.free_pages = end
