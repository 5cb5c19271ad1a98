"""What peers insert on a GPU, or store from one: cancelled anywhere."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final, TypeAlias

import torch

from asynckv.buffers.remote.lookup import RemoteLookupBuffer
from asynckv.buffers.remote.peer import Peer, connect
from asynckv.buffers.serve import Server, serve
from asynckv.buffers.store import StoreBuffer
from asynckv.testing.blocked import until
from asynckv.testing.cancellation import Outcome
from asynckv.testing.expectations import expect, expect_same, is_same, noise
from asynckv.types import TensorSpec
from harness.cancellations.entries import (
    LARGE,
    OVERWRITE,
    TOKENS,
    expect_overwritten,
)
from harness.cancellations.grounds import Ground
from harness.cancellations.scenario import Scenario
from harness.cancellations.sweeper import Sweeper
from harness.fake_devices import FakeDevice, fake_device_of, faultless_gpus
from harness.gpu_pairs import GpuPair, open_gpu_pair
from harness.nccl_buffer_pairs import NcclBuffers, open_nccl_buffers

__all__ = (
    "INSERTING_ON_GPUS",
    "a_get_into_a_gpu",
    "a_put_from_a_gpu",
    "an_insert_between_gpus",
    "an_insert_on_one_gpu",
    "layers_between_gpus",
    "layers_on_one_gpu",
    "layers_to_a_gpu",
)

_KEY: Final = "key"
_LAYERS: Final = ("key", "hidden")
_BY_LANES: Final = "?payload=inline"


@asynccontextmanager
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


async def a_get_into_a_gpu(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Into memory of the caller's: quiet when the call has ended."""
    async with _open_store() as (store, peer, there):
        into = there.tensor(torch.zeros(nbytes, dtype=torch.uint8))
        await store.put(_KEY, noise(nbytes, 1))

        async def check(outcome: Outcome[torch.Tensor | None]) -> None:
            moving = [x for x in there.process.space.allocations() if x.users]
            expect(not moving, f"{len(moving)} pieces of memory are written to")
            into.fill_(OVERWRITE)
            expect_same(await peer.store.get(_KEY), noise(nbytes, 1))
            await _until_quiet(store, peer, nbytes)
            expect_overwritten(into)

        await sweeper.sweep(
            f"a get of {nbytes} bytes into a GPU",
            lambda: peer.store.get(_KEY, into=into),
            check,
        )
    await ground.check_quiet()


async def a_put_from_a_gpu(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """In place of another value, which is there until the new one is."""
    async with _open_store() as (store, peer, there):
        old, new = noise(nbytes, 1), noise(nbytes, 2)
        source = there.tensor(new)

        async def before() -> None:
            source.copy_(new)
            await store.put(_KEY, old)

        async def check(outcome: Outcome[None]) -> None:
            source.fill_(OVERWRITE)
            value = await peer.store.get(_KEY)
            if not outcome.cancelled or not is_same(value, old):
                expect_same(value, new)
            await _until_quiet(store, peer, nbytes)

        await sweeper.sweep(
            f"a put of {nbytes} bytes from a GPU",
            lambda: peer.store.put(_KEY, source),
            check,
            before,
        )
    await ground.check_quiet()


async def layers_to_a_gpu(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """All of them, or no entry; by lanes."""
    with faultless_gpus(2, max_delay=2) as gpus:
        async with open_gpu_pair(gpus, buffer_bytes=2**20, url=_BY_LANES) as pair:
            await _insert(pair, sweeper, nbytes, _by_layers)
    await ground.check_quiet()


async def layers_on_one_gpu(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """As by lanes; and the copies that are read are kept until nothing reads them."""
    await _insert_on_one_gpu(sweeper, nbytes, _by_layers)
    await ground.check_quiet()


async def an_insert_on_one_gpu(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """As layers."""
    await _insert_on_one_gpu(sweeper, nbytes, _at_once)
    await ground.check_quiet()


async def layers_between_gpus(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """As on one GPU."""
    await _insert_between_gpus(sweeper, nbytes, _by_layers)
    await ground.check_quiet()


async def an_insert_between_gpus(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """All of it, or no entry."""
    await _insert_between_gpus(sweeper, nbytes, _at_once)
    await ground.check_quiet()


_Insert: TypeAlias = Callable[[RemoteLookupBuffer, torch.Tensor], Awaitable[object]]


async def _by_layers(lookup: RemoteLookupBuffer, source: torch.Tensor) -> None:
    specs = {name: TensorSpec((source.nbytes,), "uint8") for name in _LAYERS}
    async with lookup.open_insert(TOKENS, None, specs) as writer:
        for name in specs:
            await writer.put(name, source)


async def _at_once(lookup: RemoteLookupBuffer, source: torch.Tensor) -> None:
    await lookup.insert(TOKENS, None, source, None, source)


async def _insert_on_one_gpu(sweeper: Sweeper, nbytes: int, insert: _Insert) -> None:
    with faultless_gpus(2, max_delay=2) as gpus:
        async with open_gpu_pair(gpus, buffer_bytes=2**20) as pair:
            await _insert(pair, sweeper, nbytes, insert)
            await until(lambda: not pair.puts.staged_bytes)
            expect(pair.puts.has_shown, "it went by another way")


async def _insert_between_gpus(sweeper: Sweeper, nbytes: int, insert: _Insert) -> None:
    with faultless_gpus(2, max_delay=2) as gpus:
        async with open_nccl_buffers(gpus) as pair:
            await pair.opened()
            await _insert(pair, sweeper, nbytes, insert)
            await until(lambda: not pair.staged_bytes)
            expect(pair.has_put, "it went by another way")
            expect(pair.peer.transport == "nccl", "the way was lost")


async def _insert(
    pair: GpuPair | NcclBuffers, sweeper: Sweeper, nbytes: int, insert: _Insert
) -> None:
    lookup, buffer = pair.peer.lookup, pair.buffer
    source = pair.theirs.tensor(noise(nbytes, 1))

    async def before() -> None:
        source.copy_(noise(nbytes, 1))

    async def use() -> None:
        await insert(lookup, source)

    async def check(outcome: Outcome[None]) -> None:
        source.fill_(OVERWRITE)
        await lookup.peek(TOKENS)  # all that was said before is heard
        await until(lambda: not _coming(pair.server))
        left = buffer.statistics().entries
        expect(bool(left) or outcome.cancelled, "it was inserted")
        if left:
            entry = await buffer.drop_select(TOKENS)
            key = entry.key if isinstance(entry.key, torch.Tensor) else None
            expect_same(key, noise(nbytes, 1))
            expect_same(entry.hidden, noise(nbytes, 1))
            del entry, key
        await until(lambda: not buffer.statistics().used_bytes)

    name = "layers" if insert is _by_layers else "an entry"
    await sweeper.sweep(f"{name} of {nbytes} bytes to a GPU", use, check, before)


def _coming(server: Server) -> int:
    every = [services.lookup for services in server._services]
    return sum(len(lookup.tasks) for lookup in every if lookup is not None)


async def _until_quiet(store: StoreBuffer, peer: Peer, nbytes: int) -> None:
    """Only the value is held, and by nobody."""
    await until(lambda: store.statistics().used_bytes == nbytes)
    await until(lambda: not peer.budget.used_bytes)


_GET: Final = ("RemoteStoreBuffer.get",)
_PUT: Final = ("RemoteStoreBuffer.put",)
_BY_LAYERS: Final = ("RemoteLookupBuffer.open_insert", "RemoteWriter.put")
_AT_ONCE: Final = ("RemoteLookupBuffer.insert",)

INSERTING_ON_GPUS: Final = (
    Scenario(a_get_into_a_gpu, _GET, ("local",), (LARGE,), is_costly=True),
    Scenario(a_put_from_a_gpu, _PUT, ("local",), (LARGE,), is_costly=True),
    Scenario(layers_to_a_gpu, _BY_LAYERS, ("local",), (LARGE,), is_costly=True),
    Scenario(layers_on_one_gpu, _BY_LAYERS, ("local",), (LARGE,), is_costly=True),
    Scenario(layers_between_gpus, _BY_LAYERS, ("local",), (LARGE,), is_costly=True),
    Scenario(an_insert_on_one_gpu, _AT_ONCE, ("local",), (LARGE,), is_costly=True),
    Scenario(an_insert_between_gpus, _AT_ONCE, ("local",), (LARGE,), is_costly=True),
)
