from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, Final

import anyio
import pytest

from asynckv.errors import LocalProtocolError, PeerLost, RemoteProtocolError
from asynckv.protocol.wire import digest_of
from asynckv.tensors.feeds import Feed
from asynckv.transports.mem import MemTransport

_LARGE: Final = 24 * 2**20


class End:
    """One of a pair, and why it was lost."""

    def __init__(self, *, digest: bool = True) -> None:
        self.lost: list[Exception] = []
        loop = asyncio.get_running_loop()
        self.transport = MemTransport(1, digest, loop, self.lost.append)

    def send(self, transfer: int, part: int, source: Any) -> asyncio.Future[bytes]:
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.transport.send(transfer, part, memoryview(source), _settling(future))
        return future

    def receive(self, transfer: int, part: int, target: Any) -> asyncio.Future[bytes]:
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.transport.receive(transfer, part, memoryview(target), _settling(future))
        return future


def _settling(future: asyncio.Future[bytes]) -> Any:
    def done(digest: bytes, error: BaseException | None) -> None:
        if error is None:
            future.set_result(digest)
        else:
            future.set_exception(error)

    return done


@contextlib.asynccontextmanager
async def _connected(*, digest: bool = True) -> AsyncIterator[tuple[End, End]]:
    near, far = End(digest=digest), End(digest=digest)
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


@pytest.mark.both_loops
@pytest.mark.parametrize("nbytes", [0, 1, 65536, 65537, _LARGE])
async def test_parts_land_with_equal_digests(nbytes: int) -> None:
    async with _connected() as (near, far):
        source, target = bytes(range(256)) * (nbytes // 256 + 1), bytearray(nbytes)
        landing = far.receive(1, 0, target)
        leaving = near.send(1, 0, memoryview(source)[:nbytes])
        assert await landing == await leaving == digest_of(source[:nbytes])
        assert target == source[:nbytes]


async def test_without_digests_they_are_empty() -> None:
    async with _connected(digest=False) as (near, far):
        landing = far.receive(1, 0, bytearray(3))
        assert await near.send(1, 0, b"abc") == await landing == b""


@pytest.mark.parametrize("source", [b"late", b""])
async def test_without_digests_a_known_one_is_not_told(source: bytes) -> None:
    async with _connected(digest=False) as (near, far):
        far.transport.announce(1)
        told: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        view = memoryview(source)
        near.transport.send(1, 0, view, _settling(told), digest=b"k" * 16)
        assert await told == b""


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


async def test_a_known_digest_is_passed_on() -> None:
    async with _connected() as (near, far):
        landing = far.receive(1, 0, bytearray(3))
        known: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        source = memoryview(b"abc")
        near.transport.send(1, 0, source, _settling(known), digest=b"k" * 16)
        assert await known == b"k" * 16
        assert await landing == digest_of(b"abc")


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


@pytest.mark.parametrize("quiesce", [_quiesce, _quiesce_cancelled])
async def test_a_quiet_target_is_not_written_to(quiesce: Any) -> None:
    async with _connected() as (near, far):
        target = bytearray(_LARGE)
        landing, leaving = far.receive(1, 0, target), near.send(1, 0, b"\1" * _LARGE)
        await _until_written(target)
        await quiesce(far, 1)
        target[:] = bytes(_LARGE)
        assert await leaving == digest_of(b"\1" * _LARGE)
        assert target == bytes(_LARGE)
        assert not landing.done()


async def test_parts_of_a_stopped_transfer_are_dropped() -> None:
    async with _connected() as (near, far):
        far.transport.announce(4)
        assert await near.send(3, 0, b"late") == digest_of(b"late")
        assert far.lost == []


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


async def test_after_an_abort_memory_is_quiet() -> None:
    async with _connected() as (near, far):
        source, target = bytearray(b"\1" * _LARGE), bytearray(_LARGE)
        landing, leaving = far.receive(1, 0, target), near.send(1, 0, source)
        await _until_written(target)
        near.transport.abort()
        with pytest.raises(PeerLost):
            await leaving
        source[:] = b"\2" * _LARGE
        with pytest.raises(PeerLost):
            await landing
        assert 2 not in target


async def test_closing_lets_queued_parts_leave() -> None:
    async with _connected() as (near, far):
        target = bytearray(_LARGE)
        landing, leaving = far.receive(1, 0, target), near.send(1, 0, b"\1" * _LARGE)
        await near.transport.aclose()
        assert await landing == await leaving
