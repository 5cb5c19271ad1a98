"""The store buffer itself, in the process that holds the values."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import AsyncIterator, Mapping, Sequence

import anyio
import torch

from asynckv.abc import KVStoreBuffer, PrefixMatch, StoredValue
from asynckv.abc.closing import async_with_only
from asynckv.buffers.in_memory import InMemoryBuffer
from asynckv.buffers.statistics import StoreStatistics
from asynckv.buffers.values import StoredValues
from asynckv.devices.arena import place_of
from asynckv.tensors.views import check_into, check_landing_place, spec_of
from asynckv.transfers.tokens import as_many_keys
from asynckv.types import KVFingerprint, TensorSpec, as_flag, as_seconds

__all__ = ("StoreBuffer", "check_place", "check_value", "expiry_of")


class StoreBuffer(InMemoryBuffer, KVStoreBuffer):
    """Values in this process's memory, for readers here and, served, elsewhere.

    ``max_bytes`` is a hard bound on the bytes held. To make room the least
    recently used keys are dropped, never one that is being read; only where
    readers and other puts hold too much does a put wait for them, first come,
    first served. A put replaces a value whole: whoever reads the old one gets
    the old one. Where there is no room for both, the old value is dropped
    first, and a put that is cancelled then leaves nothing.

    ``fingerprint`` says what model the values belong to: only those with an
    equal one are found.

    The values are in host memory: those of a GPU are copied to it and from it.

    Closing it drops everything; every further call raises ``BufferClosed``.
    """

    def __init__(
        self,
        max_bytes: int | float | str = "2GiB",
        *,
        fingerprint: KVFingerprint | Mapping[str, str] | str | None = None,
    ) -> None:
        self.fingerprint = KVFingerprint.of(fingerprint)
        super().__init__(max_bytes, lambda: self.values.room.change())
        self.values = StoredValues(self._arena, self._check_loop)

    def __repr__(self) -> str:
        return self._shown(f"{len(self.values)} keys")

    async def put(
        self,
        key: str,
        value: torch.Tensor | None,
        *,
        ttl_s: float | None = None,
        pin: bool = False,
    ) -> None:
        expires_at_s, pin = expiry_of(ttl_s), as_flag(pin, "pin")
        if value is None:
            await self.delete(key)
            return
        self.values.check_usable(key)
        spec = check_value(value)
        pending = await self.values.reserve(key, spec, self.fingerprint)
        try:
            # No variable: an error's traceback would keep the memory in use.
            [digest] = await self.pool.copy(
                [value], [place_of(pending.region, pending.spec)]
            )
            self.values.commit(
                pending, digest, expires_at_s=expires_at_s, is_pinned=pin
            )
        finally:
            self.values.discard(pending)

    async def get(
        self, key: str, into: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        self.values.check_usable(key)
        if into is not None:
            check_place(into)
        await self.values.fetch([key], self.fingerprint)
        pinned = self.values.lookup(key, self.fingerprint)
        if pinned is None:
            return None
        try:
            if into is not None:
                check_into(into, pinned.spec, key)
            target = self.pool.empty(pinned.spec) if into is None else into
            await self.pool.copy(
                [place_of(pinned.region, pinned.spec)], [target], digest=False
            )
            return target
        finally:
            self.values.release(pinned)

    async def delete(self, key: str) -> bool:
        self.values.check_usable(key)
        return await self.values.delete(key, self.fingerprint)

    async def clear(self) -> int:
        return self.values.clear(self.fingerprint)

    async def contains(self, keys: Sequence[str]) -> tuple[bool, ...]:
        keys = await as_many_keys(keys)
        nearest = await self.values.nearest(keys, self.fingerprint)
        return tuple([tier is not None for tier in nearest])

    async def match_prefix(self, block_keys: Sequence[str]) -> PrefixMatch:
        keys = await as_many_keys(block_keys)
        return await self.values.match_prefix(keys, self.fingerprint)

    async def stat(self, key: str) -> StoredValue | None:
        return await self.values.stat(key, self.fingerprint)

    @async_with_only("pin(...) as found")
    async def pin(
        self,
        keys: Sequence[str],
        *,
        within_s: float | None = None,
        prefix: bool = False,
    ) -> AsyncIterator[tuple[bool, ...]]:
        self._check_loop()
        prefix, within_s = as_flag(prefix, "prefix"), as_seconds(within_s, "within_s")
        keys = await as_many_keys(keys)
        pinned = await self.values.fetch_and_hold(
            keys, self.fingerprint, within_s=within_s, is_prefix=prefix
        )
        try:
            yield tuple([one is not None for one in pinned])
        finally:
            self.values.release_all(pinned)

    def statistics(self) -> StoreStatistics:
        values = self.values
        now = self._loop.time() if self._loop is not None else 0.0
        return StoreStatistics(
            keys=len(values),
            waiting_puts=len(values.room),
            oldest_put_wait_s=values.room.longest_wait_s(now),
            **self._memory_statistics(),
            **dataclasses.asdict(values.counters),
        )

    async def aclose(self) -> None:
        self._check_loop()
        self.abort()
        with anyio.CancelScope(shield=True):
            await self.values.aclose()
            await self._wait_closed(self.values.room)

    def abort(self) -> None:
        self.values.close()
        self._close_memory()


def check_value(value: torch.Tensor) -> TensorSpec:
    """Refuse what cannot be stored; return the shape and dtype of what can.

    :raises TypeError: it is no tensor
    :raises ValueError: it has no plain bytes
    """
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"a value is a tensor, not {type(value).__name__}")
    return spec_of(value)


def expiry_of(ttl_s: float | None) -> float | None:
    """Return when a value is void, in seconds since 1970.

    :raises TypeError: ``ttl_s`` is no number
    :raises ValueError: ``ttl_s`` is not above 0, or no finite number
    """
    seconds = as_seconds(ttl_s, "ttl_s")
    if seconds == 0:
        raise ValueError("ttl_s is above 0; None means no end")
    return None if seconds is None else time.time() + seconds


def check_place(into: torch.Tensor) -> None:
    """Refuse what no value can land in, also where there is none.

    :raises TypeError: it is no tensor
    :raises ValueError: it is not plain memory, or not contiguous
    """
    if not isinstance(into, torch.Tensor):
        raise TypeError(f"into is a tensor, not {type(into).__name__}")
    try:
        check_landing_place(into)
    except ValueError as exc:
        raise ValueError(f"into: {exc}") from None
