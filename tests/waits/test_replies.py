from __future__ import annotations

import asyncio

import pytest

from asynckv.errors import PeerLost
from asynckv.testing.blocked import until_blocked
from asynckv.waits.replies import Reply


async def test_the_first_answer_counts() -> None:
    answer: Reply[int] = Reply()
    answer.give(1)
    answer.give(2)
    answer.fail(PeerLost("cut"))
    answer.check()
    assert answer.is_in and await answer == 1


async def test_a_failure_is_raised_by_who_waits_and_who_looks() -> None:
    answer: Reply[int] = Reply()
    answer.check()
    answer.fail(PeerLost("cut"))
    answer.give(1)
    with pytest.raises(PeerLost, match="cut"):
        answer.check()
    with pytest.raises(PeerLost, match="cut"):
        await answer


async def test_what_is_not_awaited_any_more_is_in() -> None:
    answer: Reply[int] = Reply()

    async def wait() -> int:
        return await answer

    task = asyncio.create_task(wait())
    await until_blocked(task)
    task.cancel()
    await asyncio.wait({task})
    answer.fail(PeerLost("cut"))
    answer.check()
    assert answer.is_in
