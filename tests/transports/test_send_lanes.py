from __future__ import annotations

import queue
import socket
import threading

import numpy

from asynckv.protocol.chunks import CHUNK_HEADER_BYTES, encode_chunk_header
from asynckv.tensors.runs import runs_in
from asynckv.transports.lane_sockets import LaneOwner, LaneSocket
from asynckv.transports.parts import Part
from asynckv.transports.send_lanes import SendLane

_CHUNK = 1000


def _part(transfer: int, number: int, memory: bytes | bytearray) -> Part:
    return Part(transfer, number, memoryview(memory), lambda *_: None, b"")


def _read(sock: socket.socket, nbytes: int) -> bytes:
    got = b""
    while len(got) < nbytes:
        got += sock.recv(nbytes - len(got))
    return got


def test_a_part_leaves_in_chunks(
    lane: LaneSocket, far: socket.socket, owner: LaneOwner, said: queue.Queue[object]
) -> None:
    sender = SendLane(lane, owner, _CHUNK)
    part = _part(3, 4, bytes(1500))
    assert sender.put(part)
    assert sender.queued_bytes <= 1500
    first = encode_chunk_header(3, 4, 0, 1000) + bytes(1000)
    second = encode_chunk_header(3, 4, 1000, 500) + bytes(500)
    assert _read(far, len(first + second)) == first + second
    assert said.get(timeout=5) is part
    assert sender.queued_bytes == 0
    sender.end()
    assert said.get(timeout=5) == "ended"


def test_small_blocks_leave_in_their_order(
    lane: LaneSocket, far: socket.socket, owner: LaneOwner, said: queue.Queue[object]
) -> None:
    sender = SendLane(lane, owner, 2**20)
    source = numpy.random.default_rng(0).bytes(2**20)
    starts = numpy.arange(2**20 - 1024, -1, -1024)
    expected = b"".join(source[start : start + 1024] for start in starts)
    blocks = runs_in(memoryview(source), starts, 1024)
    sender.put(part := Part(3, 4, blocks, lambda *_: None, None))
    assert _read(far, CHUNK_HEADER_BYTES + 2**20)[CHUNK_HEADER_BYTES:] == expected
    assert said.get(timeout=5) is part
    sender.end()
    assert said.get(timeout=5) == "ended"


def test_transfers_take_turns(
    lane: LaneSocket, far: socket.socket, owner: LaneOwner, said: queue.Queue[object]
) -> None:
    sender = SendLane(lane, owner, 2**24)
    sender.put(_part(1, 0, bytes(2**24)))  # more than the socket holds
    sender.put(_part(2, 0, b"b"))
    sender.put(_part(2, 1, b"c"))
    sender.put(_part(3, 0, b"d"))
    _read(far, 2**24 + CHUNK_HEADER_BYTES)
    order = [said.get(timeout=5) for _ in range(4)]
    names = [(p.transfer, p.number) for p in order if isinstance(p, Part)]
    assert names == [(1, 0), (2, 0), (3, 0), (2, 1)]
    sender.end()
    assert said.get(timeout=5) == "ended"


def test_a_stopped_part_that_is_being_sent_is_left_after_its_chunk(
    lane: LaneSocket, far: socket.socket, owner: LaneOwner, said: queue.Queue[object]
) -> None:
    sender, memory = SendLane(lane, owner, 2**24), bytearray(2**25)
    sender.put(_part(1, 0, memory))
    while not sender.is_sending(1):
        threading.Event().wait(0.001)
    sender.stop(1)
    assert sender.is_sending(1)
    _read(far, 2**24 + CHUNK_HEADER_BYTES)
    assert said.get(timeout=5) == "left"
    assert not sender.is_sending(1)
    assert sender.queued_bytes == 0
    memory.clear()
    sender.end()
    assert said.get(timeout=5) == "ended"


def test_a_peer_that_hangs_up_ends_the_thread(
    lane: LaneSocket, far: socket.socket, owner: LaneOwner, said: queue.Queue[object]
) -> None:
    sender = SendLane(lane, owner, _CHUNK)
    far.close()
    sender.put(_part(1, 0, bytes(10)))
    assert isinstance(said.get(timeout=5), OSError)
    assert not sender.is_sending(1)
