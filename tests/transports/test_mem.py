from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, Final

import anyio
import pytest

from asynckv.errors import LocalProtocolError, PeerLost, RemoteProtocolError
from asynckv.tensors.feeds import Feed
from asynckv.transports.mem import MemTransport
from harness.inline_ends import Landing

_LARGE: Final = 24 * 2**20


class End:
    """One of a pair, and why it was lost."""

    def __init__(self) -> None:
        self.lost: list[Exception] = []
        loop = asyncio.get_running_loop()
        self.transport = MemTransport(1, True, loop, self.lost.append)

    def send(self, transfer: int, part: int, source: Any) -> asyncio.Future[bytes]:
        landing = Landing()
        self.transport.send(transfer, part, memoryview(source), landing)
        return landing.future

    def receive(self, transfer: int, part: int, target: Any) -> asyncio.Future[bytes]:
        landing = Landing()
        self.transport.receive(transfer, part, memoryview(target), landing)
        return landing.future


@contextlib.asynccontextmanager
async def _connected() -> AsyncIterator[tuple[End, End]]:
    near, far = End(), End()
    await near.transport.open(far.transport.describe(), far.transport)
    await far.transport.open(near.transport.describe(), near.transport)
    try:
        yield near, far
    finally:
        await near.transport.aclose()
        await far.transport.aclose()


async def _until_written(target: bytearray) -> None:
    async with asyncio.timeout(10):
        while not target[0]:  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_nothing_moves_before_it_is_open() -> None:
    end = End()
    with pytest.raises(LocalProtocolError, match="not open"):
        end.send(1, 0, b"x")
    with pytest.raises(LocalProtocolError, match="not open"):
        end.receive(2, 0, bytearray(1))
    await end.transport.aclose()


async def test_it_sends_what_is_there_alone() -> None:
    async with _connected() as (near, _):
        assert not near.transport.feeds
        with pytest.raises(LocalProtocolError, match="mem sends nothing piece"):
            near.transport.feed(1, 0, Feed(3), lambda *_: None)


async def test_its_threads_need_the_loop_to_let_go() -> None:
    async with _connected() as (near, _):
        assert not near.transport.can_block_until_quiet
        with pytest.raises(LocalProtocolError, match="mem cannot block"):
            near.transport.block_until_quiet(1)


async def test_it_opens_on_its_peer_only() -> None:
    end = End()
    with pytest.raises(LocalProtocolError, match="the peer's"):
        await end.transport.open(b"", [])
    await end.transport.aclose()


async def _quiesce(end: End, transfer: int) -> None:
    await end.transport.quiesce(transfer)


async def _quiesce_cancelled(end: End, transfer: int) -> None:
    end.transport.stop(transfer)
    with anyio.CancelScope() as scope:
        scope.cancel()
        await end.transport.quiesce(transfer)


@pytest.mark.parametrize("quiesce", [_quiesce, _quiesce_cancelled])
async def test_a_quiet_source_may_be_overwritten(quiesce: Any) -> None:
    async with _connected() as (near, far):
        sources = [bytearray(b"\1" * _LARGE) for _ in range(4)]
        targets = [bytearray(_LARGE) for _ in range(4)]
        landings = [far.receive(1, i, target) for i, target in enumerate(targets)]
        leavings = [near.send(1, i, source) for i, source in enumerate(sources)]
        await _until_written(targets[0])
        await quiesce(near, 1)
        for source in sources:
            source[:] = b"\2" * _LARGE
        assert not any(2 in target for target in targets)
        assert not landings[3].done()
        assert not leavings[3].done()
        await far.transport.quiesce(1)
        assert near.lost == far.lost == []


@pytest.mark.parametrize(("transfer", "nbytes"), [(9, 4), (1, 5), (1, 3)])
async def test_a_peer_that_lies_ends_the_transport(transfer: int, nbytes: int) -> None:
    async with _connected() as (near, far):
        landing = far.receive(1, 0, bytearray(4))
        near.send(transfer, 0, bytes(nbytes)).cancel()
        near.transport.stop(2)
        with pytest.raises(RemoteProtocolError):
            await landing
        assert isinstance(far.lost[0], RemoteProtocolError)
        near.transport.stop(transfer)


async def test_when_one_side_ends_the_other_is_lost_if_something_is_missing() -> None:
    async with _connected() as (near, far):
        landing = far.receive(1, 0, bytearray(4))
        near.transport.abort()
        with pytest.raises(PeerLost):
            await landing
        assert near.lost == []
        assert len(far.lost) == 1


async def test_when_one_side_ends_the_other_is_not_lost_but_can_do_no_more() -> None:
    async with _connected() as (near, far):
        await near.transport.aclose()
        await asyncio.sleep(0)
        assert far.lost == []
        with pytest.raises(PeerLost):
            await far.receive(1, 0, bytearray(4))
        with pytest.raises(PeerLost):
            await far.send(2, 0, b"abcd")
        with pytest.raises(PeerLost, match="this side"):
            await near.send(3, 0, b"abcd")
