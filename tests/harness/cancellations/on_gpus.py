"""Buffers on a GPU, and what peers insert, select, put and get there: cancelled."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any, Final, TypeAlias

import torch

from asynckv.abc import KVEntry
from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.remote.lookup import RemoteLookupBuffer
from asynckv.buffers.remote.peer import Peer, connect
from asynckv.buffers.serve import Server, serve
from asynckv.buffers.store import StoreBuffer
from asynckv.testing.blocked import until
from asynckv.testing.expectations import expect, expect_same, is_same, noise
from asynckv.transfers.routes import GpuRoom, StagingWriter
from asynckv.transfers.source import StagedTensor, release_staged
from asynckv.types import TensorSpec
from harness.cancellations.entries import (
    OVERWRITE,
    TOKENS,
    Partner,
    expect_overwritten,
    zeros,
)
from harness.cancellations.grounds import Ground
from harness.cancellations.sweeper import LARGE, Sweeper, scenario, ticks
from harness.fake_devices import (
    FakeDevice,
    fake_device,
    fake_device_of,
    faultless_gpus,
)
from harness.gpu_pairs import GpuPair, NcclBuffers, open_gpu_pair, open_nccl_buffers

__all__ = ("a_staged_insert",)

_Pair: TypeAlias = GpuPair | NcclBuffers
_ROOM_BYTES: Final = 2 * 2**20
_LARGE: Final[dict[str, Any]] = {
    "kinds": ("local",),
    "sizes": (LARGE,),
    "is_costly": True,
}
_ONCE: Final = _LARGE | {"sizes": (0,)}


@scenario("InMemoryBuffer.__aenter__", "InMemoryBuffer.open", **_ONCE)
async def a_lookup_on_a_gpu(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Has its memory when it is entered, and none when it is closed."""

    async def use(own: LookupBuffer, gpu: FakeDevice) -> None:
        async with own:
            expect(bool(gpu.process.owned), "it was entered without memory")

    with fake_device() as gpu:
        async for cancel in sweeper.sweep():
            own = LookupBuffer("1MiB", device=gpu.device, drain_s=0)
            await cancel(use, own, gpu)
            await own.aclose()
            await until(lambda: not gpu.process.owned)


@scenario("connect", **_ONCE)
async def a_way_between_gpus(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Is opened with its link, and leaves nothing on either GPU when that is over."""
    with faultless_gpus(2) as gpus:
        ours, theirs = fake_device_of(gpus.process()), fake_device_of(gpus.process(), 1)
        async with (
            LookupBuffer("1MiB", device=ours.device, drain_s=0) as buffer,
            serve("tcp://127.0.0.1:0", lookup=buffer) as server,
        ):
            before = len(ours.process.owned)

            async def use() -> None:
                where = theirs.device
                async with connect(server.url, device=where, max_bytes="1MiB") as peer:
                    expect(peer.transport == "nccl", "no way was opened")

            def is_quiet() -> bool:
                left = len(ours.process.owned) - before
                return not (left or theirs.process.owned or server._services)

            async for cancel in sweeper.sweep(is_open=True):
                await cancel(use)
                await until(is_quiet)


def _expect_still(gpu: FakeDevice) -> None:
    moving = [x for x in gpu.process.space.allocations() if x.users]
    expect(not moving, f"{len(moving)} pieces of memory are written to")


def _expect_key(entry: KVEntry, nbytes: int) -> None:
    key = entry.key
    expect(isinstance(key, torch.Tensor) and key.is_cuda, "it is on no GPU")
    expect_same(key if isinstance(key, torch.Tensor) else None, noise(nbytes, 1))


@scenario("RemoteLookupBuffer.drop_select", **_LARGE)
async def a_select_between_gpus(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Into memory of the caller's, quiet when the call has ended; or borrowed."""
    with faultless_gpus(2, max_delay=2) as gpus:
        async with open_nccl_buffers(gpus) as pair:
            key = pair.theirs.tensor(zeros(nbytes))

            async def take() -> None:
                await pair.peer.lookup.drop_select(TOKENS, into={"key": key})

            async def borrow() -> None:
                async with pair.peer.lookup.drop_select(TOKENS) as entry:
                    _expect_key(entry, nbytes)
                    del entry
                    await ticks(1)

            for call in (take, borrow):
                async for cancel in sweeper.sweep(call.__name__, is_open=True):
                    await pair.buffer.insert(TOKENS, None, noise(nbytes, 1), None, None)
                    outcome = await cancel(call)
                    if call is take:
                        _expect_still(pair.theirs)
                    key.fill_(OVERWRITE)
                    await until(lambda: not pair.buffer.statistics().leased)
                    left = pair.buffer.statistics().entries
                    expect(left <= outcome.cancelled, f"{left} entries are left")
                    if left:
                        _expect_key(await pair.peer.lookup.drop_select(TOKENS), nbytes)
                    await until(lambda: not pair.buffer.statistics().used_bytes)
                    await until(lambda: not pair.peer.budget.used_bytes)
                    expect(pair.peer.transport == "nccl", "the way was lost")
                    expect_overwritten(key)


@scenario("RemoteStoreBuffer.get", "RemoteStoreBuffer.put", **_LARGE)
async def a_value_of_a_gpu(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Got into memory of the caller's: quiet when the call has ended.

    Put in place of another value, which is there until the new one is.
    """
    old, new = noise(nbytes, 1), noise(nbytes, 2)
    async with _open_store() as (store, peer, there):
        memory = there.tensor(zeros(nbytes))
        async for cancel in sweeper.sweep("got", is_open=True):
            await store.put("key", old)
            await cancel(peer.store.get, "key", into=memory)
            _expect_still(there)
            memory.fill_(OVERWRITE)
            expect_same(await peer.store.get("key"), old)
            await _until_only(store, peer, nbytes)
            expect_overwritten(memory)
        async for cancel in sweeper.sweep("put", is_open=True):
            memory.copy_(new)
            await store.put("key", old)
            outcome = await cancel(peer.store.put, "key", memory)
            memory.fill_(OVERWRITE)
            value = await peer.store.get("key")
            if not outcome.cancelled or not is_same(value, old):
                expect_same(value, new)
            await _until_only(store, peer, nbytes)


@contextlib.asynccontextmanager
async def _open_store() -> AsyncIterator[tuple[StoreBuffer, Peer, FakeDevice]]:
    """Yield a store of the host, and a peer whose tensors are on a GPU."""
    with faultless_gpus(max_delay=2) as gpus:
        there = fake_device_of(gpus.process())
        async with (
            StoreBuffer("16MiB") as store,
            serve("tcp://127.0.0.1:0", store=store) as server,
            connect(server.url) as peer,
        ):
            peer.pool.lanes = there.lanes()
            yield store, peer, there


async def _until_only(store: StoreBuffer, peer: Peer, nbytes: int) -> None:
    """Only the value is held, and by nobody."""
    await until(lambda: store.statistics().used_bytes == nbytes)
    await until(lambda: not peer.budget.used_bytes)


@scenario("RemoteLookupBuffer.open_insert", "RemoteWriter.put", **_LARGE)
async def layers_to_a_gpu(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """All of them, or no entry: by lanes, on one GPU, and between two.

    The copies that are read are kept until nothing reads them.
    """
    for way in ("lanes", "ipc", "nccl"):
        await _insert(way, sweeper, nbytes, _by_layers)


@scenario("RemoteLookupBuffer.insert", **_LARGE)
async def an_insert_to_a_gpu(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """All of it, or no entry: on one GPU, and between two."""
    for way in ("ipc", "nccl"):
        await _insert(way, sweeper, nbytes, _at_once)


async def _by_layers(lookup: RemoteLookupBuffer, source: torch.Tensor) -> None:
    specs = dict.fromkeys(("key", "hidden"), TensorSpec((source.nbytes,), "uint8"))
    async with lookup.open_insert(TOKENS, None, specs) as writer:
        for name in specs:
            await writer.put(name, source)


async def _at_once(lookup: RemoteLookupBuffer, source: torch.Tensor) -> None:
    await lookup.insert(TOKENS, None, source, None, source)


async def _insert(way: str, sweeper: Sweeper, nbytes: int, insert: Any) -> None:
    with faultless_gpus(2, max_delay=2) as gpus:
        url = "?payload=inline" if way == "lanes" else ""
        opened: Any = open_gpu_pair(gpus, buffer_bytes=2**20, url=url)
        if way == "nccl":
            opened = open_nccl_buffers(gpus)
        async with opened as pair:
            if way == "nccl":
                await pair.opened()
            if way == "ipc":
                await until(lambda: pair.puts.are_read)
            source = pair.theirs.tensor(noise(nbytes, 1))
            is_in = False
            async for cancel in sweeper.sweep(way, is_open=True):
                source.copy_(noise(nbytes, 1))
                outcome = await cancel(insert, pair.peer.lookup, source)
                source.fill_(OVERWRITE)
                await _is_in_or_gone(pair, nbytes, outcome.cancelled)
                is_in |= not outcome.cancelled
            if way != "lanes" and is_in:  # a sweep may end before anything has gone
                await until(lambda: not pair.puts.staged_bytes)
                has_gone = pair.puts.has_shown if way == "ipc" else pair.has_put
                expect(has_gone, "it went by another way")
            expect(way != "nccl" or pair.peer.transport == "nccl", "the way was lost")


async def _is_in_or_gone(pair: _Pair, nbytes: int, was_cancelled: bool) -> None:
    await pair.peer.lookup.peek(TOKENS)  # all that was said before is heard
    await until(lambda: not _coming(pair.server))
    left = pair.buffer.statistics().entries
    expect(bool(left) or was_cancelled, "it was inserted, and is not there")
    if left:
        entry = await pair.buffer.drop_select(TOKENS)
        _expect_key(entry, nbytes)
        if entry.hidden is not None:
            expect_same(entry.hidden, noise(nbytes, 1))
        del entry
    await until(lambda: not pair.buffer.statistics().used_bytes)


def _coming(server: Server) -> int:
    every = [services.lookup for services in server._services]
    return sum(len(lookup.tasks) for lookup in every if lookup is not None)


@scenario("StagingWriter.room", "StagingWriter.put_staged", **_LARGE)
async def a_staged_insert(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """It waits for room until some is released: then it is there, or nothing of it."""
    spec = TensorSpec((nbytes,), "uint8")
    specs = dict.fromkeys(("key", "value"), spec)
    with faultless_gpus(max_delay=2) as gpus:
        async with open_gpu_pair(gpus, max_bytes=_ROOM_BYTES) as pair:
            source = pair.theirs.tensor(noise(nbytes, 1))
            room = pair.peer.routes.room or GpuRoom(pair.peer.memory)
            most = TensorSpec((_ROOM_BYTES - nbytes,), "uint8")

            async def make_room(filler: list[StagedTensor]) -> None:
                release_staged(filler)

            async def put() -> None:
                async with pair.peer.lookup.open_insert(TOKENS, None, specs) as writer:
                    if not isinstance(writer, StagingWriter):
                        raise AssertionError("it stages nothing")
                    staged = await writer.room([spec, spec]) or []
                    try:
                        for name, one in zip(specs, staged, strict=True):
                            place = [one.place()]
                            await pair.peer.pool.copy([source], place, digest=False)
                            await writer.put_staged(name, one)
                    finally:
                        release_staged(staged)

            async for cancel in sweeper.sweep(is_open=True):
                filler = list(await room.take([most], set()) or ())
                partner = Partner(sweeper, lambda: bool(room._line), make_room, filler)
                outcome = await cancel(put)
                await partner.ended()
                expect(not room._line, "somebody still waits for room")
                await until(lambda: not pair.puts.staged_bytes)
                await _is_in_or_gone(pair, nbytes, outcome.cancelled)
                await pair.emptied()
            expect(pair.puts.has_shown, "they went by another way")


@scenario("RemoteLookupBuffer.open_drop_select", "SelectStream.wait_for", **_LARGE)
async def a_reader_on_one_gpu(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Beside its writer, into memory of the caller's: quiet when it has ended."""
    contents = {name: noise(nbytes, salt) for salt, name in ((1, "key"), (2, "value"))}
    specs = dict.fromkeys(contents, TensorSpec((nbytes,), "uint8"))
    with faultless_gpus(max_delay=2) as gpus:
        async with open_gpu_pair(gpus) as pair:
            into = pair.theirs.tensor(zeros(nbytes))
            place = pair.theirs.tensors.memory_of(into)

            async def write() -> None:
                async with pair.buffer.open_insert(TOKENS, None, specs) as writer:
                    for name, tensor in contents.items():
                        await writer.put(name, tensor)

            async def read() -> None:
                opened = pair.peer.lookup.open_drop_select(TOKENS, into={"key": into})
                async with opened as stream:
                    for name, tensor in contents.items():
                        expect_same(await stream.wait_for(name), tensor)

            async for cancel in sweeper.sweep(is_open=True):
                partner = Partner(
                    sweeper,
                    lambda: pair.buffer.statistics().waiting_selects > 0,
                    write,
                )
                outcome = await cancel(read)
                there, _ = pair.theirs.process.space.find(place.address, place.nbytes)
                expect(not there.users, "memory of the caller's is written to")
                into.fill_(OVERWRITE)
                await partner.ended()
                await until(lambda: not pair.buffer.statistics().leased)
                left = pair.buffer.statistics().entries
                expect(left <= outcome.cancelled, f"{left} entries are left")
                if left:
                    _expect_key(await pair.peer.lookup.drop_select(TOKENS), nbytes)
                await until(lambda: not pair.buffer.statistics().mapped_by)
                await until(lambda: not pair.buffer.statistics().used_bytes)
                expect(not pair.peer.budget.used_bytes, "its bound is still charged")
                expect(not pair.pinned_bytes, "the peer keeps memory of the buffer")
                expect_overwritten(into)
            expect(pair.peer.transport == "cuda_ipc", "it came by another way")
