"""Views of a peer's memory that are written to: nobody else sees it."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import posix
import random
import subprocess
import threading
from collections.abc import AsyncIterator

import pytest
import torch

import asynckv
from asynckv.links.fd_socket import has_fd_sockets
from asynckv.links.options import Digest
from asynckv.testing.blocked import until
from asynckv.types import TensorSpec
from harness.children import line_of
from harness.forks import ForkServer

pytestmark = pytest.mark.skipif(not has_fd_sockets(), reason="nothing to map here")

MIB = 2**20
each_digest = pytest.mark.parametrize("digest", ["edges", "off", "full"])
_libc = ctypes.CDLL(None, use_errno=True)


@contextlib.asynccontextmanager
async def mapped(
    digest: Digest = "auto", max_bytes: int = 8 * MIB
) -> AsyncIterator[tuple[asynckv.LookupBuffer, asynckv.Peer]]:
    async with (
        asynckv.LookupBuffer(max_bytes, drain_s=0) as buffer,
        asynckv.serve("tcp://127.0.0.1:0", lookup=buffer, digest=digest) as server,
        asynckv.connect(server.url, digest=digest) as peer,
    ):
        assert peer.transport == "map"
        yield buffer, peer


@pytest.fixture
async def buffer() -> AsyncIterator[asynckv.LookupBuffer]:
    async with asynckv.LookupBuffer(8 * MIB, drain_s=0) as buffer:
        yield buffer


@pytest.fixture
async def peer(buffer: asynckv.LookupBuffer) -> AsyncIterator[asynckv.Peer]:
    """One that maps its memory."""
    async with (
        asynckv.serve("tcp://127.0.0.1:0", lookup=buffer) as server,
        asynckv.connect(server.url) as peer,
    ):
        assert peer.transport == "map"
        yield peer


def some_bytes(nbytes: int = MIB) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8)


async def insert(
    buffer: asynckv.LookupBuffer, key: torch.Tensor, deliveries: int = 1
) -> None:
    await buffer.insert([1], None, key, some_bytes(999), None, deliveries=deliveries)


async def churn(buffer: asynckv.LookupBuffer, peer: asynckv.Peer, times: int) -> None:
    """Fill the buffer so often, and write over all that is taken out."""
    for _ in range(times * 8):
        key = some_bytes()
        await insert(buffer, key)
        async with peer.lookup.drop_select() as entry:
            assert entry.key_tensor.equal(key)
            entry.key_tensor.fill_(0)
        del entry


@each_digest
async def test_what_is_written_changes_nothing_for_the_next_entry(
    digest: Digest,
) -> None:
    async with mapped(digest, max_bytes=2 * MIB) as (buffer, peer):
        await churn(buffer, peer, 1)


@each_digest
async def test_a_body_that_writes_raises_and_keeps_its_view_gets_the_entry_again(
    digest: Digest,
) -> None:
    async with mapped(digest) as (buffer, peer):
        key = some_bytes()
        await insert(buffer, key)
        with pytest.raises(KeyError):
            async with peer.lookup.drop_select() as entry:
                view = entry.key_tensor.add_(1)
                raise KeyError
        async with peer.lookup.drop_select() as entry:
            assert entry.attempt == 2 and entry.key_tensor.equal(key)
            entry.key_tensor.fill_(0)
        assert view.equal(key + 1)
        del entry, view


async def test_concurrent_deliveries_of_one_place_do_not_see_each_other(
    buffer: asynckv.LookupBuffer, peer: asynckv.Peer
) -> None:
    key, kept = some_bytes(), dict[int, torch.Tensor]()
    await insert(buffer, key)

    async def write(number: int) -> None:
        with contextlib.suppress(KeyError):
            async with peer.lookup.drop_select() as entry:
                assert entry.key_tensor.equal(key)
                view = entry.key_tensor.fill_(number)
                if number % 2:  # the others' pages serve those who come later
                    kept[number] = view
                raise KeyError

    await asyncio.gather(*(write(number) for number in range(4)))
    async with peer.lookup.drop_select() as entry:
        assert entry.attempt == 5 and entry.key_tensor.equal(key)
    assert all(view.eq(number).all() for number, view in kept.items())
    del entry
    kept.clear()


async def test_a_copy_is_of_what_the_owner_has_not_of_what_a_view_was_made(
    buffer: asynckv.LookupBuffer, peer: asynckv.Peer
) -> None:
    key = some_bytes()
    await insert(buffer, key)
    with pytest.raises(KeyError):
        async with peer.lookup.drop_select() as entry:
            view = entry.key_tensor.fill_(0)
            raise KeyError
    into = {"key": torch.empty(MIB, dtype=torch.uint8)}
    await peer.lookup.drop_select(into=into)
    assert into["key"].equal(key)
    del entry, view


async def test_small_tensors_of_a_stream_are_written_while_later_ones_land(
    buffer: asynckv.LookupBuffer, peer: asynckv.Peer
) -> None:
    names = [f"{n}.key" for n in range(40)]
    specs = {name: TensorSpec((1024,), "uint8") for name in names}
    sent = {name: some_bytes(1024) for name in names}
    async with (
        buffer.open_insert([1], None, specs) as writer,
        peer.lookup.open_drop_select([1]) as stream,
    ):
        for name in names:
            await writer.put(name, sent[name])
            tensor = await stream.wait_for(name)
            assert tensor.equal(sent[name])
            tensor.fill_(0)


async def test_a_written_view_outlives_its_block_and_dies_in_another_thread() -> None:
    async with mapped(max_bytes=4 * MIB) as (buffer, peer):
        await insert(buffer, some_bytes())
        async with peer.lookup.drop_select() as entry:
            views = [entry.key_tensor.fill_(3)]
        del entry
        await churn(buffer, peer, 1)
        assert views[0].eq(3).all()
        thread = threading.Thread(target=views.clear)
        thread.start()
        await asyncio.to_thread(thread.join)
        await until(lambda: not buffer.statistics().pinned_bytes)
        await churn(buffer, peer, 2)


async def test_what_a_forked_child_writes_is_its_own(
    buffer: asynckv.LookupBuffer, peer: asynckv.Peer
) -> None:
    key = some_bytes()
    await insert(buffer, key)
    async with peer.lookup.drop_select() as entry:
        pid = posix.fork()
        if not pid:
            entry.key_tensor.numpy()[:] = 0
            entry = None  # type: ignore[assignment]
            os._exit(0)
        _, status = await asyncio.to_thread(os.waitpid, pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert entry.key_tensor.equal(key)
    del entry
    await churn(buffer, peer, 1)


async def test_a_view_may_be_locked_in_memory() -> None:
    async with mapped(max_bytes=2 * MIB) as (buffer, peer):
        await insert(buffer, some_bytes())
        async with peer.lookup.drop_select() as entry:
            address = ctypes.c_void_p(entry.key_tensor.fill_(0).data_ptr())
            assert not _libc.mlock(address, MIB // 2)
        del entry
        await churn(buffer, peer, 1)


async def test_views_of_a_link_that_was_cut_are_not_seen_by_the_next_one() -> None:
    async with mapped(max_bytes=4 * MIB) as (buffer, peer):
        key = some_bytes()
        await insert(buffer, key)
        with contextlib.suppress(asynckv.LeaseLost):
            async with peer.lookup.drop_select() as entry:
                view = entry.key_tensor.fill_(0)
                link = peer.link_nowait()
                assert link is not None
                link.abort()
        async with peer.lookup.drop_select() as again:
            assert again.key_tensor.equal(key)
        del entry, again, view
        await churn(buffer, peer, 1)


async def test_much_that_was_written_is_dropped_before_the_owner_uses_it_again() -> (
    None
):
    async with mapped(max_bytes=20 * MIB) as (buffer, peer):
        for _ in range(3):
            key = some_bytes(20 * MIB - 4096)
            await buffer.insert([1], None, key, None, None)
            async with peer.lookup.drop_select() as entry:
                assert entry.key_tensor.equal(key)
                entry.key_tensor.fill_(0)
            del entry


async def test_small_tensors_that_land_in_into_need_no_room_in_the_bound(
    buffer: asynckv.LookupBuffer, peer: asynckv.Peer
) -> None:
    layers = {f"{n}": some_bytes(1024) for n in range(100)}
    into = {f"{n}.key": torch.empty(1024, dtype=torch.uint8) for n in range(100)}
    async with asynckv.connect(peer.url, max_bytes="64KiB") as other:
        await buffer.insert([1], None, layers, None, None)
        async with other.lookup.drop_select(into=into):
            assert all(into[f"{n}.key"].equal(layers[f"{n}"]) for n in range(100))


@pytest.mark.slow
@pytest.mark.multiprocess
async def test_a_process_that_writes_at_random_finds_every_entry_as_it_was(
    forks: ForkServer,
) -> None:
    async with (
        asynckv.LookupBuffer(2 * MIB, drain_s=0, max_deliver=1000) as buffer,
        asynckv.serve("tcp://127.0.0.1:0", lookup=buffer) as server,
        forks.running(_WRITING, server.url, "40") as process,
        asyncio.timeout(30),
    ):
        for number in range(40):  # which fill it more than ten times over
            shape = (65_536 + number % 9 * 131_072,)
            key = torch.full(shape, number + 1, dtype=torch.uint8)
            await buffer.insert([number], None, key, None, None)
        assert await line_of(process) == "map right"


_WRITING = """
import asyncio, asynckv, contextlib, random, sys
async def main():
    choose, kept = random.Random(5), []
    async with asynckv.connect(sys.argv[1]) as peer:
        for number in range(int(sys.argv[2])):
            for is_last in (False, True):
                with contextlib.suppress(KeyError):
                    async with peer.lookup.drop_select([number]) as entry:
                        assert (entry.key == number + 1).all(), number
                        entry.key[:: choose.randrange(1, 9_999)] = 99
                        kept.append((entry.key, entry.key.clone()))
                        if not is_last:
                            raise KeyError
                del entry
            choose.shuffle(kept)
            assert all(view.equal(copy) for view, copy in kept)
            del kept[choose.randrange(3):]
        print(peer.transport, "right", flush=True)
asyncio.run(main())
"""


_LOCKED = """
import asyncio, ctypes, torch, asynckv
kept = []
async def main():
    async with (
        asynckv.LookupBuffer("8MiB") as buffer,
        asynckv.serve("tcp://127.0.0.1:0", lookup=buffer, digest="off") as server,
        asynckv.connect(server.url, digest="off", max_bytes="8MiB") as peer,
    ):
        assert peer.transport == "map"
        for value in range(12):
            if value == 3 and ctypes.CDLL(None).mlockall(3):
                print("may not lock memory")
            key = torch.full((2**20,), value, dtype=torch.uint8)
            await buffer.insert([1], None, key, None, None)
            async with peer.lookup.drop_select() as entry:
                assert entry.key_tensor.eq(value).all()
                kept[:] = [entry.key_tensor.fill_(99)]
            del entry
asyncio.run(main())
print(kept[0].min().item())
"""


@pytest.mark.slow
@pytest.mark.multiprocess
async def test_a_process_may_lock_its_memory_and_end_with_a_written_view(
    forks: ForkServer,
) -> None:
    async with forks.running(_LOCKED, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        *said, kept = (await process.stdout.read()).splitlines()
        errors = await process.stderr.read()
        assert (await process.wait(), kept, errors) == (0, b"99", b"")
    if said:
        pytest.skip("this user may not lock memory")


@pytest.mark.parametrize(
    "digest",
    [
        pytest.param("off", marks=pytest.mark.trust),
        pytest.param("auto", marks=pytest.mark.chaos),
    ],
)
@pytest.mark.timeout(300)
async def test_ten_thousand_writes_into_views_change_nothing_of_anybody_else(
    digest: Digest,
) -> None:
    chance = random.Random(5)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    async with mapped(digest, max_bytes=8 * MIB) as (buffer, peer):
        for _ in range(200):
            key = some_bytes(chance.choice([70_000, 300_000, 999_999]))
            await insert(buffer, key)
            is_failing = chance.random() < 0.2
            with contextlib.suppress(KeyError):
                async with peer.lookup.drop_select() as entry:
                    assert entry.key_tensor.equal(key)
                    for _ in range(50):
                        start = chance.randrange(key.nbytes)
                        entry.key_tensor[start : start + 99] = chance.randrange(256)
                    kept.append((entry.key_tensor, entry.key_tensor.clone()))
                    if is_failing:
                        raise KeyError
            if is_failing:
                async with peer.lookup.drop_select() as entry:
                    assert entry.key_tensor.equal(key)
            del entry
            while len(kept) > chance.randrange(4):
                view, copy = kept.pop(0)
                assert view.equal(copy)
                del view, copy
        assert all(view.equal(copy) for view, copy in kept)
        kept.clear()
