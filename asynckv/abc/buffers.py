"""Buffers: where KV waits for its consumer, by its tokens or by name."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from asynckv.abc.closing import AsyncWithOnly, Closable
from asynckv.abc.entries import KVEntry, KVSource, Match, TokenIds
from asynckv.errors import EntryTooLarge
from asynckv.types import TensorSpec
from asynckv.waits.waiting import PlainTaskGroup

if TYPE_CHECKING:
    import torch

    from asynckv.tensors.blocks import KVMemory

__all__ = (
    "DropSelect",
    "InsertWriter",
    "KVCacheBuffer",
    "KVCacheStatistics",
    "KVLookupBuffer",
    "KVLookupStatistics",
    "KVStoreBuffer",
    "KVStoreStatistics",
    "PrefixMatch",
    "SelectStream",
    "StoredValue",
)


@dataclasses.dataclass(frozen=True)
class KVCacheStatistics:
    """A buffer at one moment.

    ``used_bytes`` of ``max_bytes`` are in use. Of a buffer at a peer these are this
    side's: what was received and not handed over yet, and the bound of it.
    """

    max_bytes: int
    used_bytes: int


@dataclasses.dataclass(frozen=True)
class KVLookupStatistics(KVCacheStatistics):
    """A lookup buffer at one moment; of one at a peer, what this side asks of it.

    ``waiting_inserts`` wait for room, ``waiting_selects`` for a match.
    """

    waiting_inserts: int
    waiting_selects: int


@dataclasses.dataclass(frozen=True)
class KVStoreStatistics(KVCacheStatistics):
    """A store buffer at one moment; of one at a peer, what this side asks of it.

    ``waiting_puts`` wait for room. ``hits`` and ``misses`` count what ``get`` has found
    and not found since the buffer, or the connection, was made.
    """

    waiting_puts: int
    hits: int
    misses: int


class KVCacheBuffer(Closable):
    """The parent of all buffers: can be closed and asked how it is."""

    @abc.abstractmethod
    def statistics(self) -> KVCacheStatistics:
        """Return a frozen value of counters and gauges. Never waits."""


class DropSelect(
    Coroutine[Any, Any, KVEntry],
    AbstractAsyncContextManager[KVEntry, bool | None],
    AsyncWithOnly,
):
    """What :meth:`KVLookupBuffer.drop_select` returns: await it, or enter it.

    Nothing happens before that; a second use raises ``RuntimeError``. One that is
    forgotten warns, as a coroutine does.
    """

    _entered_by = "drop_select(...) as entry"

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> None:
            raise AttributeError(
                f"a drop_select(...) has no {name!r}, its entry may: await it, "
                f"or use async with {self._entered_by}:"
            )


class InsertWriter(abc.ABC):
    """Puts the declared tensors of one streaming entry, in any order."""

    entry_id: str

    @abc.abstractmethod
    async def put(self, name: str, tensor: KVMemory) -> None:
        """Add one declared tensor; on return it may be overwritten.

        A cancelled put has put nothing, and the same put may be made again.

        :raises ValueError: if ``name`` was put before, or this was not declared
        :raises EntryTooLarge: the process that runs the buffer can have no more memory
        :raises EntryAborted: if the entry is gone already
        """


class SelectStream(AsyncIterator["tuple[str, torch.Tensor]"]):
    """The tensors of one selected entry, each verified, in landing order."""

    entry_id: str
    attempt: int
    matched_tokens: int
    input_tokens: torch.Tensor | None
    roi: torch.Tensor | None
    specs: Mapping[str, TensorSpec]

    @abc.abstractmethod
    async def wait_for(self, name: str) -> torch.Tensor:
        """Return the tensor ``name``, as soon as it has landed.

        It may be asked for again, and still comes in the iteration. A cancelled
        call leaves no trace.

        :raises KeyError: if the entry has no such tensor
        :raises EntryAborted: if the producer failed before it landed
        """


class KVLookupBuffer(KVCacheBuffer):
    """Where KV waits for its consumer: ``insert`` and ``drop_select``.

    ``buffer[tokens, roi] = (key, value, hidden)`` and ``buffer.pop(...)``. The
    key of an entry is ``input_tokens[roi]``. Two keys match when one is a
    non-empty prefix of the other and at least ``min_matched_tokens`` agree.
    ``roi=None`` selects all tokens. Ids are any that fit in int64, negative ones too.
    An entry whose key is empty (no tokens, or a roi of zeros alone) matches no tokens:
    it is found by its ``entry_id``, or by who takes any entry (``None, None``). To ask
    for an empty key is a ``ValueError``.
    """

    @abc.abstractmethod
    def statistics(self) -> KVLookupStatistics:
        """Return a frozen value of counters and gauges. Never waits."""

    @abc.abstractmethod
    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of unset elements in memory that inserting need not copy.

        In this process that is the buffer's own: inserted whole, it must not be written
        to any more (``full`` digests show it). A remote insert sends from it. Small, or
        where there is no room, it is an ordinary tensor, and a local insert copies it.
        It is charged as long as it lives. Never waits.

        :raises ValueError: tensors of this dtype cannot be sent
        """

    @abc.abstractmethod
    async def insert(
        self,
        input_tokens: TokenIds | None,
        roi: TokenIds | None,
        key: KVSource,
        value: KVSource,
        hidden: KVMemory | None,
        *,
        extras: Mapping[str, KVMemory] | None = None,
        entry_id: str | None = None,
        ttl_s: float | None = 600.0,
        deliveries: int = 1,
    ) -> str:
        """Commit one entry and return its id; on return its tensors may be overwritten.

        Waits, first come first served, until the buffer has room; while it
        waits the entry can already be selected, and then goes straight to that
        consumer. On return the entry is in the memory of the process that runs
        the buffer, or was acknowledged. ``ttl_s`` counts from the commit (never
        ends with ``None``) and is judged only while nobody holds the entry. The
        entry leaves after ``deliveries`` acknowledgements of as many consumers.

        Inserting the same ``entry_id`` with the same contents again succeeds, and
        changes nothing. While an insert under that id is under way, or ending after a
        cancel, another one waits for its end and is then compared.

        A cancelled local call equals a call never made. A cancelled remote call is
        withdrawn if the cancel arrives before the commit; else the entry is in, once.
        Either way the tensors are no longer read.

        :raises EntryTooLarge: it could never fit, or the process that runs the buffer
            can have no more memory
        :raises EntryConflict: ``entry_id`` is known, with other contents
        :raises TypeError: an argument of another type than it is to be
        :raises BufferClosed: the buffer is closed, or was closed meanwhile
        :raises PeerLost: the peer is gone and did not come back in time
        :raises PeerRestarted: the peer came back without its memory, in which
            the entry may have been; nothing says whether it was taken
        :raises ValueError: tokens and roi do not fit each other, or the roi
            holds anything but 0 and 1
        """

    @abc.abstractmethod
    def drop_select(
        self,
        input_tokens: TokenIds | None = None,
        roi: TokenIds | None = None,
        *,
        entry_id: str | None = None,
        match: Match = "prefix",
        min_matched_tokens: int = 1,
        into: Mapping[str, KVMemory] | None = None,
    ) -> DropSelect:
        """Take the best matching entry out of the buffer, waiting for one to come.

        Entered on its host, tensors may be views of its memory: what you write to them
        is seen by nobody else. (On a GPU it is the owner's memory: do not write there.)
        ``await`` it and the entry is yours: it was acknowledged on verified receipt (at
        most once). Enter it with ``async with`` and it is acknowledged on clean exit,
        and given back on an error or a cancellation of its body (at least once;
        ``attempt`` and ``entry_id`` tell). A cancel that comes while a clean body is
        being left is raised, and the entry is often acknowledged all the same.

        Without tokens and without ``entry_id`` any entry is selected. Among entries the
        longest match wins, then the first in. Tensors named in ``into`` land there
        (``"hidden"``, ``"LAYER.key"``, ``"extras.NAME"``, as in :meth:`open_insert`),
        and the entry holds that memory: of :class:`~asynckv.KVBlocks` their pool.

        A cancelled call gives the entry back; ``into`` is no longer written to by then,
        but may hold part of an entry. One exception: awaited, remote and above 64 KiB,
        if the link is cut between the acknowledgement and its answer, the entry counts
        as taken, also if the call is cancelled then.

        :raises LeaseLost: (on leaving ``async with``) the entry was taken back
        :raises ChecksumError: the bytes changed on their way; given back
        :raises EntryAborted: ``entry_id`` was taken by others (reason ``"taken"``), in
            the last ten minutes or while this waits
        :raises BufferClosed: the buffer is closed, or was closed meanwhile
        :raises PeerLost: the peer is gone and did not come back in time
        :raises PeerRestarted: the peer came back without its memory, and nothing says
            any more whether the acknowledgement had counted
        :raises EntryTooLarge: the entry exceeds this side's receive bound
        :raises ValueError: tokens and roi do not fit each other, or ``into`` does not
            fit the entry, which is given back
        """

    @abc.abstractmethod
    async def peek(
        self, input_tokens: TokenIds | None = None, roi: TokenIds | None = None
    ) -> int:
        """Return the longest match that could be selected now (0: none).

        A cancelled call leaves no trace.
        """

    @abc.abstractmethod
    async def taken(self, entry_id: str) -> None:
        """Wait for the last acknowledgement of an entry.

        A cancelled call leaves no trace.

        :raises EntryAborted: it left in another way
        :raises KeyError: the id is unknown, or was forgotten
        :raises PeerRestarted: the peer came back without its memory
        """

    @abc.abstractmethod
    async def withdraw(self, entry_id: str) -> bool:
        """Remove an entry that nobody holds; ``True`` if it was there and is gone.

        A cancelled call has removed it or not. After a reconnect ``False`` may also
        mean that it has, before the link was lost.
        """

    @abc.abstractmethod
    def open_insert(
        self,
        input_tokens: TokenIds | None,
        roi: TokenIds | None,
        specs: Mapping[str, TensorSpec],
        *,
        entry_id: str | None = None,
        ttl_s: float | None = 600.0,
        deliveries: int = 1,
    ) -> AbstractAsyncContextManager[InsertWriter]:
        """Insert one entry tensor by tensor, while it is still being computed.

        Names are ``key``, ``value``, ``hidden``, ``LAYER.key``, ``LAYER.value``
        and ``extras.NAME``. Entering waits for room for all of them; leaving
        commits. Left by an error, by cancellation or with a tensor missing
        (``ValueError``), the entry is aborted and every consumer of it learns. A
        cancelled entering leaves no entry behind.

        While an insert under that ``entry_id`` is under way, or ending after a cancel,
        entering waits for its end first: so a stream that failed can be tried again at
        once. Within the same task's own ``open_insert`` of that id it would wait for
        itself.

        :raises EntryConflict: ``entry_id`` is known, whatever its contents
        :raises TypeError: ``specs`` is no mapping of names to ``TensorSpec``
        """

    @abc.abstractmethod
    def open_drop_select(
        self,
        input_tokens: TokenIds | None = None,
        roi: TokenIds | None = None,
        *,
        entry_id: str | None = None,
        match: Match = "prefix",
        min_matched_tokens: int = 1,
        into: Mapping[str, KVMemory] | None = None,
    ) -> AbstractAsyncContextManager[SelectStream]:
        """Select as :meth:`drop_select` does, and read tensors as they land.

        Entering waits for a match; a cancelled entering has taken nothing, and gives
        back what was selected for it. Leaving cleanly acknowledges, also early;
        leaving by an error or cancellation gives the entry back.

        From entering on the application has the entry. So what ends the stream then
        is raised, and nothing begins again by itself, though no tensor was seen yet:
        whoever selects the entry next starts at its first one.
        """


class PrefixMatch(int):
    """How many blocks are there from the first one on, and where.

    ``found`` has the tier of each, or ``None`` for one that is not there. ``ready`` of
    them, from the first one on, are in memory. ``by_tier`` counts each where it is
    found first.
    """

    ready: int
    by_tier: Mapping[str, int]

    def __new__(cls, found: Sequence[str | None]) -> Self:
        count = found.index(None) if None in found else len(found)
        match = super().__new__(cls, count)
        names = [name for name in found[:count] if name is not None]
        match.by_tier = {name: names.count(name) for name in dict.fromkeys(names)}
        far = [names.index(name) for name in match.by_tier if name != "memory"]
        match.ready = min(far, default=count)
        return match


@dataclasses.dataclass(frozen=True)
class StoredValue:
    """What is stored under a key.

    ``tiers`` has it, the nearest one first: ``"memory"``, and what else the store has.
    In memory it has a ``spec``. It is there for ``ttl_s`` more seconds, if not for
    longer (``None``); ``is_pinned`` as it was put.
    """

    tiers: tuple[str, ...]
    spec: TensorSpec | None = None
    ttl_s: float | None = None
    is_pinned: bool = False


_AT_ONCE: Final = 16
_T = TypeVar("_T")


async def _all(calls: Sequence[Callable[[], Awaitable[_T]]]) -> tuple[_T, ...]:
    """Make calls, a few at a time. The first error ends all of them."""
    results: dict[int, _T] = {}
    waiting = iter(enumerate(calls))

    async def work() -> None:
        for number, call in waiting:
            results[number] = await call()

    async with PlainTaskGroup() as group:
        for _ in range(min(_AT_ONCE, len(calls))):
            group.create_task(work())
    return tuple(results[number] for number in range(len(calls)))


class KVStoreBuffer(KVCacheBuffer):
    """KV by name, for any number of readers: ``put`` and ``get``."""

    @abc.abstractmethod
    def statistics(self) -> KVStoreStatistics:
        """Return a frozen value of counters and gauges. Never waits."""

    @abc.abstractmethod
    async def put(
        self,
        key: str,
        value: torch.Tensor | None,
        *,
        ttl_s: float | None = None,
        pin: bool = False,
    ) -> None:
        """Store a copy of ``value`` under ``key``; ``None`` deletes it.

        The least recently used keys are dropped to make room. After ``ttl_s`` seconds
        by the wall clock of whoever holds the values it is there no more. With ``pin``
        it is never dropped for room, until it is replaced or deleted. A cancelled call
        has stored nothing or everything, and no longer reads ``value``.

        :raises ValueError: ``ttl_s`` is not above 0
        :raises TypeError: an argument of another type than it is to be
        :raises EntryTooLarge: it could never fit, or the process that holds the values
            can have no more memory
        """

    @abc.abstractmethod
    async def get(
        self, key: str, into: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Return a copy of what is stored under ``key``, or ``None``.

        With ``into`` the bytes land in that tensor, which is returned. A cancelled
        call no longer writes to it; it may hold a part of them.

        :raises ValueError: if dtype or shape of ``into`` differ
        """

    async def put_many(
        self,
        items: Iterable[tuple[str, torch.Tensor]],
        *,
        ttl_s: float | None = None,
        pin: bool = False,
    ) -> tuple[bool, ...]:
        """As :meth:`put`, for each of ``items``, sixteen at a time.

        Returns of each whether it is stored: one that could never fit is not. Any other
        error ends the puts that are under way and is raised; so does a cancellation.

        :raises ValueError: as of :meth:`put`
        """

        async def put(key: str, value: torch.Tensor) -> bool:
            try:
                await self.put(key, value, ttl_s=ttl_s, pin=pin)
            except EntryTooLarge:
                return False
            return True

        if isinstance(items, Mapping):
            raise TypeError("items are pairs of a key and a tensor: pass .items()")
        return await _all([partial(put, key, value) for key, value in items])

    async def get_many(
        self, keys: Sequence[str], into: Sequence[torch.Tensor | None] | None = None
    ) -> tuple[torch.Tensor | None, ...]:
        """As :meth:`get`, for each of ``keys``, sixteen at a time.

        ``into`` has a tensor, or ``None``, for each. An error ends the gets that are
        under way and is raised; so does a cancellation: nothing is written to any more.

        :raises ValueError: ``into`` is not as long as ``keys``; or as of :meth:`get`
        """
        if isinstance(keys, str):
            raise TypeError("this takes a sequence of keys, not one key")
        places = [None] * len(keys) if into is None else into
        if len(places) != len(keys):
            raise ValueError(f"into has {len(places)} places for {len(keys)} keys")
        pairs = zip(keys, places, strict=True)
        return await _all([partial(self.get, key, place) for key, place in pairs])

    @abc.abstractmethod
    async def stat(self, key: str) -> StoredValue | None:
        """Say what is stored under ``key``, and where; that is not a use of it.

        A cancelled call leaves no trace.
        """

    @abc.abstractmethod
    async def delete(self, key: str) -> bool:
        """Forget ``key``, and say if it was there. If cancelled, it has or has not."""

    @abc.abstractmethod
    async def clear(self) -> int:
        """Forget all that was put with this fingerprint, and by this tenant.

        Returns how many values memory had of it. From then on nothing of before is
        found here, also where a lower tier still has it or is just sending it. What is
        read or pinned goes when its readers go. A put that is under way counts as
        later, as in :meth:`delete`. If cancelled, it has or has not.
        """

    @abc.abstractmethod
    async def contains(self, keys: Sequence[str]) -> tuple[bool, ...]:
        """Tell for each of ``keys`` whether it is stored; that is not a use of it.

        A cancelled call leaves no trace.
        """

    @abc.abstractmethod
    async def match_prefix(self, block_keys: Sequence[str]) -> PrefixMatch:
        """Return how many of ``block_keys`` are stored, from the first one on; where.

        :func:`asynckv.connectors.prefix_block_keys` makes them of token ids.
        A cancelled call leaves no trace.
        """

    @abc.abstractmethod
    def pin(
        self,
        keys: Sequence[str],
        *,
        within_s: float | None = None,
        prefix: bool = False,
    ) -> AbstractAsyncContextManager[tuple[bool, ...]]:
        """Keep what is stored under ``keys`` from being dropped for room.

        ``async with store.pin(keys) as found``: which of them are there, and stay there
        unless somebody deletes or replaces them. Leaving lets go of them, also by an
        error or a cancellation, and never waits. What is in a lower tier alone is
        fetched into memory first, in the order of ``keys``; what is not there after
        ``within_s`` seconds (30 of a store at a peer) counts as not found. With
        ``prefix`` so does all that comes after the first one that is not found.

        :raises LeaseLost: (on a clean leaving) the peer was lost meanwhile, and with it
            the hold
        """
