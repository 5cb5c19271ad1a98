"""A local consumer of a lookup buffer: its lease, and tensors of its own."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import ClassVar, Final, Self, TypeAlias

import torch

from asynckv.abc import KVEntry
from asynckv.buffers.entries.entries import Lease, Payer, StoredEntry
from asynckv.buffers.entries.leases import Leases, entry_taken
from asynckv.devices.arena import place_of
from asynckv.devices.copying import CopyPool
from asynckv.devices.cuda import DeviceMemory
from asynckv.errors import BufferClosed, EntryAborted, LeaseLost
from asynckv.observability.waits import LoggedWait
from asynckv.tensors.arena import Region
from asynckv.tensors.blocks import KVMemory, tensor_at
from asynckv.tensors.runs import Runs
from asynckv.transfers.manifest import unflatten
from asynckv.transfers.targets import Part, match_targets
from asynckv.transfers.tokens import TOKEN_NBYTES, Query, tensor_of
from asynckv.types import KVFingerprint
from asynckv.waits.waiting import Watchers

__all__ = (
    "LocalSelect",
    "build_entry",
    "hand_over",
    "lend",
    "tensors_of",
    "view_of",
)

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


_AT_A_TIME: Final = 16
"""Views of an arena's memory take their time to be made: 40 us, on the loop."""

_Held: TypeAlias = tuple[Part, Region]


async def hand_over(
    lease: Lease, pool: CopyPool, targets: Mapping[str, KVMemory]
) -> KVEntry:
    """Make the entry the consumer's own, just before it is acknowledged.

    Where this is the entry's last delivery its memory itself changes hands, unless
    somebody else has a view of it; the rest, and what is named in ``targets``, is
    copied. If the lease was lost meanwhile, what is returned is of no use.
    """
    if lease.entry.deliveries_left > 1:
        return await lend(lease, pool, targets)
    named, own, others = dict[str, torch.Tensor](), list[Region](), list[_Held]()
    for index, (part, region) in enumerate(_held(lease.entry.parts), 1):
        if part.name not in targets and region.can_change_hands():
            # What lies apart is copied when the process may have no more mappings.
            with contextlib.suppress(OSError):
                named[part.name] = region.tensor(part.spec)
                own.append(region)
        if part.name not in named:
            others.append((part, region))
        if not index % _AT_A_TIME:
            await asyncio.sleep(0)
    copies = await _copies(lease, pool, targets, others)
    if lease.is_valid:
        for region in own:
            region.hand_out()
    return build_entry(lease, named | copies)


async def lend(
    lease: Lease, pool: CopyPool, targets: Mapping[str, KVMemory]
) -> KVEntry:
    """Copy the entry out; whatever is done to the copies, it can be given back."""
    held = _held(lease.entry.parts)
    return build_entry(lease, await _copies(lease, pool, targets, held))


async def tensors_of(
    parts: list[Part], pool: CopyPool, targets: Mapping[str, KVMemory]
) -> list[torch.Tensor]:
    """Copy some landed parts out, into ``targets`` where they are named there."""
    return await _copied(_held(parts), pool, targets)


def view_of(part: Part) -> torch.Tensor:
    """Return a landed part where it lies: nobody may write to it."""
    ((_, region),) = _held([part])
    return region.tensor(part.spec)


async def _copied(
    held: Sequence[_Held], pool: CopyPool, targets: Mapping[str, KVMemory]
) -> list[torch.Tensor]:
    sources, places = list[torch.Tensor | Runs | DeviceMemory](), list[KVMemory]()
    for index, (part, region) in enumerate(held):
        if index and not index % _AT_A_TIME:
            await asyncio.sleep(0)
        sources.append(place_of(region, part.spec))
        into = targets.get(part.name)
        places.append(pool.empty(part.spec) if into is None else into)
    copying = pool.copy(sources, places, digest=False)
    del sources  # an error's traceback would keep the memory in use
    await copying
    return [tensor_at(place) for place in places]


def build_entry(lease: Lease, named: Mapping[str, torch.Tensor]) -> KVEntry:
    """Put tensors in their fields, in the order in which they were inserted."""
    entry = lease.entry
    key, value, hidden, extras = unflatten(
        [(part.name, named[part.name]) for part in entry.parts]
    )
    return KVEntry(
        input_tokens=tensor_of(entry.input_tokens),
        roi=tensor_of(entry.roi),
        key=key,
        value=value,
        hidden=hidden,
        extras=extras,
        entry_id=entry.entry_id,
        matched_tokens=lease.matched_tokens,
        attempt=lease.attempt,
    )


async def _copies(
    lease: Lease,
    pool: CopyPool,
    targets: Mapping[str, KVMemory],
    held: Sequence[_Held],
) -> dict[str, torch.Tensor]:
    match_targets({part.name: part.spec for part in lease.entry.parts}, targets)
    tensors = await _copied(held, pool, targets)
    return {part.name: t for (part, _), t in zip(held, tensors, strict=True)}


def _held(parts: Sequence[Part]) -> list[_Held]:
    """Return parts and where they are; a region that is released is scratch memory."""
    held = [(part, part.region) for part in parts if part.region is not None]
    if len(held) < len(parts):
        raise LeaseLost("the entry was taken back while it was read")
    return held
