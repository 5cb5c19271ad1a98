from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager

import pytest

from asynckv.abc import KVEntry
from asynckv.buffers.local.consumer import PendingSelect
from asynckv.buffers.lookup import LookupBuffer
from asynckv.tensors.blocks import KVMemory
from asynckv.transfers.queries import Query

QUERY = Query(b"12345678")
ENTRY = KVEntry(None, None, None, None, None, entry_id="it")


class Uses:
    """What a pending select did."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.pending = PendingSelect(self.take, self.borrow, QUERY, {})

    async def take(self, query: Query, into: Mapping[str, KVMemory]) -> KVEntry:
        assert query is QUERY and into == {}
        self.seen.append("taken")
        await asyncio.sleep(0)
        return ENTRY

    @asynccontextmanager
    async def borrow(
        self, query: Query, into: Mapping[str, KVMemory]
    ) -> AsyncIterator[KVEntry]:
        assert query is QUERY and into == {}
        self.seen.append("borrowed")
        try:
            yield ENTRY
        except LookupError:
            self.seen.append("failed")
            raise


async def test_awaiting_takes() -> None:
    uses = Uses()
    assert uses.seen == []
    assert await uses.pending is ENTRY
    assert uses.seen == ["taken"]


async def test_entering_borrows_and_hands_an_error_on() -> None:
    uses = Uses()
    with pytest.raises(LookupError):
        async with uses.pending as entry:
            assert entry is ENTRY
            raise LookupError
    assert uses.seen == ["borrowed", "failed"]


async def test_a_second_use_is_refused() -> None:
    uses = Uses()
    await uses.pending
    with pytest.raises(RuntimeError, match="used before"):
        await uses.pending
    with pytest.raises(RuntimeError, match="used before"):
        async with uses.pending:
            pass


async def test_one_that_is_forgotten_warns_as_a_coroutine_does(
    local: LookupBuffer,
) -> None:
    with pytest.warns(RuntimeWarning, match=r"drop_select\(...\) was never awaited"):
        local.drop_select([1])


async def test_one_that_was_used_in_any_way_does_not_warn(
    recwarn: pytest.WarningsRecorder,
) -> None:
    await Uses().pending
    Uses().pending.close()
    async with Uses().pending:
        pass
    task = asyncio.create_task(Uses().pending)
    task.cancel()
    await asyncio.wait({task})
    del task
    assert not recwarn.list


def test_entered_by_a_plain_with_it_says_what_to_write() -> None:
    pending = Uses().pending
    with pytest.raises(TypeError, match=r"write: async with drop_select\(...\) as"):
        with pending:  # type: ignore[attr-defined]
            pass
    assert repr(pending) == "<drop_select, not used yet>"
    pending.close()
    assert repr(pending) == "<drop_select, used>"


async def test_every_runner_of_coroutines_takes_it() -> None:
    assert issubclass(PendingSelect, Coroutine)
    assert await asyncio.create_task(Uses().pending) is ENTRY
    assert await asyncio.wait_for(Uses().pending, 10) is ENTRY
    assert list(await asyncio.gather(Uses().pending, Uses().pending)) == [ENTRY] * 2
    async with asyncio.TaskGroup() as group:
        task = group.create_task(Uses().pending)
    assert task.result() is ENTRY


async def test_a_task_cancelled_before_it_starts_takes_nothing() -> None:
    uses = Uses()
    task = asyncio.create_task(uses.pending)
    task.cancel()
    await asyncio.wait({task})
    assert uses.seen == []


async def test_closed_unused_it_stays_unused() -> None:
    uses = Uses()
    uses.pending.close()
    with pytest.raises(RuntimeError, match="used before"):
        await uses.pending
    assert uses.seen == []


async def test_closed_while_it_runs_it_ends() -> None:
    uses = Uses()
    uses.pending.send(None)
    uses.pending.close()
    with pytest.raises(RuntimeError, match="cannot reuse"):
        uses.pending.send(None)


async def test_leaving_what_was_never_entered_is_refused() -> None:
    pending = Uses().pending
    with pytest.raises(RuntimeError, match="never entered"):
        await pending.__aexit__(None, None, None)
    pending.close()
