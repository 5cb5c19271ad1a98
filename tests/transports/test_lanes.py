from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

from asynckv.errors import PeerLost
from asynckv.protocol.wire import encode_chunk_header
from asynckv.testing import until
from asynckv.transports.lanes import Lanes
from asynckv.transports.parts import Part, PartTable, PendingParts

_LARGE = 2**24


class Side:
    """Lanes, and what they told."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.moved: list[Part] = []
        self.lost: list[BaseException | None] = []
        self.release = 0
        self.pending: PendingParts[Part] = PendingParts(loop)
        self.table = PartTable()
        self.lanes = Lanes(
            loop,
            self.pending,
            self.table,
            2**20,
            moved=self.moved.append,
            release=self._count,
            lost=self.lost.append,
        )

    def _count(self) -> None:
        self.release += 1

    def send(self, transfer: int, source: bytes) -> Part:
        part = Part(transfer, 0, memoryview(source), lambda *_: None, b"")
        self.pending.add(part)
        self.lanes.send(part)
        return part

    def receive(self, transfer: int, target: bytearray) -> Part:
        part = Part(transfer, 0, memoryview(target), lambda *_: None, b"")
        self.table.add(part)
        self.lanes.receive()
        return part


@contextlib.asynccontextmanager
async def _beside(count: int) -> AsyncIterator[tuple[Side, list[socket.socket]]]:
    pairs = [socket.socketpair() for _ in range(count)]
    side, peers = Side(), [pair[1] for pair in pairs]
    side.lanes.open([pair[0] for pair in pairs])
    yield side, peers
    side.lanes.shut_down()
    await until(lambda: not side.lanes.threads)
    for peer in peers:
        peer.close()


async def test_parts_go_to_the_lane_that_has_least_to_do() -> None:
    async with _beside(3) as (side, peers):
        for transfer in range(3):
            side.send(transfer, bytes(_LARGE))
        await until(lambda: all(side.lanes.is_touched(n) for n in range(3)))
        assert side.lanes.threads == len(side.lanes) == 3
        for peer in peers:
            assert peer.recv(1)


async def test_a_few_bytes_are_not_worth_another_thread() -> None:
    async with _beside(3) as (side, peers):
        for transfer in range(4):
            side.send(transfer, bytes(1000))
        await until(lambda: len(side.moved) == 4)
        assert side.lanes.threads == 1
        side.send(4, bytes(_LARGE))
        await until(lambda: side.lanes.is_touched(4))
        side.send(5, bytes(1000))
        await until(lambda: len(side.moved) == 5)
        assert peers[1].recv(1)


async def test_there_is_no_thread_before_it_is_needed() -> None:
    async with _beside(2) as (side, peers):
        assert side.lanes.threads == 0
        target = bytearray(3)
        part = side.receive(1, target)
        assert side.lanes.threads == 2
        peers[1].sendall(encode_chunk_header(1, 0, 0, 3) + b"abc")
        await until(lambda: side.moved == [part])
        assert target == b"abc"


async def test_the_peers_leaving_is_no_loss_while_nothing_is_missing() -> None:
    async with _beside(2) as (side, peers):
        part = side.receive(1, bytearray(3))
        peers[0].sendall(encode_chunk_header(1, 0, 0, 3) + b"abc")
        await until(lambda: side.moved == [part])
        for peer in peers:
            peer.close()
        await until(lambda: side.release == 2)
        assert side.lost == []
        side.send(2, b"x")
        await until(lambda: len(side.lost) == 1)
        assert isinstance(side.lost[0], PeerLost)


async def test_one_lane_of_several_that_ends_is_a_loss_within_a_second() -> None:
    async with _beside(2) as (side, peers):
        side.receive(1, bytearray(3))
        peers[0].close()
        await until(lambda: side.lost == [None])


async def test_a_lane_whose_sender_died_beside_nothing_takes_no_further_part() -> None:
    async with _beside(1) as (side, peers):
        side.send(1, bytes(_LARGE))
        await until(lambda: side.lanes.is_touched(1))
        side.lanes.stop(1)
        side.pending.stop(1)
        peers[0].close()
        await until(lambda: not side.lanes.threads)
        assert side.lost == []
        side.send(2, b"never sent")
        await until(lambda: len(side.lost) == 1)


async def test_lanes_that_were_shut_down_before_they_opened_close_their_sockets() -> (
    None
):
    near, far = socket.socketpair()
    side = Side()
    side.lanes.shut_down()
    side.lanes.open([near])
    assert near.fileno() == -1
    far.close()
