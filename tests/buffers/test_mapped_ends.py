"""The end of views that is told late, or to nobody: the connection is full, or gone."""

from __future__ import annotations

import asyncio
import contextlib
import os
import struct
import threading
from collections.abc import AsyncIterator

import pytest
import torch

from asynckv.abc import KVEntry
from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.remote.peer import Peer, connect
from asynckv.buffers.serve import Server
from asynckv.sharing.mappings import MappedMemory
from asynckv.tensors.shared_file import MappedFile
from asynckv.tensors.stitching import Claim
from asynckv.testing.blocked import until

MIB = 2**20


@pytest.fixture
async def peer(mappable: Server) -> AsyncIterator[Peer]:
    async with connect(mappable.url, reconnect_s=0) as peer:
        assert peer.transport == "map"
        yield peer


async def insert(buffer: LookupBuffer) -> None:
    tensor = torch.ones(MIB, dtype=torch.uint8)
    await buffer.insert([1, 2], None, tensor, None, None)


def pinned(buffer: LookupBuffer) -> int:
    return buffer.statistics().pinned_bytes


def memory_of(peer: Peer) -> MappedMemory:
    link = peer.link_nowait()
    assert link is not None
    memory = peer._imports.of(link)
    assert memory is not None
    return memory


async def taken(local: LookupBuffer, peer: Peer, count: int) -> list[KVEntry]:
    """Take so many entries as views, and one, the first, that is let go at once."""
    await insert(local)
    await peer.lookup.drop_select()
    entries = []
    for _ in range(count):
        await insert(local)
        async with peer.lookup.drop_select() as entry:
            entries.append(entry)
    await until(lambda: pinned(local) == count * MIB)
    return entries


def choke(memory: MappedMemory) -> None:
    """Fill its connection with the end of the first pin, which is nothing new."""
    with contextlib.suppress(BlockingIOError):
        while True:
            memory._sock.send(struct.pack("!Q", 1))


async def hung_up(memory: MappedMemory, fd: int, local: LookupBuffer) -> None:
    """Wait for the end of its connection; nothing of it is left in the loop."""
    await until(lambda: memory._sock.fileno() < 0)
    await until(lambda: pinned(local) == 0)
    assert not asyncio.get_running_loop().remove_writer(fd)


async def test_what_a_full_connection_was_not_told_is_told_by_its_end(
    local: LookupBuffer, peer: Peer
) -> None:
    views = await taken(local, peer, 1)
    memory = memory_of(peer)
    fd = memory._sock.fileno()
    memory.link_over()
    choke(memory)
    views.clear()
    assert memory._sock.fileno() == fd
    await hung_up(memory, fd, local)


async def test_a_fork_while_what_was_written_is_dropped_keeps_nothing(
    local: LookupBuffer, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, release = memory_of(peer), MappedFile.release

    def release_while_forking(file: MappedFile, claim: Claim) -> None:
        memory.keep_for_child()
        release(file, claim)

    monkeypatch.setattr(MappedFile, "release", release_while_forking)
    await insert(local)
    async with peer.lookup.drop_select() as entry:
        pass
    del entry
    await until(lambda: pinned(local) == 0)


async def test_two_threads_that_let_the_last_two_go_at_once_hang_up_once(
    monkeypatch: pytest.MonkeyPatch, local: LookupBuffer, peer: Peer
) -> None:
    class Meeting(set[int]):
        def discard(self, number: object) -> None:
            super().discard(number)
            meeting.wait(10)

    meeting = threading.Barrier(2)
    views = await taken(local, peer, 2)
    memory = memory_of(peer)
    fd = memory._sock.fileno()
    memory.link_over()
    choke(memory)
    monkeypatch.setattr(memory, "_live", Meeting(memory._live))
    threads = [threading.Thread(target=[view].clear) for view in views]
    views.clear()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    await hung_up(memory, fd, local)


async def test_a_connection_that_was_closed_is_not_written_to_later(
    local: LookupBuffer, peer: Peer
) -> None:
    views = await taken(local, peer, 1)
    memory = memory_of(peer)
    fd = memory._sock.fileno()
    choke(memory)
    views.clear()
    await asyncio.sleep(0)
    choke(memory)
    memory.link_over()
    memory._tell_unsent()  # in the same tick, by the loop: and it is full again
    await hung_up(memory, fd, local)


async def test_a_copy_of_a_view_in_a_child_tells_nobody_of_its_end(
    monkeypatch: pytest.MonkeyPatch, local: LookupBuffer, peer: Peer
) -> None:
    views = await taken(local, peer, 1)
    memory = memory_of(peer)
    with monkeypatch.context() as patch:
        patch.setattr(memory, "_pid", os.getpid() + 1)
        views.clear()
    for _ in range(20):
        await asyncio.sleep(0)
    assert pinned(local) == MIB
    memory.release(2)
    await until(lambda: pinned(local) == 0)
