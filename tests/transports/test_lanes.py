from __future__ import annotations

import contextlib
import os
import queue
import socket
import sys
import threading
from collections.abc import Iterator

import pytest

from asynckv.errors import RemoteProtocolError
from asynckv.protocol.chunks import CHUNK_HEADER_BYTES, encode_chunk_header
from asynckv.transports.lanes import LaneSocket, ReceiveLane, SendLane
from asynckv.transports.parts import Part, PartTable

_CHUNK = 1000


class Owner:
    """Keeps what the lanes said, in order."""

    def __init__(self) -> None:
        self.said: queue.Queue[object] = queue.Queue()

    def part_moved(self, part: Part) -> None:
        self.said.put(part)

    def part_left(self) -> None:
        self.said.put("left")

    def sender_ended(self, error: BaseException | None) -> None:
        self.said.put(error or "ended")

    def receiver_ended(self, error: BaseException | None) -> None:
        self.said.put(error or "ended")

    def hear(self) -> object:
        return self.said.get(timeout=5)


@contextlib.contextmanager
def _lane() -> Iterator[tuple[LaneSocket, socket.socket, Owner]]:
    near, far = socket.socketpair()
    far.settimeout(5)
    lane = LaneSocket(near)
    with far:
        yield lane, far, Owner()
        lane.shut_down()


def _part(transfer: int, number: int, memory: bytes | bytearray) -> Part:
    return Part(transfer, number, memoryview(memory), lambda *_: None, b"")


def _read(sock: socket.socket, nbytes: int) -> bytes:
    got = b""
    while len(got) < nbytes:
        got += sock.recv(nbytes - len(got))
    return got


def test_a_part_leaves_in_chunks() -> None:
    with _lane() as (lane, far, owner):
        sender = SendLane(lane, owner, _CHUNK)
        part = _part(3, 4, bytes(1500))
        assert sender.put(part)
        assert sender.queued_bytes <= 1500
        first = encode_chunk_header(3, 4, 0, 1000) + bytes(1000)
        second = encode_chunk_header(3, 4, 1000, 500) + bytes(500)
        assert _read(far, len(first + second)) == first + second
        assert owner.hear() is part
        assert sender.queued_bytes == 0
        sender.end()
        assert owner.hear() == "ended"


def test_transfers_take_turns() -> None:
    with _lane() as (lane, far, owner):
        gate = SendLane(lane, owner, 2**24)
        gate.put(_part(1, 0, bytes(2**24)))  # more than the socket holds
        gate.put(_part(2, 0, b"b"))
        gate.put(_part(2, 1, b"c"))
        gate.put(_part(3, 0, b"d"))
        _read(far, 2**24 + CHUNK_HEADER_BYTES)
        order = [owner.hear() for _ in range(4)]
        names = [(p.transfer, p.number) for p in order if isinstance(p, Part)]
        assert names == [(1, 0), (2, 0), (3, 0), (2, 1)]
        gate.end()
        assert owner.hear() == "ended"


def test_a_stopped_part_that_is_being_sent_is_left_after_its_chunk() -> None:
    with _lane() as (lane, far, owner):
        sender = SendLane(lane, owner, 2**24)
        memory = bytearray(2**25)
        sender.put(_part(1, 0, memory))
        while not sender.is_sending(1):
            threading.Event().wait(0.001)
        sender.stop(1)
        assert sender.is_sending(1)
        _read(far, 2**24 + CHUNK_HEADER_BYTES)
        assert owner.hear() == "left"
        assert not sender.is_sending(1)
        assert sender.queued_bytes == 0
        memory.clear()
        sender.end()
        assert owner.hear() == "ended"


def test_a_chunk_lands_in_its_part() -> None:
    with _lane() as (lane, far, owner):
        table, memory = PartTable(), bytearray(6)
        part = _part(1, 0, memory)
        table.add(part)
        ReceiveLane(lane, owner, table, _CHUNK).start()
        far.sendall(encode_chunk_header(1, 0, 0, 2) + b"ab")
        far.sendall(encode_chunk_header(1, 0, 2, 4) + b"cdef")
        assert owner.hear() is part
        assert memory == b"abcdef"
        far.close()
        assert owner.hear() == "ended"


def test_the_rest_of_a_stopped_chunk_is_dropped() -> None:
    with _lane() as (lane, far, owner):
        table, memory, other = PartTable(), bytearray(2**22), bytearray(2)
        table.add(_part(1, 0, memory))
        last = _part(2, 0, other)
        table.add(last)
        ReceiveLane(lane, owner, table, 2**22).start()
        far.sendall(encode_chunk_header(1, 0, 0, 2**22) + b"\1" * 2**20)
        while not memory[0]:
            threading.Event().wait(0.001)
        table.stop(1)
        far.sendall(b"\1" * (3 * 2**20) + encode_chunk_header(2, 0, 0, 2) + b"ab")
        assert [owner.hear(), owner.hear()] == ["left", last]
        assert memory[-1] == 0
        far.close()
        assert owner.hear() == "ended"


def test_a_chunk_over_the_limit_ends_the_receiver() -> None:
    with _lane() as (lane, far, owner):
        ReceiveLane(lane, owner, PartTable(), _CHUNK).start()
        far.sendall(encode_chunk_header(1, 0, 0, _CHUNK + 1))
        assert isinstance(owner.hear(), RemoteProtocolError)


@pytest.mark.parametrize("sent", [10, 58])
def test_hanging_up_within_a_chunk_is_an_error(sent: int) -> None:
    with _lane() as (lane, far, owner):
        table = PartTable()
        table.add(_part(1, 0, bytearray(6)))
        ReceiveLane(lane, owner, table, _CHUNK).start()
        far.sendall((encode_chunk_header(1, 0, 0, 6) + b"abcdef")[:sent])
        far.close()
        assert isinstance(owner.hear(), EOFError)


def test_the_last_thread_closes_the_socket() -> None:
    with _lane() as (lane, _, owner):
        ReceiveLane(lane, owner, PartTable(), _CHUNK).start()
        lane.shut_down()
        assert owner.hear() == "ended"
        assert lane.sock.fileno() == -1
        assert not lane.start(lambda: None, "send")


class PriorityOwner(Owner):
    """Keeps the niceness of the thread that tells it of a part."""

    def part_moved(self, part: Part) -> None:
        self.said.put(os.getpriority(os.PRIO_PROCESS, 0))


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities on Linux")
def test_lane_threads_run_behind_the_event_loop() -> None:
    before = os.getpriority(os.PRIO_PROCESS, 0)
    with _lane() as (lane, _, _):
        owner = PriorityOwner()
        sender = SendLane(lane, owner, _CHUNK)
        sender.put(_part(1, 0, bytes(10)))
        assert owner.hear() == min(before + 5, 19)
        assert os.getpriority(os.PRIO_PROCESS, 0) == before
        sender.end()
        assert owner.hear() == "ended"
