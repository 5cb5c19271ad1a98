"""The values of a store, for whoever asks for them: the store itself, or its peers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from asynckv.buffers.values.ledger import (
    PendingPut,
    PinnedValue,
    StoreLedger,
    StoreRoom,
)
from asynckv.errors import BufferClosed, EntryTooLarge
from asynckv.tensors.arena import Arena
from asynckv.transfers.queries import as_key
from asynckv.types import KVFingerprint, TensorSpec

__all__ = ("StoredValues",)


class StoredValues:
    """Keeps values in ``arena``, by key and by the fingerprint of who put them.

    ``check_loop`` is called first by what only the store's own loop may do.
    """

    def __init__(self, arena: Arena, check_loop: Callable[[], object]) -> None:
        self._arena = arena
        self._check_loop = check_loop
        self.ledger = StoreLedger(arena, lambda: self.room.change())
        self.room = StoreRoom(self.ledger)

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
        return await self.room.reserve((key, fingerprint), spec)

    def reserve_nowait(
        self, key: str, spec: TensorSpec, fingerprint: KVFingerprint | None
    ) -> PendingPut | None:
        """As :meth:`reserve`; ``None`` where that would wait."""
        self.check_usable(key)
        if not self._arena.could_ever_fit([spec.nbytes]):
            raise EntryTooLarge(nbytes=spec.nbytes, max_bytes=self._arena.max_bytes)
        return self.room.reserve_nowait((key, fingerprint), spec)

    def commit(self, pending: PendingPut, digest: bytes) -> None:
        """Replace what is stored by that key with what was written.

        :raises BufferClosed: the buffer was closed meanwhile; it is discarded
        """
        self.ledger.commit(pending, digest)

    def discard(self, pending: PendingPut) -> None:
        """Give the memory back; nothing happens after a commit. Never waits."""
        self.ledger.discard(pending)

    def lookup(self, key: str, fingerprint: KVFingerprint | None) -> PinnedValue | None:
        """Hold what is stored under ``key`` until it is released. Never waits."""
        self._check_open()
        return self.ledger.pin((key, fingerprint))

    def hold(
        self, keys: Sequence[str], fingerprint: KVFingerprint | None
    ) -> list[PinnedValue | None]:
        """As :meth:`lookup`, for each of ``keys``; no use of what is there."""
        self._check_open()
        return [self.ledger.hold((key, fingerprint)) for key in keys]

    def release(self, pinned: PinnedValue) -> None:
        """End the hold of :meth:`lookup`. Never waits; may be called again."""
        self.ledger.release(pinned)

    def remove(self, key: str, fingerprint: KVFingerprint | None) -> bool:
        """Forget what whoever has ``fingerprint`` put under ``key``. Never waits."""
        self._check_open()
        return self.ledger.delete((key, fingerprint))

    def has(
        self, keys: Sequence[str], fingerprint: KVFingerprint | None
    ) -> tuple[bool, ...]:
        """Tell of each key if whoever has ``fingerprint`` finds it. Never waits."""
        self._check_open()
        return tuple((key, fingerprint) in self.ledger for key in keys)

    def check_usable(self, key: str) -> None:
        """Refuse what is no key, another loop, and any call after the end."""
        as_key(key)
        self._check_open()

    def _check_open(self) -> None:
        self._check_loop()
        if self.ledger.closed:
            raise BufferClosed("the buffer is closed")
