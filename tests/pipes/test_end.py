from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import pytest

from asynckv.errors import ChecksumError, EndOfStream, PeerLost, PipeBroken
from asynckv.links.link import LinkStream
from asynckv.pipes.end import PipeEnd
from asynckv.pipes.pipe import Pipe
from asynckv.protocol.frames import (
    Accepted,
    Commit,
    Failure,
    Flushed,
    Frame,
    OpenPipe,
    Push,
    Read,
)
from asynckv.testing import until
from asynckv.types import TensorSpec
from harness.link_pairs import Hearer, linked

pytestmark = pytest.mark.both_loops

SPEC = TensorSpec((8,), "uint8")


class Peer:
    """The other side of a pipe, frame by frame."""

    def __init__(self, stream: LinkStream, hearer: Hearer) -> None:
        self.stream = stream
        self.hearer = hearer

    def send(self, frame: Frame, body: bytes = b"") -> None:
        self.stream.send(frame, body)


@contextlib.asynccontextmanager
async def piped(digest: str = "full") -> AsyncIterator[tuple[Pipe, Peer]]:
    """A pipe that has dialled, and whoever it has reached."""
    options = {"digest": digest}
    async with linked("mem://", lambda *asked: None, near=options, far=options) as pair:
        end = PipeEnd.dialled(pair.near, 2**20, name="rank")
        pipe = Pipe(end, end)
        await until(lambda: bool(pair.service.asked))
        stream, frame, _ = pair.service.asked[0]
        assert frame == OpenPipe("rank")
        try:
            yield pipe, Peer(stream, pair.service.hearers[0])
        finally:
            pipe.abort()
            await pipe.aclose()


async def test_a_dialled_end_gives_the_peer_room_at_once() -> None:
    async with piped() as (_, peer):
        frame, _ = await peer.hearer.next()
        assert isinstance(frame, Read)
        assert frame.nbytes == 2**20


async def test_changed_bytes_break_the_pipe_on_both_sides() -> None:
    async with piped() as (pipe, peer):
        peer.send(Push(0, 0, True, SPEC, b"wrong"), bytes(8))
        with pytest.raises(ChecksumError, match="pipe is broken"):
            await pipe.recv_tensor()
        await until(lambda: len(peer.hearer.frames) == 2)
        failure, _ = peer.hearer.frames[-1]
        assert isinstance(failure, Failure)
        assert failure.code == "ChecksumError"
        with pytest.raises(PipeBroken, match="other bytes"):
            await pipe.send_tensor(None)


async def test_without_digests_nothing_is_compared() -> None:
    async with piped(digest="off") as (pipe, peer):
        peer.send(Push(0, 0, True, SPEC), bytes(8))
        found = await pipe.recv_tensor()
        assert found is not None
        assert found.tolist() == [0] * 8


async def test_a_peer_that_found_changed_bytes_breaks_the_pipe_here() -> None:
    async with piped() as (pipe, peer):
        await pipe.send_tensor(None)
        peer.send(Failure("ChecksumError", "tensor 1 changed"))
        with pytest.raises(PeerLost, match="tensor 1 changed"):
            await pipe.recv_tensor()
        with pytest.raises(PipeBroken) as caught:
            await pipe.flush()
        assert caught.value.maybe_delivered == 1


@pytest.mark.parametrize("frame", [Commit(), Accepted(), Flushed(1)])
async def test_a_frame_that_makes_no_sense_breaks_the_link(frame: Frame) -> None:
    async with piped() as (pipe, peer):
        peer.send(frame)
        with pytest.raises(PeerLost):
            await pipe.recv_tensor()
        assert not peer.stream.link.is_open


async def test_what_was_verified_is_said_before_the_goodbye() -> None:
    async with piped() as (pipe, peer):
        await peer.hearer.next()
        peer.send(Push(inline=True))
        assert await pipe.recv_tensor() is None
        await pipe.aclose()
        await until(lambda: bool(peer.hearer.losses))
        assert Flushed(1) in [frame for frame, _ in peer.hearer.frames]
        assert peer.hearer.losses[0].goodbye


async def test_an_aborted_end_gives_nothing_that_it_had_received() -> None:
    async with piped() as (pipe, peer):
        peer.send(Push(inline=True))
        await until(lambda: pipe.statistics().held_tensors == 1)
        pipe.abort()
        with pytest.raises(PeerLost, match="aborted on this side"):
            await pipe.recv_tensor()


async def test_a_peer_that_says_goodbye_in_the_middle_is_lost() -> None:
    async with piped() as (pipe, peer):
        large = TensorSpec((2**18,), "uint8")
        peer.send(Push(inline=True))
        peer.send(Push(4, 0, False, large))
        await until(lambda: pipe.statistics().held_tensors == 2)
        await peer.stream.link.aclose()
        assert await pipe.recv_tensor() is None
        with pytest.raises(PeerLost):
            await pipe.recv_tensor()
        with pytest.raises(EndOfStream):
            await pipe.send_tensor(None)
