"""Tokens on their way to the answer that waits for them: at once, out of the loop's own step, or one turn later."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from serinus.core.errors import RequestError
from serinus.core.request import TokenDelta
from serinus.front.client import AnswerLost, DeltaQueue, EngineClient, EngineDown

Story = Callable[[DeltaQueue], Awaitable[None]]


def tell(story: Story) -> None:
    async def told() -> None:
        await story(DeltaQueue(EngineClient("ipc:///nowhere"), ("r",)))

    asyncio.run(told())


def delta(token: int) -> TokenDelta:
    return TokenDelta(rid="r", token_ids=(token,))


def come(queue: DeltaQueue, *tokens: int) -> None:
    """These tokens come in one frame."""
    due = [queue.put(delta(token)) for token in tokens]
    assert due == [True, *[False] * (len(tokens) - 1)], "delivered once a frame"
    queue.deliver()


async def turn() -> None:
    """As many turns of the loop as a task needs to go on."""
    loop = asyncio.get_running_loop()
    for _ in range(3):
        due = loop.create_future()
        loop.call_soon(due.set_result, None)
        await due


def test_what_is_taken_at_once_wakes_no_task() -> None:
    async def story(queue: DeltaQueue) -> None:
        seen: list[int] = []

        def at_once(deltas: list[TokenDelta]) -> bool:
            seen.extend(token for each in deltas for token in each.token_ids)
            return 3 not in seen

        waiting = asyncio.ensure_future(queue.take(at_once))
        await turn()
        come(queue, 1, 2)
        assert seen == [1, 2], "before the loop's next turn"
        await turn()
        assert not waiting.done()
        come(queue, 3)
        assert await waiting == [], "it has them; its consumer is to look"
        come(queue, 4)
        assert [each.token_ids for each in await queue.take(at_once)] == [(4,)], "what came while none waited"

    tell(story)


def test_an_error_at_once_is_raised_where_it_is_waited_for() -> None:
    async def story(queue: DeltaQueue) -> None:
        def refuse(deltas: list[TokenDelta]) -> bool:
            raise RequestError("no")

        waiting = asyncio.ensure_future(queue.take(refuse))
        await turn()
        come(queue, 1)
        with pytest.raises(RequestError, match="no"):
            await waiting

        def broken(deltas: list[TokenDelta]) -> bool:
            raise ZeroDivisionError

        other = DeltaQueue(EngineClient("ipc:///nowhere"), ("r",))
        waiting = asyncio.ensure_future(other.take(broken))
        await turn()
        other.put(delta(1))
        with pytest.raises(ZeroDivisionError):  # for the loop's own log
            other.deliver()
        with pytest.raises(AnswerLost):
            await waiting

    tell(story)


def test_a_failure_and_a_client_that_left_end_the_wait() -> None:
    async def story(queue: DeltaQueue) -> None:
        taken: list[TokenDelta] = []

        def at_once(deltas: list[TokenDelta]) -> bool:
            taken.extend(deltas)
            return True

        waiting = asyncio.ensure_future(queue.take(at_once))
        await turn()
        come(queue, 1)
        queue.fail(EngineDown("gone"))
        assert not queue.put(delta(2)), "what comes after a gap continues nothing"
        queue.deliver()
        with pytest.raises(EngineDown, match="gone"):
            await waiting
        assert [each.token_ids for each in taken] == [(1,)]

        left = DeltaQueue(EngineClient("ipc:///nowhere"), ("r",))
        waiting = asyncio.ensure_future(left.take(at_once))
        await turn()
        left.put(delta(7))
        left.leave()
        left.deliver()
        assert await waiting == []
        assert left.gone
        assert len(taken) == 1, "nothing is rendered for a client that is gone"

    tell(story)
