"""A local consumer of a lookup buffer: waits for its lease and for the bytes."""

from __future__ import annotations

import asyncio
import itertools
from types import TracebackType
from typing import ClassVar, Self

from asynckv.buffers.entries.entries import Lease, Payer, StoredEntry
from asynckv.buffers.entries.leases import Leases, entry_taken
from asynckv.errors import BufferClosed, EntryAborted, LeaseLost
from asynckv.observability.waits import LoggedWait
from asynckv.transfers.tokens import TOKEN_NBYTES, Query
from asynckv.types import KVFingerprint
from asynckv.waits.replies import Watchers

__all__ = ("LocalSelect",)

_numbers = itertools.count(1)


class _Free:
    """Nobody pays: the tensors are the caller's own from the start."""

    def may_charge(self, nbytes: int) -> bool:
        return True

    def charge(self, nbytes: int) -> None:
        pass


class LocalSelect:
    """One local ``drop_select``. Each call counts as a consumer of its own.

    It asks at once. Entered, it waits no longer on leaving by an error, and gives back
    what it holds.
    """

    payer: ClassVar[Payer] = _Free()

    def __init__(
        self,
        leases: Leases,
        query: Query,
        fingerprint: KVFingerprint | None,
        *,
        streams: bool,
    ) -> None:
        self.consumer = f"local-{next(_numbers)}"
        self.streams = streams
        self._leases = leases
        self._lease: Lease | None = None
        self._is_closed = self._is_taken = False
        self._aborted_by = ""
        self._watchers = Watchers()
        self._waiter = leases.select(query, self, fingerprint)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if exc is not None:
            self.give_back(failed=isinstance(exc, Exception))

    def give_back(self, *, failed: bool) -> None:
        """Wait no longer and give back what is held. Never waits.

        ``failed``: the application failed with it, if it had it.
        """
        if self._lease is not None:
            reached = failed and self._lease.reached
            self._leases.give_back(self._lease, reached=reached)
        self._leases.forget(self._waiter)

    async def lease(self) -> Lease:
        """Wait for an entry and for all of its bytes.

        A stream gets an entry with a writer of its own before it is whole: an insert
        that fails must leave no trace. An entry whose producer fails is not returned;
        the wait goes on.

        :raises BufferClosed: the buffer is closed
        :raises EntryAborted: it asks for an entry that others have taken
        """
        while True:
            lease = await self._match()
            while self._lease is lease and not self._may_have(lease.entry):
                await self._change()
            if self._lease is lease:
                return lease

    async def landed(self, lease: Lease, count: int) -> None:
        """Wait until more than ``count`` parts have landed, or the entry is whole.

        :raises EntryAborted: the producer failed
        :raises LeaseLost: the delivery ended in another way
        """
        entry = lease.entry
        self.check_held(lease)
        while len(entry.landed) <= count and not entry.complete:
            await self._change()
            self.check_held(lease)

    def check_held(self, lease: Lease) -> None:
        """Refuse to read on when the delivery has ended.

        :raises EntryAborted: the producer failed
        :raises LeaseLost: the delivery ended in another way
        """
        if self._aborted_by:
            raise EntryAborted(reason=self._aborted_by)
        if not lease.is_valid:
            raise LeaseLost("the entry was taken back while it was read")

    def wake(self) -> None:
        """Let whoever waits look at the state again. Never waits."""
        self._watchers.wake()

    def leased(self, lease: Lease) -> None:
        self._lease = lease
        self.wake()

    def part_landed(self, lease: Lease, index: int) -> None:
        self.wake()

    def completed(self, lease: Lease) -> None:
        self.wake()

    def retracted(self, lease: Lease) -> None:
        self._lease = None
        self.wake()

    def aborted(self, lease: Lease, reason: str) -> None:
        if lease.reached:
            self._aborted_by = "" if reason == "lapsed" else reason
            self.wake()
            return
        self.retracted(lease)
        self._leases.serve_again(lease.waiter)

    def taken(self) -> None:
        self._is_taken = True
        self.wake()

    def closed(self) -> None:
        self._is_closed = True
        self.wake()

    async def _match(self) -> Lease:
        if self._lease is None and not self._is_over:
            key = self._waiter.query.key
            tokens = "any" if key is None else len(key) // TOKEN_NBYTES
            who = f"drop_select ({self.consumer}, {tokens} tokens)"
            with LoggedWait(who, "a match", "an insert or aclose"):
                while self._lease is None and not self._is_over:
                    await self._change()
        if self._lease is not None:
            return self._lease
        if self._is_taken:
            raise entry_taken()
        raise BufferClosed("the buffer was closed before an entry matched")

    def _may_have(self, entry: StoredEntry) -> bool:
        return entry.complete or (self.streams and entry.draft.streaming)

    @property
    def _is_over(self) -> bool:
        return self._is_closed or self._is_taken

    async def _change(self) -> None:
        await self._watchers.next_change(asyncio.get_running_loop())
