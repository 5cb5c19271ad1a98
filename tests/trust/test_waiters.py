"""Ten thousand calls of ``drop_select`` that wait at once over 64 connections."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import random
import subprocess
import sys
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import torch

import asynckv
from asynckv.protocol.frames import Select
from asynckv.protocol.values import Limits
from asynckv.testing.blocked import until
from asynckv.testing.faults.hostile import open_hostile_peer

pytestmark = [pytest.mark.trust, pytest.mark.timeout(300)]

CONNECTIONS = 64
KEYS = 500
MAX_STATE_BYTES = 2048
PATIENCE_S = 60.0

Task = asyncio.Task[Any]
Line = list[tuple[int, Task]]


@contextlib.asynccontextmanager
async def served() -> AsyncIterator[tuple[asynckv.LookupBuffer, str]]:
    async with (
        asynckv.LookupBuffer("64MiB", drain_s=0) as buffer,
        asynckv.serve("tcp://127.0.0.1:0", lookup=buffer) as server,
    ):
        yield buffer, server.url


@contextlib.asynccontextmanager
async def connected(url: str) -> AsyncIterator[list[asynckv.KVLookupBuffer]]:
    async with contextlib.AsyncExitStack() as stack:
        yield [
            (await stack.enter_async_context(asynckv.connect(url))).lookup
            for _ in range(CONNECTIONS)
        ]


@contextlib.asynccontextmanager
async def ended(tasks: list[Task]) -> AsyncIterator[None]:
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


async def until_waiting(buffer: asynckv.LookupBuffer, count: int) -> None:
    def is_so() -> bool:
        return buffer.statistics().waiting_selects == count

    await until(is_so, timeout_s=PATIENCE_S)


async def value_of(lookup: asynckv.KVLookupBuffer, key: int) -> int:
    entry = await lookup.drop_select([key])
    assert isinstance(entry.key, torch.Tensor)
    return int(entry.key)


async def lines_of(
    buffer: asynckv.LookupBuffer,
    lookups: list[asynckv.KVLookupBuffer],
    count: int,
) -> list[Line]:
    """Let them wait, one for each key at a time: who is where in its line is known."""
    lines: list[Line] = [[] for _ in range(KEYS)]
    for place in range(count // KEYS):
        for key, line in enumerate(lines):
            lookup = lookups[(key + place) % CONNECTIONS]
            line.append((place, asyncio.create_task(value_of(lookup, key))))
        await until_waiting(buffer, (place + 1) * KEYS)
    return lines


async def test_all_are_served_in_order_though_half_are_cancelled(
    scale: Any, figures: Callable[[str], None]
) -> None:
    chance = random.Random(2)
    async with served() as (buffer, url), connected(url) as lookups:
        lines = await lines_of(buffer, lookups, scale.waiters)
        everyone = [task for line in lines for _, task in line]
        async with ended(everyone):
            given_up = set(chance.sample(everyone, len(everyone) // 2))
            for task in given_up:
                task.cancel()
            left = [[t for _, t in line if t not in given_up] for line in lines]
            await until_waiting(buffer, sum(map(len, left)))
            for number in range(max(map(len, left))):
                for key, line in enumerate(left):
                    if number < len(line):
                        value = torch.tensor(number)
                        await buffer.insert([key], None, value, None, None)
            async with asyncio.timeout(PATIENCE_S):
                found = [await asyncio.gather(*line) for line in left]
            await until_waiting(buffer, 0)
        now = buffer.statistics()
    assert all(task.cancelled() for task in given_up)
    assert found == [list(range(len(line))) for line in left]
    assert (now.entries, now.leased, now.acknowledged) == (0, 0, now.inserted)
    figures(
        f"{len(everyone)} waiters over {CONNECTIONS} links, {len(given_up)} cancelled, "
        f"{now.acknowledged} served in order, 0 lost"
    )


async def test_none_is_lost_when_they_are_cancelled_while_they_are_served(
    scale: Any, figures: Callable[[str], None]
) -> None:
    chance = random.Random(3)
    count = scale.waiters // 2
    async with served() as (buffer, url), connected(url) as lookups:
        lines = await lines_of(buffer, lookups, count)
        everyone = [task for line in lines for _, task in line]
        async with ended(everyone):
            chance.shuffle(everyone)
            for number, task in enumerate(everyone):
                await buffer.insert(
                    [number % KEYS], None, torch.tensor(number), None, None
                )
                if chance.random() < 0.5:
                    task.cancel()
            await until_waiting(buffer, 0)
            await asyncio.wait(everyone)
            # Who was served says so behind its answer.
            await until(lambda: not buffer.statistics().leased, timeout_s=PATIENCE_S)
        taken = [task.result() for task in everyone if not task.cancelled()]
        left = []
        while buffer.statistics().entries:
            left.append(int((await buffer.drop_select()).key))  # type: ignore[arg-type]
    assert sorted(taken + left) == list(range(count))
    figures(f"{count} waiters, {len(taken)} served and {len(left)} left, 0 lost")


@contextlib.contextmanager
def traced() -> Iterator[Callable[[], int]]:
    """Count the bytes that Python holds more than at the beginning.

    Without the set of all tasks, which grows by leaps and never shrinks.
    """
    gc.collect()
    tracemalloc.start()
    of_tasks = tracemalloc.Filter(inclusive=False, filename_pattern="*/_weakrefset.py")

    def growth() -> int:
        gc.collect()
        snapshot = tracemalloc.take_snapshot().filter_traces([of_tasks])
        return sum(trace.size for trace in snapshot.traces)

    try:
        yield growth
    finally:
        tracemalloc.stop()


class Nothing:
    """A buffer that keeps nothing of who waits, but the future that he waits for."""

    def drop_select(self, tokens: list[int]) -> asyncio.Future[Any]:
        return asyncio.get_running_loop().create_future()


async def bytes_of_tasks(count: int) -> float:
    """What a task of :func:`value_of` takes, which is the caller's."""
    future = sys.getsizeof(asyncio.get_running_loop().create_future())
    nothing: Any = Nothing()
    tasks: list[Task] = []
    async with ended(tasks):
        with traced() as growth:
            tasks += [asyncio.create_task(value_of(nothing, 0)) for _ in range(count)]
            await asyncio.sleep(0)
            return growth() / count - future


async def bytes_at_the_server(count: int) -> float:
    """Peers that keep nothing ask, so all that grows is the server's."""
    async with served() as (buffer, url), contextlib.AsyncExitStack() as stack:
        peers = [
            await stack.enter_async_context(open_hostile_peer(url, limits=Limits()))
            for _ in range(CONNECTIONS)
        ]
        with traced() as growth:
            for number in range(count):
                row, column = divmod(number, CONNECTIONS)
                await peers[column].send(1 + 2 * row, Select(has_key=True), bytes(8))
            await until_waiting(buffer, count)
            return growth() / count


async def bytes_in_all(count: int) -> float:
    tasks: list[Task] = []
    async with served() as (buffer, url), connected(url) as lookups, ended(tasks):
        with traced() as growth:
            for _, lookup in zip(range(count), itertools.cycle(lookups)):
                tasks.append(asyncio.create_task(value_of(lookup, 0)))
            await until_waiting(buffer, count)
            return growth() / count


async def weigh(count: int) -> tuple[float, float, float]:
    """Bytes of one that waits: at the server, at the client, and of his task."""
    task = await bytes_of_tasks(count)
    server = await bytes_at_the_server(count)
    return server, await bytes_in_all(count) - server - task, task


@pytest.mark.multiprocess
def test_one_that_waits_costs_at_most_two_kibibytes(
    scale: Any, figures: Callable[[str], None]
) -> None:
    """On both sides together; not counted are the caller's task, and the tokens,
    which all of them share here. In a process of its own: what others did to the
    tables of ours would be weighed, too."""
    command = (sys.executable, __file__, str(scale.waiters))
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    server, client, task = map(float, ran.stdout.split())
    figures(
        f"a waiter of {scale.waiters} holds {server:.0f} bytes at the server and "
        f"{client:.0f} at the client, beside a task of {task:.0f}"
    )
    assert 0 < server + client <= MAX_STATE_BYTES


if __name__ == "__main__":
    weighed = asyncio.run(weigh(int(sys.argv[1])))
    sys.stdout.write(" ".join(map(str, weighed)))
