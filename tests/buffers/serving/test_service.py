"""What a server keeps for its peers: how much, and for how long."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any

import pytest
import torch

from asynckv import (
    EntryAborted,
    LookupBuffer,
    Overloaded,
    StoreBuffer,
    connect,
    serve,
)
from asynckv.buffers.serving import service
from asynckv.buffers.serving.service import (
    REQUEST_NBYTES,
    SILENCE_S,
    Service,
    Silence,
    WaitingBytes,
)
from asynckv.links.link import LinkStream
from asynckv.links.streams import StreamHandler
from asynckv.protocol.frames import OpeningFrame, Taken
from asynckv.testing import until, until_blocked
from asynckv.testing.expectations import only
from harness.link_pairs import Hearer, dialled, linked


class ServiceOfNothing(Service):
    def open(
        self, stream: LinkStream, frame: OpeningFrame, body: bytes
    ) -> StreamHandler | None:
        return None

    async def wait_idle(self) -> None:
        """Nothing is ever under way."""


async def test_what_a_task_keeps_is_given_back_at_its_end() -> None:
    async with linked("mem://") as pair:
        service, kept = ServiceOfNothing(pair.far), WaitingBytes(100).for_link().inserts
        going, begun = asyncio.Event(), list[str]()

        async def go() -> None:
            begun.append("one")
            await going.wait()

        task = service.run_kept(kept, 50, go, "one that keeps much")
        await until_blocked(task)
        with pytest.raises(Overloaded):
            service.run_kept(kept, 1, go, "one too many")
        assert begun == ["one"] and not kept.fits(1)
        going.set()
        await service.wait_ended()
        await asyncio.sleep(0)
        assert kept.fits(50) and not kept.fits(51)


async def test_each_time_that_its_last_task_has_ended_it_says_so() -> None:
    async with linked("mem://") as pair:
        service, ended = ServiceOfNothing(pair.far), list[bool]()
        service.call_when_ended(lambda: ended.append(service.has_ended))
        for _ in range(2):
            service.run(asyncio.sleep(0), "one that ends")
            service.run(asyncio.sleep(60), "one that would not")
            await asyncio.sleep(0.01)
            assert not service.has_ended
            service.abort()
            await service.wait_ended()
            await asyncio.sleep(0)
        assert ended == [True, True]


class Listener:
    """What has come of each transfer, and what was told."""

    def __init__(self) -> None:
        self.landed: dict[int, int] = {}
        self.told: list[Exception] = []
        self.is_working = False
        self.silence = Silence(
            lambda: dict(self.landed),
            self.told.append,
            is_working=lambda: self.is_working,
        )


async def test_a_writer_that_says_nothing_has_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service, "SILENCE_S", 0.01)
    listener = Listener()
    await until(lambda: bool(listener.told))
    (error,) = listener.told
    assert isinstance(error, EntryAborted) and error.reason == "producer"


@pytest.fixture
async def listener() -> Listener:
    return Listener()


GROWING = ({1: 5}, {1: 7}, {1: 7, 2: 1}, {1: 7, 2: 1})
"""What has landed at each look: the last one shows nothing new."""


@pytest.mark.parametrize(
    ("landed", "working"),
    [
        (GROWING, [False] * 4),
        ([{1: 0}], [False]),  # promised, and no byte of it has come
        ([{}] * 3, [True, True, False]),
    ],
)
async def test_a_tensor_that_grows_or_is_worked_at_is_no_silence(
    listener: Listener, landed: Sequence[dict[int, int]], working: Sequence[bool]
) -> None:
    for listener.landed, listener.is_working in zip(landed, working, strict=True):
        assert not listener.told
        listener.silence._fall_silent()
    assert len(listener.told) == 1
    listener.silence.stop()


async def test_who_is_heard_has_the_whole_time_again() -> None:
    silence = Listener().silence
    first = silence._timer
    silence.note_progress()
    assert first.cancelled() and not silence._timer.cancelled()
    assert silence._timer.when() >= silence._loop.time() + SILENCE_S - 1
    silence.stop()


async def test_what_is_stopped_listens_no_more_whoever_is_heard() -> None:
    silence = Listener().silence
    silence.stop()
    silence.note_progress()
    assert silence._timer.cancelled()


KIB = 1024

LONG = 128 * KIB // 8 - 256
"""Tokens of which a request keeps 128 KiB in all."""


@contextlib.asynccontextmanager
async def tasks_of(
    *coroutines: Coroutine[Any, Any, Any],
) -> AsyncIterator[list[asyncio.Task[Any]]]:
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


def tokens(first: int, count: int = LONG) -> torch.Tensor:
    ids = torch.zeros(count, dtype=torch.int64)
    ids[0] = first
    return ids


def test_one_link_has_a_half_and_all_have_no_more_than_the_whole() -> None:
    waiting = WaitingBytes(100)
    one, two, three = (waiting.for_link().queries for _ in range(3))
    with pytest.raises(Overloaded, match="51 more"):
        one.take(51)
    for kept in (one, two):
        kept.take(50)
    assert not three.fits(1) and waiting.used_bytes == 100
    one.give(1)
    assert three.fits(1) and not two.fits(1)


def test_queries_that_wait_keep_out_no_insert() -> None:
    kept = WaitingBytes(100).for_link()
    kept.queries.take(50)
    kept.inserts.take(50)


async def test_a_query_too_many_is_refused_until_another_ends(
    local: LookupBuffer,
) -> None:
    url = "tcp://127.0.0.1:0"
    async with (
        serve(url, lookup=local, max_waiting_bytes="512KiB") as server,
        connect(server.url) as peer,
        connect(server.url) as other,
    ):
        selects = [peer.lookup.drop_select(tokens(n)) for n in (1, 2)]
        async with tasks_of(*map(wait_for, selects)) as waiting:
            await until(lambda: server.waiting_bytes == 256 * KIB)
            with pytest.raises(Overloaded, match="max_waiting_bytes"):
                await peer.lookup.drop_select(tokens(3))
            assert server.refused_requests == 1
            await local.insert([5], None, None, None, None)
            assert (await other.lookup.drop_select([5])).matched_tokens == 1
            waiting[0].cancel()
            await until(lambda: server.waiting_bytes == 128 * KIB)
            await local.insert(tokens(2), None, None, None, None)
            await waiting[1]
        await until(lambda: server.waiting_bytes == 0)


async def wait_for(select: Any) -> None:
    await select


@pytest.mark.parametrize("streaming", [False, True])
async def test_an_insert_too_many_is_refused_and_the_others_go_on(
    local: LookupBuffer, *, streaming: bool
) -> None:
    await local.insert([9], None, torch.ones(2**21 - 2), None, None)
    async with (
        serve("tcp://:0", lookup=local, max_waiting_bytes="520KiB") as server,
        connect(server.url) as peer,
    ):

        async def insert(first: int) -> None:
            ids, lookup = tokens(first), peer.lookup
            if streaming:
                async with lookup.open_insert(ids, None, {}):
                    return
            await lookup.insert(ids, None, None, None, None)

        async with tasks_of(insert(1), insert(2)) as inserts:
            await until(lambda: local.statistics().waiting_inserts == 2)
            with pytest.raises(Overloaded):
                await insert(3)
            assert server.waiting_bytes <= 260 * KIB
            await peer.lookup.drop_select([9])
            await asyncio.gather(*inserts)
        assert local.statistics().entries == 2
        await until(lambda: server.waiting_bytes == 0)


async def test_small_tensors_that_cannot_be_kept_come_when_there_is_room(
    local: LookupBuffer,
) -> None:
    await local.insert([9], None, torch.ones(2**21 - 2), None, None)
    async with (
        serve("tcp://:0", lookup=local, max_waiting_bytes="128KiB") as server,
        connect(server.url) as peer,
    ):
        keys = [torch.full((10_000,), n) for n in range(8)]
        lookup = peer.lookup
        inserts = [lookup.insert([n], None, keys[n], None, None) for n in range(8)]
        async with tasks_of(*inserts) as waiting:
            await until(lambda: local.statistics().waiting_inserts == 8)
            assert server.waiting_bytes <= 64 * KIB
            await lookup.drop_select([9])
            await asyncio.gather(*waiting)
        for n, key in enumerate(keys):
            found = (await lookup.drop_select([n])).key
            assert isinstance(found, torch.Tensor) and torch.equal(found, key)


async def test_small_values_that_cannot_be_kept_come_when_there_is_room() -> None:
    async with (
        StoreBuffer("64KiB") as store,
        serve("tcp://:0", store=store, max_waiting_bytes="128KiB") as server,
        connect(server.url) as peer,
    ):
        values = {f"{n}": torch.full((6_000,), n) for n in range(8)}
        puts = [peer.store.put(name, value) for name, value in values.items()]
        async with tasks_of(*puts) as waiting:
            await asyncio.gather(*waiting)
        assert torch.equal(only(await peer.store.get("7")), values["7"])
        await until(lambda: server.waiting_bytes == 0)


async def test_a_link_that_is_lost_gives_back_all_that_it_kept(
    local: LookupBuffer,
) -> None:
    await local.insert([9], None, torch.ones(2**21 - 2), None, None, entry_id="it")
    async with (
        serve("tcp://:0", lookup=local) as server,
        connect(server.url) as peer,
        tasks_of(
            wait_for(peer.lookup.drop_select([1])),
            peer.lookup.insert([2], None, torch.ones(10), None, None),
            peer.lookup.taken("it"),
        ),
    ):
        await until(lambda: server.waiting_bytes > 3 * REQUEST_NBYTES)
        peer.abort()
        await until(lambda: server.waiting_bytes == 0)


async def test_who_waits_for_an_end_is_counted_too(local: LookupBuffer) -> None:
    await local.insert([9], None, None, None, None, entry_id="it")
    async with (
        serve("mem://", lookup=local, max_waiting_bytes="4KiB") as server,
        dialled(server.url, "peer") as link,
    ):
        hearers = [Hearer() for _ in range(2)]
        for hearer in hearers:
            link.open_stream(hearer, Taken("it"))
        await until(lambda: bool(hearers[1].frames))
        assert server.waiting_bytes == REQUEST_NBYTES and not hearers[0].frames
