"""A payload lane with its thread: cut at every byte, flipped at every bit."""

from __future__ import annotations

import functools
import queue
import socket
from collections.abc import Callable, Iterator

import pytest

from asynckv.errors import RemoteProtocolError
from asynckv.protocol.wire import digest_of, encode_chunk_header
from asynckv.transports.lane_sockets import LaneSocket
from asynckv.transports.lanes import ReceiveLane
from asynckv.transports.parts import Part, PartTable

pytestmark = [pytest.mark.trust, pytest.mark.timeout(240)]

TENSORS = (bytes(range(60)), bytes(range(100, 190)))
CHUNK = 40


class Owner:
    """Passes on what the lane's thread says."""

    def __init__(self) -> None:
        self.said: queue.Queue[object] = queue.Queue()

    def part_moved(self, part: Part) -> None:
        self.said.put(part)

    def part_left(self) -> None:
        raise AssertionError("no part was stopped")

    def sender_ended(self, error: BaseException | None) -> None:
        raise AssertionError("nothing is sent")

    def receiver_ended(self, error: BaseException | None) -> None:
        self.said.put(error)


def recorded() -> bytes:
    """What a lane carries: two tensors, in turns."""
    sent = b""
    for start in range(0, max(map(len, TENSORS)), CHUNK):
        for part, tensor in enumerate(TENSORS):
            if piece := tensor[start : start + CHUNK]:
                sent += encode_chunk_header(1, part, start, len(piece)) + piece
    return sent


def note(
    digests: dict[int, bytes], part: int, digest: bytes, error: BaseException | None
) -> None:
    digests[part] = digest


def land(sent: bytes) -> tuple[set[int], BaseException | None]:
    """Let a lane receive; return which tensors are verified, and how it ended."""
    near, far = socket.socketpair()
    owner, table, memory = Owner(), PartTable(), [bytearray(len(t)) for t in TENSORS]
    digests: dict[int, bytes] = {}
    for part, target in enumerate(memory):
        done = functools.partial(note, digests, part)
        table.add(Part(1, part, memoryview(target), done, None))
    with near, far:
        lane = LaneSocket(near)
        ReceiveLane(lane, owner, table, CHUNK).start()
        far.sendall(sent)
        far.close()
        while isinstance(said := owner.said.get(timeout=5), Part):
            said.complete()
        lane.shut_down()
    verified = {p for p, digest in digests.items() if digest == digest_of(TENSORS[p])}
    assert all(bytes(memory[part]) == TENSORS[part] for part in verified)
    assert said is None or isinstance(said, BaseException)
    return verified, said


def flips(sent: bytes) -> Iterator[bytes]:
    for bit in range(len(sent) * 8):
        changed = bytearray(sent)
        changed[bit // 8] ^= 1 << bit % 8
        yield bytes(changed)


def test_what_is_not_cut_or_changed_lands() -> None:
    assert land(recorded()) == ({0, 1}, None)


def test_a_lane_cut_at_any_byte_delivers_whole_tensors_only() -> None:
    sent = recorded()
    for cut in range(len(sent)):
        verified, error = land(sent[:cut])
        assert verified < {0, 1}
        assert error is None or isinstance(error, EOFError)


def test_no_flipped_bit_of_a_lane_is_in_a_verified_tensor(
    figures: Callable[[str], None],
) -> None:
    figures(f"{len(recorded()) * 8:,} flips")
    for changed in flips(recorded()):
        verified, error = land(changed)
        assert verified < {0, 1}
        assert error is None or isinstance(error, RemoteProtocolError)
