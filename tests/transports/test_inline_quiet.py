"""What nobody touches any more once the inline transport says that it is quiet."""

from __future__ import annotations

import asyncio
import threading
import weakref
from typing import Any, Final

import anyio
import pytest

from asynckv.errors import PeerLost
from asynckv.protocol.wire import digest_of, encode_chunk_header
from asynckv.testing.blocked import until
from harness.inline_ends import (
    CHUNK_NBYTES,
    InlineEnd,
    Landing,
    open_beside_a_socket,
    open_inline_ends,
)

pytestmark = pytest.mark.both_loops

_LARGE: Final = 24 * 2**20


async def _quiesce(end: InlineEnd, transfer: int) -> None:
    await end.transport.quiesce(transfer)


async def _quiesce_cancelled_by_task(end: InlineEnd, transfer: int) -> None:
    end.transport.stop(transfer)
    task = asyncio.create_task(end.transport.quiesce(transfer))
    for _ in range(3):
        await asyncio.sleep(0)
        task.cancel()
    await asyncio.wait({task})


async def _quiesce_cancelled_by_scope(end: InlineEnd, transfer: int) -> None:
    end.transport.stop(transfer)
    with anyio.CancelScope() as scope:
        scope.cancel()
        await end.transport.quiesce(transfer)


_QUIESCE: Final = [_quiesce, _quiesce_cancelled_by_task, _quiesce_cancelled_by_scope]


@pytest.mark.parametrize("quiesce", _QUIESCE)
async def test_a_quiet_source_may_be_overwritten(quiesce: Any) -> None:
    async with open_inline_ends(2) as (near, far):
        sources = [bytearray(b"\1" * _LARGE) for _ in range(4)]
        targets = [bytearray(_LARGE) for _ in range(4)]
        landings = [far.receive(1, i, target) for i, target in enumerate(targets)]
        leavings = [near.send(1, i, source) for i, source in enumerate(sources)]
        await until(lambda: bool(targets[1][0]))
        await quiesce(near, 1)
        for source in sources:
            source[:] = b"\2" * _LARGE
        after = (
            far.receive(3, 0, bytearray(CHUNK_NBYTES)),
            near.send(3, 0, bytes(CHUNK_NBYTES)),
        )
        await after[0]
        assert not any(2 in target for target in targets)
        assert not all(landing.future.done() for landing in landings)
        assert not all(leaving.future.done() for leaving in leavings)
        await quiesce(far, 1)
        assert near.lost == far.lost == []


@pytest.mark.parametrize("quiesce", _QUIESCE)
async def test_a_quiet_target_is_not_written_to(quiesce: Any) -> None:
    async with open_inline_ends() as (near, far):
        target = bytearray(_LARGE)
        landing = far.receive(1, 0, target)
        leaving = near.send(1, 0, b"\1" * _LARGE)
        await until(lambda: bool(target[0]))
        await quiesce(far, 1)
        target[:] = bytes(_LARGE)
        assert await leaving == digest_of(b"\1" * _LARGE)
        after = far.receive(3, 0, bytearray(5))
        near.send(3, 0, b"after")
        await after
        assert target == bytes(_LARGE)
        assert not landing.future.done()
        assert far.lost == []


async def test_a_target_that_a_stalled_peer_holds_is_quiet_within_a_second() -> None:
    async with open_beside_a_socket() as (end, peer):
        landing = end.receive(1, 0, bytearray(CHUNK_NBYTES))
        peer.sendall(encode_chunk_header(1, 0, 0, CHUNK_NBYTES) + b"some")
        await until(lambda: end.transport._lanes.is_touched(1))
        async with asyncio.timeout(3):
            await end.transport.quiesce(1)
        assert not end.transport._lanes.is_touched(1)
        assert isinstance(end.lost[0], PeerLost)
        assert not landing.future.done()


async def test_a_source_that_a_stalled_peer_holds_is_quiet_within_a_second() -> None:
    async with open_beside_a_socket(chunk_bytes=_LARGE) as (end, peer):
        end.send(1, 0, bytearray(_LARGE))
        await until(lambda: end.transport._lanes.is_touched(1))
        async with asyncio.timeout(3):
            await end.transport.quiesce(1)
        assert not end.transport._lanes.is_touched(1)
        assert len(end.lost) == 1
        assert peer.fileno() >= 0


async def test_after_stop_nobody_is_told_and_the_memory_is_let_go() -> None:
    async with open_inline_ends() as (near, far):
        source, target = bytearray(_LARGE), bytearray(_LARGE)
        landing, leaving = far.receive(1, 0, target), near.send(1, 0, source)
        await near.transport.quiesce(1)
        await far.transport.quiesce(1)
        await asyncio.sleep(0)
        assert not landing.future.done()
        assert not leaving.future.done()
        source.clear()
        target.clear()


async def test_what_is_stopped_when_all_of_it_has_left_is_let_go() -> None:
    async with open_beside_a_socket() as (end, peer):
        memory, landing = memoryview(bytes(CHUNK_NBYTES)), Landing()
        kept = weakref.ref(memory)
        end.transport.send(1, 0, memory, landing)
        del memory
        while not end.transport._completions._parts:
            threading.Event().wait(0.001)  # the loop stands still: nobody is told yet
        end.transport.stop(1)
        await until(lambda: kept() is None)
        assert not landing.future.done()
        assert peer.fileno() >= 0


@pytest.mark.parametrize("quiesce", _QUIESCE)
async def test_after_an_abort_memory_is_quiet(quiesce: Any) -> None:
    async with open_inline_ends() as (near, far):
        source, target = bytearray(b"\1" * _LARGE), bytearray(_LARGE)
        landing, leaving = far.receive(1, 0, target), near.send(1, 0, source)
        await until(lambda: bool(target[0]))
        near.transport.abort()
        with pytest.raises(PeerLost):
            await leaving
        source[:] = b"\2" * _LARGE
        with pytest.raises(PeerLost):
            await landing
        assert 2 not in target
        await quiesce(near, 1)
        assert near.lost == []
        assert len(far.lost) == 1


async def test_after_an_abort_a_plain_function_can_wait_until_a_source_is_quiet() -> (
    None
):
    async with open_inline_ends(2) as (near, far):
        sources = [bytearray(b"\1" * _LARGE) for _ in range(4)]
        targets = [bytearray(_LARGE) for _ in range(4)]
        for i, target in enumerate(targets):
            far.receive(1, i, target)
        for i, source in enumerate(sources):
            near.send(1, i, source)
        await until(lambda: bool(targets[1][0]))
        near.transport.abort()
        near.transport.block_until_quiet(1)
        assert not near.transport._lanes.is_touched(1)
        for source in sources:
            source[:] = b"\2" * _LARGE
        far.transport.abort()
        await far.transport.quiesce(1)
        assert not any(2 in target for target in targets)
