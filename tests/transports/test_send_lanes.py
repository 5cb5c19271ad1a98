from __future__ import annotations

import queue
import socket
import threading
import weakref
from collections.abc import Iterator

import numpy
import pytest

from asynckv.protocol.wire import CHUNK_HEADER_BYTES, encode_chunk_header
from asynckv.tensors.feeds import Feed
from asynckv.tensors.runs import runs_in
from asynckv.transports.lane_sockets import LaneOwner, LaneSocket
from asynckv.transports.lanes import SendLane
from asynckv.transports.parts import FedPart, Part

_CHUNK = 1000


def _part(transfer: int, number: int, memory: bytes | bytearray) -> Part:
    return Part(transfer, number, memoryview(memory), lambda *_: None, b"")


def _read(sock: socket.socket, nbytes: int) -> bytes:
    got = b""
    while len(got) < nbytes:
        got += sock.recv(nbytes - len(got))
    return got


@pytest.fixture
def sender(
    request: pytest.FixtureRequest,
    lane: LaneSocket,
    owner: LaneOwner,
    said: queue.Queue[object],
) -> Iterator[SendLane]:
    """Sends on ``lane``, in chunks of that size; ended, its thread says so."""
    sender = SendLane(lane, owner, getattr(request, "param", _CHUNK))
    yield sender
    sender.end()
    assert said.get(timeout=5) == "ended"


def test_a_part_leaves_in_chunks(
    sender: SendLane, far: socket.socket, said: queue.Queue[object]
) -> None:
    part = _part(3, 4, bytes(1500))
    assert sender.put(part)
    assert sender.queued_bytes <= 1500
    first = encode_chunk_header(3, 4, 0, 1000) + bytes(1000)
    second = encode_chunk_header(3, 4, 1000, 500) + bytes(500)
    assert _read(far, len(first + second)) == first + second
    assert said.get(timeout=5) is part
    assert sender.queued_bytes == 0


@pytest.mark.parametrize("sender", [2**20], indirect=True)
def test_small_blocks_leave_in_their_order(
    sender: SendLane, far: socket.socket, said: queue.Queue[object]
) -> None:
    source = numpy.random.default_rng(0).bytes(2**20)
    starts = numpy.arange(2**20 - 1024, -1, -1024)
    expected = b"".join(source[start : start + 1024] for start in starts)
    blocks = runs_in(memoryview(source), starts, 1024)
    sender.put(part := Part(3, 4, blocks, lambda *_: None, None))
    assert _read(far, CHUNK_HEADER_BYTES + 2**20)[CHUNK_HEADER_BYTES:] == expected
    assert said.get(timeout=5) is part


@pytest.mark.parametrize("sender", [2**24], indirect=True)
def test_transfers_take_turns(
    sender: SendLane, far: socket.socket, said: queue.Queue[object]
) -> None:
    sender.put(_part(1, 0, bytes(2**24)))  # more than the socket holds
    sender.put(_part(2, 0, b"b"))
    sender.put(_part(2, 1, b"c"))
    sender.put(_part(3, 0, b"d"))
    _read(far, 2**24 + CHUNK_HEADER_BYTES)
    order = [said.get(timeout=5) for _ in range(4)]
    names = [(p.transfer, p.number) for p in order if isinstance(p, Part)]
    assert names == [(1, 0), (2, 0), (3, 0), (2, 1)]


def test_what_has_no_bytes_yet_lets_others_of_its_transfer_go(
    sender: SendLane, far: socket.socket, said: queue.Queue[object]
) -> None:
    feed = Feed(6)
    fed = FedPart(1, 0, feed, lambda *_: None, b"")
    other = _part(1, 1, b"other")
    sender.put(fed)
    sender.put(other)
    assert said.get(timeout=5) is other
    feed.put(memoryview(b"abc"))
    expected = encode_chunk_header(1, 1, 0, 5) + b"other"
    expected += encode_chunk_header(1, 0, 0, 3) + b"abc"
    assert _read(far, len(expected)) == expected
    feed.put(memoryview(b"def"))
    last = encode_chunk_header(1, 0, 3, 3) + b"def"
    assert _read(far, len(last)) == last
    assert said.get(timeout=5) is fed and sender.queued_bytes == 0


def test_what_is_stopped_before_its_bytes_have_come_never_leaves(
    sender: SendLane,
) -> None:
    feed = Feed(6)
    sender.put(FedPart(1, 0, feed, lambda *_: None, b""))
    sender.stop(1)
    feed.put(memoryview(b"abc"))
    assert sender.queued_bytes == 0


def test_what_is_stopped_keeps_no_piece_though_its_thread_is_idle(
    sender: SendLane, far: socket.socket
) -> None:
    feed = Feed(6)
    sender.put(FedPart(1, 0, feed, lambda *_: None, b""))
    feed.put(memoryview(b"abc"))
    _read(far, CHUNK_HEADER_BYTES + 3)
    while sender.is_sending(1):
        threading.Event().wait(0.001)
    feed.call_when_fed(lambda: None)  # the thread is not awake yet
    feed.put(memoryview(b"d"))
    sender.stop(1)
    feed.put(memoryview(b"ef"))
    assert not feed.pieces(0, 6) and sender.queued_bytes == 0


@pytest.mark.parametrize("sender", [2**24], indirect=True)
def test_a_stopped_part_that_is_being_sent_is_left_after_its_chunk(
    sender: SendLane, far: socket.socket, said: queue.Queue[object]
) -> None:
    memory = bytearray(2**25)
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


def test_a_thread_that_waits_for_the_next_part_keeps_nothing_of_the_last_one(
    sender: SendLane, far: socket.socket, said: queue.Queue[object]
) -> None:
    gone = threading.Event()
    memory = memoryview(bytes(1500))
    weakref.finalize(memory, gone.set)
    sender.put(Part(1, 0, memory, lambda *_: None, b""))
    del memory
    _read(far, 2 * CHUNK_HEADER_BYTES + 1500)
    assert isinstance(said.get(timeout=5), Part)
    assert gone.wait(5)


def test_a_peer_that_hangs_up_ends_the_thread(
    lane: LaneSocket, far: socket.socket, owner: LaneOwner, said: queue.Queue[object]
) -> None:
    sender = SendLane(lane, owner, _CHUNK)
    far.close()
    sender.put(_part(1, 0, bytes(10)))
    assert isinstance(said.get(timeout=5), OSError)
    assert not sender.is_sending(1)
