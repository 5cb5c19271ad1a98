"""The store buffer itself, in the process that holds the values."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Mapping, Sequence

import anyio
import torch

from asynckv.abc import KVStoreBuffer
from asynckv.abc.closing import async_with_only
from asynckv.buffers.in_memory import InMemoryBuffer
from asynckv.buffers.statistics import StoreStatistics
from asynckv.buffers.values.ledger import (
    PendingPut,
    PinnedValue,
    StoreLedger,
    StoreRoom,
)
from asynckv.errors import BufferClosed, EntryTooLarge
from asynckv.tensors.views import check_into, check_landing_place, spec_of
from asynckv.transfers.arguments import as_key, as_keys
from asynckv.types import KVFingerprint, TensorSpec

__all__ = ("StoreBuffer", "check_place", "check_value")


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
        super().__init__(max_bytes, lambda: self._room.change())
        self._ledger = StoreLedger(self._arena, lambda: self._room.change())
        self._room = StoreRoom(self._ledger)

    def __repr__(self) -> str:
        return self._shown(f"{len(self._ledger)} keys")

    async def put(self, key: str, value: torch.Tensor | None) -> None:
        if value is None:
            await self.delete(key)
            return
        self._check_usable(key)
        check_value(value)
        spec = spec_of(value)
        pending = await self.reserve(key, spec, self.fingerprint)
        try:
            # No variable: an error's traceback would keep the memory in use.
            [digest] = await self.pool.copy(
                [value], [pending.region.place(pending.spec)]
            )
            self.commit(pending, digest)
        finally:
            self.discard(pending)

    async def get(
        self, key: str, into: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        self._check_usable(key)
        if into is not None:
            check_place(into)
        pinned = self.lookup(key, self.fingerprint)
        if pinned is None:
            return None
        try:
            if into is not None:
                check_into(into, pinned.spec, key)
            target = self.pool.empty(pinned.spec) if into is None else into
            await self.pool.copy(
                [pinned.region.place(pinned.spec)], [target], digest=False
            )
            return target
        finally:
            self.release(pinned)

    async def delete(self, key: str) -> bool:
        self._check_usable(key)
        return self.remove(key, self.fingerprint)

    async def contains(self, keys: Sequence[str]) -> tuple[bool, ...]:
        return self.has(as_keys(keys), self.fingerprint)

    @async_with_only("pin(...) as found")
    async def pin(self, keys: Sequence[str]) -> AsyncIterator[tuple[bool, ...]]:
        pinned = self.hold(as_keys(keys), self.fingerprint)
        try:
            yield tuple(one is not None for one in pinned)
        finally:
            for one in pinned:
                if one is not None:
                    self.release(one)

    def statistics(self) -> StoreStatistics:
        ledger = self._ledger
        now = self._loop.time() if self._loop is not None else 0.0
        return StoreStatistics(
            max_bytes=self._arena.max_bytes,
            used_bytes=self._arena.used_bytes,
            peak_bytes=self._arena.peak_bytes,
            pinned_bytes=self._arena.pinned_bytes,
            handed_out_bytes=self._arena.handed_out_bytes,
            refused_slabs=self._arena.refused_slabs,
            late_views=self.late_views,
            keys=len(ledger),
            waiting_puts=len(self._room),
            oldest_put_wait_s=self._room.longest_wait_s(now),
            **dataclasses.asdict(ledger.counters),
        )

    async def aclose(self) -> None:
        self._check_loop()
        self.abort()
        with anyio.CancelScope(shield=True):
            await self._room.aclose()
            await self._wait_closed()

    def abort(self) -> None:
        self._ledger.close()
        self._close_memory()

    async def reserve(
        self, key: str, spec: TensorSpec, fingerprint: KVFingerprint | None
    ) -> PendingPut:
        """Take memory for a value to be written there, then committed.

        Waits only while readers and other puts hold too much. A cancelled call
        leaves no trace but the keys dropped to make room.

        :raises EntryTooLarge: it could never fit
        :raises BufferClosed: the buffer is closed, or was closed meanwhile
        """
        pending = self.reserve_nowait(key, spec, fingerprint)
        if pending is not None:
            return pending
        self._check_loop()
        return await self._room.reserve((key, fingerprint), spec)

    def reserve_nowait(
        self, key: str, spec: TensorSpec, fingerprint: KVFingerprint | None
    ) -> PendingPut | None:
        """As :meth:`reserve`; ``None`` where that would wait."""
        self._check_usable(key)
        if not self._arena.could_ever_fit([spec.nbytes]):
            raise EntryTooLarge(nbytes=spec.nbytes, max_bytes=self._arena.max_bytes)
        return self._room.reserve_nowait((key, fingerprint), spec)

    def commit(self, pending: PendingPut, digest: bytes) -> None:
        """Replace what is stored by that key with what was written.

        :raises BufferClosed: the buffer was closed meanwhile; it is discarded
        """
        self._ledger.commit(pending, digest)

    def discard(self, pending: PendingPut) -> None:
        """Give the memory back; nothing happens after a commit. Never waits."""
        self._ledger.discard(pending)

    def lookup(self, key: str, fingerprint: KVFingerprint | None) -> PinnedValue | None:
        """Hold what is stored under ``key`` until it is released. Never waits."""
        self._check_open()
        return self._ledger.pin((key, fingerprint))

    def hold(
        self, keys: Sequence[str], fingerprint: KVFingerprint | None
    ) -> list[PinnedValue | None]:
        """As :meth:`lookup`, for each of ``keys``; no use of what is there."""
        self._check_open()
        return [self._ledger.hold((key, fingerprint)) for key in keys]

    def release(self, pinned: PinnedValue) -> None:
        """End the hold of :meth:`lookup`. Never waits; may be called again."""
        self._ledger.release(pinned)

    def remove(self, key: str, fingerprint: KVFingerprint | None) -> bool:
        """As :meth:`delete`, for whoever has ``fingerprint``. Never waits."""
        self._check_open()
        return self._ledger.delete((key, fingerprint))

    def has(
        self, keys: Sequence[str], fingerprint: KVFingerprint | None
    ) -> tuple[bool, ...]:
        """As :meth:`contains`, for whoever has ``fingerprint``. Never waits."""
        self._check_open()
        return tuple((key, fingerprint) in self._ledger for key in keys)

    def _check_usable(self, key: str) -> None:
        as_key(key)
        self._check_open()

    def _check_open(self) -> None:
        self._check_loop()
        if self._ledger.closed:
            raise BufferClosed("the buffer is closed")


def check_value(value: torch.Tensor) -> None:
    """Refuse what cannot be stored.

    :raises TypeError: it is no tensor
    :raises ValueError: it has no plain bytes
    """
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"a value is a tensor, not {type(value).__name__}")
    spec_of(value)


def check_place(into: torch.Tensor) -> None:
    """Refuse what no value can land in, also where there is none.

    :raises TypeError: it is no tensor
    :raises ValueError: it is not plain memory, or not contiguous
    """
    if not isinstance(into, torch.Tensor):
        raise TypeError(f"into is a tensor, not {type(into).__name__}")
    try:
        check_landing_place(into, may_be_on_gpu=True)
    except ValueError as exc:
        raise ValueError(f"into: {exc}") from None
