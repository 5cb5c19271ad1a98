from __future__ import annotations

import queue
import socket
import threading

import numpy
import pytest

from asynckv.errors import RemoteProtocolError
from asynckv.protocol.wire import encode_chunk_header
from asynckv.tensors.runs import runs_in
from asynckv.transports.lane_sockets import LaneOwner, LaneSocket
from asynckv.transports.lanes import ReceiveLane
from asynckv.transports.parts import Part, PartTable

_CHUNK = 1000


def _part(transfer: int, number: int, memory: bytes | bytearray) -> Part:
    return Part(transfer, number, memoryview(memory), lambda *_: None, b"")


def test_a_chunk_lands_in_its_part(
    lane: LaneSocket, far: socket.socket, owner: LaneOwner, said: queue.Queue[object]
) -> None:
    table, memory = PartTable(), bytearray(6)
    part = _part(1, 0, memory)
    table.add(part)
    ReceiveLane(lane, owner, table, _CHUNK).start()
    far.sendall(encode_chunk_header(1, 0, 0, 2) + b"ab")
    far.sendall(encode_chunk_header(1, 0, 2, 4) + b"cdef")
    assert said.get(timeout=5) is part
    assert memory == b"abcdef"
    far.close()
    assert said.get(timeout=5) == "ended"


def test_small_blocks_land_where_they_lie(
    lane: LaneSocket, far: socket.socket, owner: LaneOwner, said: queue.Queue[object]
) -> None:
    table, memory = PartTable(), bytearray(8)
    blocks = runs_in(memoryview(memory), numpy.array([4, 0]), 3)
    part = Part(1, 0, blocks, lambda *_: None, None)
    table.add(part)
    ReceiveLane(lane, owner, table, _CHUNK).start()
    far.sendall(encode_chunk_header(1, 0, 0, 2) + b"ab")
    far.sendall(encode_chunk_header(1, 0, 2, 4) + b"cdef")
    assert said.get(timeout=5) is part
    assert memory == b"def\0abc\0"
    far.close()
    assert said.get(timeout=5) == "ended"


def test_the_rest_of_a_stopped_chunk_is_dropped(
    lane: LaneSocket, far: socket.socket, owner: LaneOwner, said: queue.Queue[object]
) -> None:
    table, memory = PartTable(), bytearray(2**22)
    table.add(_part(1, 0, memory))
    table.add(last := _part(2, 0, bytearray(2)))
    ReceiveLane(lane, owner, table, 2**22).start()
    far.sendall(encode_chunk_header(1, 0, 0, 2**22) + b"\1" * 2**20)
    while not memory[0]:
        threading.Event().wait(0.001)
    table.stop(1)
    far.sendall(b"\1" * (3 * 2**20) + encode_chunk_header(2, 0, 0, 2) + b"ab")
    assert [said.get(timeout=5), said.get(timeout=5)] == ["left", last]
    assert memory[-1] == 0
    far.close()
    assert said.get(timeout=5) == "ended"


def test_a_chunk_over_the_limit_ends_the_receiver(
    lane: LaneSocket, far: socket.socket, owner: LaneOwner, said: queue.Queue[object]
) -> None:
    ReceiveLane(lane, owner, PartTable(), _CHUNK).start()
    far.sendall(encode_chunk_header(1, 0, 0, _CHUNK + 1))
    assert isinstance(said.get(timeout=5), RemoteProtocolError)


@pytest.mark.parametrize("sent", [10, 58])
def test_hanging_up_within_a_chunk_is_an_error(
    lane: LaneSocket,
    far: socket.socket,
    owner: LaneOwner,
    said: queue.Queue[object],
    sent: int,
) -> None:
    table = PartTable()
    table.add(_part(1, 0, bytearray(6)))
    ReceiveLane(lane, owner, table, _CHUNK).start()
    far.sendall((encode_chunk_header(1, 0, 0, 6) + b"abcdef")[:sent])
    far.close()
    assert isinstance(said.get(timeout=5), EOFError)


def test_a_lane_that_is_shut_down_starts_no_thread(
    lane: LaneSocket, owner: LaneOwner
) -> None:
    lane.shut_down()
    assert not ReceiveLane(lane, owner, PartTable(), _CHUNK).start()
