from __future__ import annotations

import pytest

from asynckv.errors import LocalProtocolError, RemoteProtocolError
from asynckv.protocol.wire import Chunk, digest_of
from asynckv.transports.parts import Part, PartTable

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


def test_a_part_that_told_lets_its_memory_go() -> None:
    memory = bytearray(8)
    Part(1, 0, memoryview(memory), lambda *_: None, b"").complete()
    memory.clear()


def test_a_part_that_was_stopped_before_it_told_lets_its_memory_go() -> None:
    memory = bytearray(8)
    part = Part(1, 0, memoryview(memory), lambda *_: None, b"")
    part.stopped = True
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
