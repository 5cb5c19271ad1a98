from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import anyio
import pytest

from asynckv import (
    BufferClosed,
    EntryAborted,
    EntryConflict,
    KVEntry,
    LeaseLost,
    LookupBuffer,
    TensorSpec,
    WrongLoop,
)
from asynckv.testing import until, use_across_tasks
from asynckv.testing.lookup_checks.values import (
    MIB,
    borrow,
    cancelled,
    expect_error,
    insert,
    noise,
    started,
)

SPECS = {name: TensorSpec((8,), "uint8") for name in ("key", "value")}


def full_buffer(**options: Any) -> LookupBuffer:
    return LookupBuffer(100, drain_s=0, **options)


@pytest.fixture
async def full() -> AsyncIterator[LookupBuffer]:
    """One of few bytes."""
    async with full_buffer() as buffer:
        yield buffer


async def ended(*tasks: asyncio.Task[Any]) -> list[Any]:
    return await asyncio.gather(*tasks, return_exceptions=True)


async def test_sent_again_an_entry_goes_on_where_it_was_when_it_was_withdrawn() -> None:
    async with LookupBuffer(MIB, drain_s=0) as buffer:
        name = await insert(buffer, 1, entry_id="a", deliveries=2)
        assert (await buffer.drop_select([1])).attempt == 1
        assert await buffer.withdraw(name)
        await insert(buffer, 1, entry_id="a", deliveries=2)
        assert (await buffer.drop_select([1])).attempt == 2
        assert buffer.statistics().entries == 0


async def test_who_takes_from_a_models_buffer_here_finds_what_was_put_there() -> None:
    async with LookupBuffer(1000, fingerprint="a model", drain_s=0) as buffer:
        waiting = await started(buffer.drop_select([1]))
        await insert(buffer, 1, entry_id="first")
        await insert(buffer, 2, entry_id="second")
        assert await buffer.peek([2]) == 1
        async with asyncio.timeout(5):
            assert (await waiting).entry_id == "first"
            assert (await buffer.drop_select([2])).entry_id == "second"


async def test_what_was_taken_before_it_had_room_was_inserted(
    full: LookupBuffer,
) -> None:
    await insert(full, 1, 80)
    waiting = await started(insert(full, 2, 80))
    await full.drop_select([2])
    await waiting
    now = full.statistics()
    assert (now.direct, now.acknowledged, now.inserted) == (1, 1, 2)


async def test_an_insert_wakes_one_of_1_000_and_runs_no_other() -> None:
    async with LookupBuffer(MIB, drain_s=0) as buffer:
        tasks = [asyncio.create_task(buffer.drop_select([7, n])) for n in range(1_000)]
        await until(lambda: buffer.statistics().waiting_selects == 1_000)
        await buffer.insert([7, 424], None, None, None, None)
        await tasks[424]
        await asyncio.sleep(0)
        assert sum(task.done() for task in tasks) == 1
        buffer.abort()
        results = await ended(*tasks)
        assert sum(isinstance(r, BufferClosed) for r in results) == 999


async def test_a_put_that_is_still_under_way_is_not_committed() -> None:
    specs = {"key": TensorSpec((8 * MIB,), "uint8")}
    async with LookupBuffer(16 * MIB, drain_s=0) as buffer:
        with pytest.raises(ValueError, match="not put"):
            async with buffer.open_insert([1], None, specs) as writer:
                putting = asyncio.create_task(writer.put("key", noise(8 * MIB)))
                await until(lambda: putting.get_coro().cr_await is not None)  # type: ignore[union-attr]
        await ended(putting)
        assert buffer.statistics().used_bytes == 0


@pytest.mark.parametrize("gives_back", [False, True])
async def test_a_retry_waits_for_what_is_only_in_a_consumers_hands(
    full: LookupBuffer, *, gives_back: bool
) -> None:
    await insert(full, 9, 80)
    first = await started(insert(full, 1, entry_id="it"))
    leave = asyncio.Event()
    holding = await started(borrow(full, 1, leave, error=gives_back))
    await cancelled(first)
    retry = await started(insert(full, 1, entry_id="it"))
    assert not retry.done()
    leave.set()
    await ended(holding)
    if gives_back:
        await full.drop_select([9])
    assert await retry == "it"
    assert full.statistics().direct == 1
    assert full.statistics().entries == 1  # what filled it, or the retry


async def test_a_cancelled_direct_insert_sends_its_consumer_back_to_waiting() -> None:
    async with LookupBuffer(9 * MIB, drain_s=0) as buffer:
        await insert(buffer, 9, 8 * MIB)
        first = await started(insert(buffer, 1, 8 * MIB))
        select = asyncio.create_task(buffer.drop_select([1]))
        await until(lambda: buffer.statistics().direct == 1)
        await cancelled(first)
        await until(lambda: buffer.statistics().waiting_selects == 1)
        assert buffer.statistics().outside_bytes == 0
        await insert(buffer, 1)
        assert (await select).attempt == 1


async def test_closing_lets_consumers_take_what_is_left() -> None:
    buffer = LookupBuffer(1000, drain_s=30)
    await insert(buffer, 1)
    closing = await started(buffer.aclose())
    with pytest.raises(BufferClosed):
        await insert(buffer, 2)
    assert not closing.done()
    await buffer.drop_select([1])
    await closing


async def test_a_cancelled_close_leaves_nobody_waiting() -> None:
    buffer = LookupBuffer(1000, drain_s=30)
    await insert(buffer, 1)
    select = await started(buffer.drop_select([2]))
    await cancelled(await started(buffer.aclose()))
    with pytest.raises(BufferClosed):
        await select
    assert buffer.statistics().used_bytes == 0


async def test_a_cancel_ends_the_drain_and_what_is_left_is_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "asynckv")
    buffer = LookupBuffer(1000, drain_s=30)
    await insert(buffer, 1)
    closing = await started(buffer.aclose())
    with anyio.fail_after(5):
        while not closing.done():
            closing.cancel()
            await asyncio.sleep(0)
    assert closing.cancelled() and buffer.statistics().dropped == 1
    assert "1 entries that nobody took leave with the buffer" in caplog.text


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_where_many_entries_leave_at_the_end_others_have_their_turn_in_between(
    is_cancelled: bool,
) -> None:
    buffer = LookupBuffer(MIB, drain_s=0)
    for number in range(400):
        await insert(buffer, number)
    closing = asyncio.create_task(buffer.aclose())
    counts = set[int]()

    def has_ended() -> bool:
        counts.add(buffer.statistics().entries)
        if is_cancelled and len(counts) == 3:
            closing.cancel()
        return closing.done()

    await until(has_ended)
    assert len(counts) > 3 and buffer.statistics().dropped == 400
    assert closing.cancelled() is is_cancelled


async def test_equal_inserts_under_one_id_at_once_all_succeed(
    full: LookupBuffer,
) -> None:
    await insert(full, 9, 80)
    inserts = [await started(insert(full, 1, entry_id="a")) for _ in range(3)]
    other = await started(insert(full, 2, entry_id="a"))
    await full.drop_select([9])
    assert await asyncio.gather(*inserts) == ["a"] * 3
    with pytest.raises(EntryConflict):
        await other
    assert full.statistics().inserted == 2


async def test_an_insert_goes_on_when_the_other_one_under_its_id_is_cancelled(
    full: LookupBuffer,
) -> None:
    await insert(full, 9, 80)
    first = await started(insert(full, 1, entry_id="a"))
    second = await started(insert(full, 2, entry_id="a"))
    await cancelled(first)
    await full.drop_select([9])
    await second
    assert (await full.drop_select([2])).entry_id == "a"


async def test_closing_is_bounded_and_may_be_repeated() -> None:
    buffer = LookupBuffer(1000, drain_s=0.01)
    await insert(buffer, 1)
    gone = await started(buffer.taken(await insert(buffer, 2)))
    await asyncio.gather(buffer.aclose(), buffer.aclose())
    error = await expect_error(EntryAborted, lambda: gone)
    assert error.reason == "closed"
    await buffer.aclose()


@pytest.mark.both_loops
async def test_an_abort_ends_every_wait_in_every_state() -> None:
    buffer = full_buffer()
    await insert(buffer, 9, 60)
    leave = asyncio.Event()
    waiting = await started(insert(buffer, 1))
    direct = await started(insert(buffer, 2))
    holding = await started(borrow(buffer, 2, leave))
    select = await started(buffer.drop_select([7]))
    stream = await started(insert_stream(buffer, 3))
    buffer.abort()
    for task in (waiting, direct, select, stream):
        await expect_error(BufferClosed, asyncio.wait_for, task, 10)
    leave.set()
    await holding  # what an application holds whole may still be acknowledged
    now = buffer.statistics()
    assert (now.used_bytes, now.outside_bytes, now.entries) == (0, 0, 0)


async def insert_stream(buffer: LookupBuffer, token: int) -> None:
    async with buffer.open_insert([token], None, SPECS):
        raise AssertionError("there is no room")


def test_it_can_be_aborted_after_the_end_of_its_loop() -> None:
    buffer = full_buffer()
    asyncio.run(insert(buffer, 1, 60))
    buffer.abort()
    now = buffer.statistics()
    assert buffer.is_closed and (now.used_bytes, now.entries) == (0, 0)


def test_who_waits_for_room_learns_of_an_abort_while_the_loop_stood_still() -> None:
    async def filled() -> asyncio.Task[Any]:
        await insert(buffer, 1, 60)
        return await started(insert(buffer, 2, 60))

    buffer = full_buffer()
    with asyncio.Runner() as runner:
        waiting = runner.run(filled())
        buffer.abort()
        runner.run(expect_error(BufferClosed, asyncio.wait_for, waiting, 10))


async def test_an_abort_ends_streams_on_both_sides() -> None:
    buffer = LookupBuffer(1000)
    with pytest.raises(EntryAborted, match="closed"):
        async with buffer.open_insert([1], None, SPECS) as writer:
            read = await started(read_stream(buffer))
            plain = await started(buffer.drop_select([1]))
            buffer.abort()
            await expect_error(EntryAborted, lambda: read)
            await expect_error(BufferClosed, lambda: plain)
            await writer.put("key", noise(8))
    assert buffer.statistics().used_bytes == 0


async def read_stream(buffer: LookupBuffer) -> None:
    async with buffer.open_drop_select([1]) as stream:
        async for _ in stream:
            pass


async def test_it_may_be_entered_in_one_task_and_left_in_another() -> None:
    buffer = LookupBuffer(1000, drain_s=0)

    async def use(_: LookupBuffer) -> None:
        await insert(buffer, 1)
        await use_across_tasks(buffer.drop_select([1]))

    await use_across_tasks(buffer, use)


@pytest.mark.parametrize(
    "use",
    [
        lambda buffer: insert(buffer, 1),
        lambda buffer: buffer.peek([1]),
        lambda buffer: buffer.taken("mine"),
        lambda buffer: buffer.withdraw("mine"),
    ],
    ids=["insert", "peek", "taken", "withdraw"],
)
def test_it_belongs_to_the_loop_that_used_it_first(
    use: Callable[[LookupBuffer], Coroutine[Any, Any, Any]],
) -> None:
    buffer = LookupBuffer(1000)
    asyncio.run(insert(buffer, 1, ttl_s=None, entry_id="mine"))
    with pytest.raises(WrongLoop):
        asyncio.run(use(buffer))
    buffer.pool.close()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"max_deliver": 0}, ValueError),
        ({"max_deliver": math.nan}, TypeError),
        ({"max_bytes": "much"}, ValueError),
        ({"max_hold_s": 0}, ValueError),
        ({"max_hold_s": -1}, ValueError),
        ({"max_hold_s": math.nan}, ValueError),
        ({"max_hold_s": "5"}, TypeError),
        ({"drain_s": -1}, ValueError),
        ({"drain_s": math.nan}, ValueError),
    ],
)
def test_options_are_checked(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=rf"{next(iter(options))} is|size"):
        LookupBuffer(**options)


async def stream(buffer: LookupBuffer) -> None:
    async with buffer.open_insert([1], None, {}, entry_id="it"):
        pass


async def test_a_streaming_insert_waits_for_the_id_to_be_decided(
    full: LookupBuffer,
) -> None:
    await insert(full, 9, 80)
    first = await started(insert(full, 1, entry_id="it"))
    second, third = await started(stream(full)), await started(stream(full))
    assert not second.done() and full.statistics().waiting_inserts == 1
    await cancelled(first)
    await second
    with pytest.raises(EntryConflict, match="'it' is known already"):
        await third


async def test_cancelled_while_it_waits_for_the_id_it_leaves_nothing(
    full: LookupBuffer,
) -> None:
    async with full.open_insert([1], None, {}, entry_id="it"):
        waiting = await started(stream(full))
        await cancelled(waiting)
    assert full.statistics().entries == 1
    assert await full.withdraw("it")
    assert full.statistics().waiting_inserts == 0


async def test_closing_ends_who_waits_for_the_id(full: LookupBuffer) -> None:
    await insert(full, 9, 80)
    first = await started(insert(full, 1, entry_id="it"))
    second = await started(stream(full))
    await full.aclose()
    errors = [type(error) for error in await ended(first, second)]
    assert errors == [BufferClosed] * 2


async def test_tokens_alone_that_have_no_room_are_charged_until_taken() -> None:
    async with LookupBuffer(8, drain_s=0) as buffer:
        await buffer.insert([1], None, None, None, None)
        waiting = await started(buffer.insert([2], None, None, None, None))
        async with buffer.drop_select([2]):
            assert buffer.statistics().outside_bytes == 8
        await waiting
        assert buffer.statistics().outside_bytes == 0


class Crowd:
    """Random callers of one small buffer, cancelled at random."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.buffer = LookupBuffer(600, max_deliver=3, max_hold_s=60, drain_s=0)
        self.tasks: list[asyncio.Task[Any]] = []

    def choose(self) -> Coroutine[Any, Any, Any]:
        token, leave = self.random.randrange(3), asyncio.Event()
        if self.random.random() < 0.5:
            leave.set()
        error = self.random.random() < 0.5
        nbytes, ttl_s = self.random.randrange(400), self.random.choice([0, 600, None])
        deliveries = self.random.randint(1, 2)
        options = {"ttl_s": ttl_s, "deliveries": deliveries}
        name = f"id {self.random.randrange(8)}"
        kinds: list[Callable[[], Coroutine[Any, Any, Any]]] = [
            lambda: insert(self.buffer, token, nbytes, **options),
            lambda: insert(self.buffer, token, 90, entry_id=name, **options),
            lambda: self.take(token),
            lambda: borrow(self.buffer, token, leave, error),
            lambda: self.buffer.withdraw(name),
            lambda: self.write(token, leave, error),
            lambda: self.read(token, leave, error),
        ]
        return self.random.choice(kinds)()

    async def take(self, token: int) -> KVEntry:
        return await self.buffer.drop_select([token])

    async def write(self, token: int, leave: asyncio.Event, error: bool) -> None:
        async with self.buffer.open_insert([token], None, SPECS) as writer:
            for name in SPECS:
                await writer.put(name, noise(8))
            if error:
                await leave.wait()
                raise LookupError("the application fails")

    async def read(self, token: int, leave: asyncio.Event, error: bool) -> None:
        async with self.buffer.open_drop_select([token]) as stream:
            async for _ in stream:
                if error:
                    await leave.wait()
                    raise LookupError("the application fails")

    async def step(self) -> None:
        if self.tasks and self.random.random() < 0.3:
            self.random.choice(self.tasks).cancel()
        else:
            self.tasks.append(asyncio.create_task(self.choose()))
        for _ in range(self.random.randrange(4)):
            await asyncio.sleep(0)
        self.check()

    def check(self) -> None:
        """Bytes charged are those of the entries that are there."""
        entries = self.buffer.ledger.table.entries.values()
        now = self.buffer.statistics()
        inside = [e.nbytes for e in entries if e.in_arena]
        outside = [e.nbytes for e in entries if e.is_outside]
        assert now.used_bytes == sum(inside) <= now.max_bytes
        assert now.outside_bytes == sum(outside)


@pytest.mark.parametrize("seed", range(20))
async def test_bytes_are_exact_after_any_interleaving(seed: int) -> None:
    crowd = Crowd(seed)
    for _ in range(200):
        await crowd.step()
    crowd.buffer.abort()
    for task in crowd.tasks:
        if crowd.random.random() < 0.5:
            task.cancel()
    _, left = await asyncio.wait(crowd.tasks, timeout=0.05)
    for task in left:  # those that hold an entry for ever
        task.cancel()
    await ended(*crowd.tasks)
    now = crowd.buffer.statistics()
    assert (now.used_bytes, now.outside_bytes, now.entries) == (0, 0, 0)
    assert (now.waiting_selects, now.waiting_inserts) == (0, 0)
    errors = {type(e) for e in await ended(*crowd.tasks) if isinstance(e, Exception)}
    known = {LookupError, BufferClosed, EntryAborted, EntryConflict, LeaseLost}
    assert errors <= known
