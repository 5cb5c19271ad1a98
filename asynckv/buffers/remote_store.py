"""A store buffer at the other end of a link, with the same face as a local one."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

import torch

from asynckv.abc import KVStoreBuffer, KVStoreStatistics
from asynckv.buffers.arguments import as_key, as_keys
from asynckv.buffers.asking import ANSWER_S, ask
from asynckv.buffers.getting import Getting
from asynckv.buffers.gpu_sources import until_made
from asynckv.buffers.manifest import INLINE_NBYTES
from asynckv.buffers.pinning import Pinning
from asynckv.buffers.pushing import dense
from asynckv.buffers.putting import begin_put
from asynckv.buffers.store import check_place, check_value
from asynckv.errors import PeerLost
from asynckv.observability.waits import LoggedWait
from asynckv.protocol.frames import Contains, Delete
from asynckv.tensors.on_gpu import KVOnGpu

if TYPE_CHECKING:
    from asynckv.buffers.remote import Peer

__all__ = ("RemoteStoreBuffer", "RemoteStoreStatistics")

_BATCH_KEYS: Final = 4096
_BATCH_NBYTES: Final = 32 * 1024


@dataclasses.dataclass(frozen=True)
class RemoteStoreStatistics(KVStoreStatistics):
    """This side of a store buffer at a peer."""

    getting: int
    is_connected: bool


class RemoteStoreBuffer(KVStoreBuffer):
    """The store buffer that a peer serves. It is closed with its peer."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._getting = 0
        self._putting = 0
        self._hits = 0
        self._misses = 0

    def __repr__(self) -> str:
        return f"<RemoteStoreBuffer of {self._peer!r}>"

    async def put(self, key: str, value: torch.Tensor | None) -> None:
        self._peer.check()
        key = as_key(key)
        if value is None:
            await self.delete(key)
            return
        check_value(value)
        pool = self._peer.pool
        memory = pool.catch(value)
        is_read_there = isinstance(memory, KVOnGpu) and value.nbytes > INLINE_NBYTES
        source = memory if is_read_there else await dense(memory, pool)
        self._putting += 1
        try:
            await until_made([source], pool)
            await self._put(key, source)
        finally:
            self._putting -= 1

    async def get(
        self, key: str, into: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        self._peer.check()
        key = as_key(key)
        if into is not None:
            check_place(into)
        self._getting += 1
        try:
            value = await self._get(key, into)
        finally:
            self._getting -= 1
        self._hits += value is not None
        self._misses += value is None
        return value

    async def delete(self, key: str) -> bool:
        self._peer.check()
        key = as_key(key)
        return bool((await ask(self._peer, Delete(key))).value)

    async def contains(self, keys: Sequence[str]) -> tuple[bool, ...]:
        self._peer.check()
        keys = as_keys(keys)
        flags: list[bool] = []
        for some in _batches(keys):
            flags.extend((await ask(self._peer, Contains(some))).flags)
        return tuple(flags)

    @asynccontextmanager
    async def pin(self, keys: Sequence[str]) -> AsyncIterator[tuple[bool, ...]]:
        self._peer.check()
        keys = as_keys(keys)
        link = await self._peer.link()
        held = [Pinning(link, some) for some in _batches(keys)]
        try:
            async with asyncio.timeout(ANSWER_S):
                found = [flag for one in held for flag in await one.found]
            yield tuple(found)
        finally:
            for one in held:
                one.let_go()
        for one in held:
            one.check()

    def statistics(self) -> RemoteStoreStatistics:
        return RemoteStoreStatistics(
            max_bytes=self._peer.budget.max_bytes,
            used_bytes=self._peer.budget.used_bytes,
            waiting_puts=self._putting,
            hits=self._hits,
            misses=self._misses,
            getting=self._getting,
            is_connected=self._peer.is_connected,
        )

    async def aclose(self) -> None:
        """Close the peer, which is this buffer's only way."""
        await self._peer.aclose()

    def abort(self) -> None:
        """Abort the peer."""
        self._peer.abort()

    async def _put(self, key: str, source: torch.Tensor | KVOnGpu) -> None:
        """A put that was cut off is made again: the last one counts."""
        who = f"put of {key!r} ({source.nbytes} bytes)"
        room = f"room in the store at {self._peer.url}"
        incarnation = ""
        while True:
            link = await self._peer.link(incarnation)
            incarnation = link.peer.incarnation
            with LoggedWait(who, room, "the end of a get or put there"):
                if await begin_put(link, key, source, self._peer.ways).accepted():
                    return

    async def _get(self, key: str, into: torch.Tensor | None) -> torch.Tensor | None:
        while True:
            link = await self._peer.link()
            getting = Getting(link, key, into, self._peer.budget, self._peer.pool)
            try:
                return await getting.value()
            except PeerLost:
                await getting.quiesce()
                if link.is_open:
                    raise  # the peer says so, of something else
            except BaseException:
                getting.cancel()
                await getting.quiesce()
                raise
            finally:
                getting.release()


def _batches(keys: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield ``keys`` in as many at a time as fit in one frame."""
    some: list[str] = []
    nbytes = 0
    for key in keys:
        size = len(key.encode()) + 5
        if nbytes + size > _BATCH_NBYTES or len(some) == _BATCH_KEYS:
            yield tuple(some)
            some, nbytes = [], 0
        some.append(key)
        nbytes += size
    if some:
        yield tuple(some)
