from __future__ import annotations

import asyncio
import threading

import pytest

from asynckv.errors import LocalProtocolError, RemoteProtocolError
from asynckv.protocol.wire import Chunk, digest_of
from asynckv.tensors.feeds import Feed
from asynckv.testing import until_blocked
from asynckv.transports.parts import Completions, FedPart, Part, PartTable, PendingParts

_Told = list[tuple[bytes, BaseException | None]]


def _part(
    transfer: int = 1, number: int = 0, nbytes: int = 8, told: _Told | None = None
) -> Part:
    told = [] if told is None else told
    memory = memoryview(bytearray(nbytes))
    return Part(transfer, number, memory, lambda *what: told.append(what), None)


def _land(table: PartTable, chunk: Chunk, carrier: object = "lane") -> bool:
    part = table.enter(chunk, carrier)
    assert part is not None
    part.moved_bytes += chunk.nbytes
    return table.leave(part, carrier)


def test_a_part_tells_its_digest_once() -> None:
    told: _Told = []
    part = _part(told=told)
    part.add_to_digest(part.pieces(0, part.left_bytes))
    part.complete()
    part.complete(PeerError())
    assert told == [(digest_of(bytes(8)), None)]


class PeerError(Exception):
    pass


def test_a_stopped_part_tells_nobody() -> None:
    told: _Told = []
    part = _part(told=told)
    part.stopped = True
    part.complete()
    assert told == []


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_part_that_is_over_lets_its_memory_go(is_stopped: bool) -> None:
    memory = bytearray(8)
    part = Part(1, 0, memoryview(memory), lambda *_: None, b"")
    part.stopped = is_stopped
    part.complete()
    memory.clear()


def test_a_part_lands_chunk_by_chunk() -> None:
    table = PartTable()
    table.add(_part())
    assert not _land(table, Chunk(1, 0, 0, 3))
    assert table.is_waiting
    assert _land(table, Chunk(1, 0, 3, 5))
    assert not table.is_waiting


def test_a_transfer_is_over_when_its_parts_have_landed() -> None:
    table = PartTable()
    table.add(_part(number=0))
    table.add(_part(number=1))
    assert _land(table, Chunk(1, 0, 0, 8))
    with pytest.raises(RemoteProtocolError, match="has landed"):
        table.enter(Chunk(1, 0, 0, 8), "lane")
    assert _land(table, Chunk(1, 1, 0, 8))
    assert table.enter(Chunk(1, 0, 0, 8), "lane") is None


@pytest.mark.parametrize(
    "chunk",
    [
        Chunk(2, 0, 0, 8),
        Chunk(1, 1, 0, 8),
        Chunk(1, 0, 1, 7),
        Chunk(1, 0, 0, 9),
    ],
    ids=["never announced", "no such part", "not the next", "too long"],
)
def test_what_may_not_come_is_refused(chunk: Chunk) -> None:
    table = PartTable()
    table.add(_part())
    with pytest.raises(RemoteProtocolError):
        table.enter(chunk, "lane")
    assert table.carriers_of() == []


def test_a_part_stays_on_its_lane() -> None:
    table = PartTable()
    table.add(_part())
    _land(table, Chunk(1, 0, 0, 4), "one lane")
    with pytest.raises(RemoteProtocolError, match="two lanes"):
        table.enter(Chunk(1, 0, 4, 4), "another lane")


def test_announced_and_stopped_transfers_are_dropped() -> None:
    table = PartTable()
    table.announce(7)
    table.add(_part(transfer=3))
    table.stop(3)
    assert table.enter(Chunk(7, 0, 0, 8), "lane") is None
    assert table.enter(Chunk(3, 0, 0, 8), "lane") is None


def test_a_part_that_was_stopped_while_it_moved_has_not_landed() -> None:
    table = PartTable()
    table.add(_part())
    part = table.enter(Chunk(1, 0, 0, 8), "lane")
    table.stop(1)
    assert part is not None
    assert part.stopped
    assert table.carriers_of(1) == ["lane"]
    part.moved_bytes += 8
    assert not table.leave(part, "lane")
    assert table.carriers_of() == []


def test_a_part_is_added_once() -> None:
    table = PartTable()
    table.add(_part())
    with pytest.raises(LocalProtocolError, match="twice"):
        table.add(_part())


def test_taking_all_leaves_nothing_to_wait_for() -> None:
    table = PartTable()
    parts = [_part(transfer=1), _part(transfer=2, number=5)]
    for part in parts:
        table.add(part)
    table.clear()
    assert not table.is_waiting
    assert not table.is_waiting


def test_the_bytes_of_parts_on_their_way_are_counted() -> None:
    table = PartTable()
    table.add(_part())
    table.add(_part(number=1))
    assert table.landed_bytes(1) == table.landed_bytes(2) == 0
    _land(table, Chunk(1, 0, 0, 3))
    _land(table, Chunk(1, 1, 0, 5))
    assert table.landed_bytes(1) == 8
    _land(table, Chunk(1, 0, 3, 5))
    assert table.landed_bytes(1) == 5


def test_a_fed_part_moves_as_its_bytes_come() -> None:
    feed, told = Feed(5), list[tuple[bytes, BaseException | None]]()
    part = FedPart(2, 1, feed, lambda *what: told.append(what), None)
    assert (part.left_bytes, part.ready_bytes) == (5, 0)
    wakes = list[int]()
    part.call_when_ready(lambda: wakes.append(part.ready_bytes))
    source = bytearray(b"abc")
    feed.put(memoryview(source))
    assert wakes == [3]
    part.add_to_digest(part.pieces(0, 3))
    part.move(3)
    source.clear()  # what was sent is kept no longer
    assert (part.left_bytes, part.ready_bytes) == (2, 0)
    feed.put(memoryview(b"de"))
    part.add_to_digest(part.pieces(3, 5))
    part.move(2)
    part.complete()
    assert told == [(digest_of(b"abcde"), None)]


def test_a_fed_part_that_is_let_go_keeps_nothing() -> None:
    source, feed = bytearray(b"abc"), Feed(5)
    part = FedPart(2, 1, feed, lambda *_: None, b"")
    feed.put(memoryview(source))
    part.release()
    source.clear()


def _empty_part() -> Part:
    return Part(1, 0, memoryview(b""), lambda *_: None, b"")


async def test_parts_are_delivered_on_the_loop_in_order() -> None:
    delivered: list[Part] = []
    threads: set[int] = set()

    def deliver(part: Part) -> None:
        delivered.append(part)
        threads.add(threading.get_ident())

    completions = Completions(asyncio.get_running_loop(), deliver)
    parts = [_empty_part() for _ in range(1000)]

    def add_all() -> None:
        for part in parts:
            completions.add(part)

    thread = threading.Thread(target=add_all)
    thread.start()
    async with asyncio.timeout(5):
        while len(delivered) < len(parts):  # noqa: ASYNC110
            await asyncio.sleep(0)
    thread.join()
    assert delivered == parts
    assert threads == {threading.get_ident()}


async def test_one_tick_delivers_a_bounded_number() -> None:
    delivered: list[Part] = []
    completions = Completions(asyncio.get_running_loop(), delivered.append)
    for _ in range(1000):
        completions.add(_empty_part())
    for _ in range(3):
        await asyncio.sleep(0)
    assert 0 < len(delivered) < 300
    completions.deliver_all()
    assert len(delivered) == 1000


def test_a_closed_loop_is_no_error() -> None:
    loop = asyncio.new_event_loop()
    completions = Completions(loop, lambda _: None)
    loop.close()
    completions.add(_empty_part())


def _telling_part(transfer: int, told: list[int] | None = None) -> Part:
    def done(digest: bytes, error: BaseException | None) -> None:
        if told is not None:
            told.append(transfer)

    return Part(transfer, 0, memoryview(b"x"), done, b"")


async def test_a_part_is_pending_until_somebody_was_told() -> None:
    told = list[int]()
    pending: PendingParts[Part] = PendingParts(asyncio.get_running_loop())
    pending.add(part := _telling_part(1, told))
    assert pending
    pending.complete(part)
    assert told == [1]
    assert not pending


async def test_of_a_stopped_transfer_nobody_is_told() -> None:
    told = list[int]()
    pending: PendingParts[Part] = PendingParts(asyncio.get_running_loop())
    pending.add(part := _telling_part(1, told))
    pending.add(_telling_part(2, told))
    pending.stop(1)
    pending.complete(part)
    assert told == []
    assert [part.transfer for part in pending.take_all()] == [2]
    assert not pending


async def test_waiting_ends_with_the_last_part() -> None:
    pending: PendingParts[Part] = PendingParts(asyncio.get_running_loop())
    await pending.wait_until_none(60)
    parts = [_telling_part(1), _telling_part(1), _telling_part(2)]
    for part in parts:
        pending.add(part)
    waits = [asyncio.create_task(pending.wait_until_none(60)) for _ in range(2)]
    pending.complete(parts[0])
    pending.complete(parts[1])
    await until_blocked(*waits)
    assert not any(wait.done() for wait in waits)
    pending.stop(2)
    async with asyncio.timeout(5):
        await asyncio.gather(*waits)


async def test_waiting_is_bounded() -> None:
    pending: PendingParts[Part] = PendingParts(asyncio.get_running_loop())
    pending.add(_telling_part(1))
    await pending.wait_until_none(0.01)
    assert pending
