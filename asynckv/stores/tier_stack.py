"""What a tiered store has below its memory: its tiers, in the order they are asked.

A value that is missing in memory is looked for in one tier after the other, once for
all who want it, by a task of the store's own. It lands in memory of the arena, is
verified there, and is in memory from then on, as if it had been put; unless its key was
changed meanwhile: then what was found is void.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import time
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from typing import Final, Literal

from asynckv.abc import StoreTier, TierMemory, TierResult, TierValue, WantedValue
from asynckv.buffers.lower_tiers import LowerTiers, Name, Owner, TenantModel
from asynckv.buffers.values import PendingPut, PinnedValue, StoredValues
from asynckv.devices.arena import place_of
from asynckv.devices.copying import CopyPool
from asynckv.errors import BufferClosed, EntryTooLarge
from asynckv.stores.client import TierClient
from asynckv.stores.header import (
    MAX_HEADER_NBYTES,
    ForeignHeader,
    ShortHeader,
    ValueHeader,
    ValueName,
    hashed_key,
    pack_header,
    unpack_header,
)
from asynckv.stores.health import Quarantine, TierStatistics
from asynckv.tensors.arena import Region
from asynckv.tensors.runs import pieces_of
from asynckv.waits.waiting import OwnTasks

__all__ = ("FlushResult", "TierStack", "tier_memory")

logger = logging.getLogger(__name__)

_FETCH_KEYS: Final = 16
"""So many keys are asked for by one call of a tier."""
_FETCHES: Final = 4
"""So many such calls are made at once. The first keys go first."""
_NAMES_A_TURN: Final = 256
_ROOM_S: Final = 1.0
_RETRIES: Final = 3
_WRITTEN_LATER: Final = 65_536
_SUSPECTS: Final = 1024


@dataclasses.dataclass(frozen=True)
class FlushResult:
    """What became of all puts so far in one tier."""

    accepted: int
    dropped: int
    failed: int


@dataclasses.dataclass(slots=True, eq=False)
class _HeldValue:
    """A value of the memory that one tier is to have."""

    header: bytes
    pinned: PinnedValue

    def tier_value(self, key: str) -> TierValue:
        memory = tier_memory(self.pinned.region)
        return TierValue(key, self.header, memory, self.pinned.expires_at_s)


@dataclasses.dataclass(slots=True, eq=False)
class _Fetch:
    """A key that is looked for, once for all who want it: ``wanted`` of them."""

    name: Name
    done: asyncio.Future[None]
    wanted: int = 0
    held: PinnedValue | None = None
    """What was found, until all who want it have seen it."""
    is_void: bool = False

    def end(self) -> None:
        """Who waits for it waits no more. Again is nothing."""
        if not self.done.done():
            self.done.set_result(None)


class _Wanted(WantedValue):
    """One value as one tier is asked for it, and where it lands."""

    __slots__ = (
        *("_stack", "_client", "_valid_from"),
        *("fetch", "header", "is_held", "is_left", "pending"),
    )

    is_held: bool

    def __init__(
        self, stack: TierStack, client: TierClient[_HeldValue], fetch: _Fetch
    ) -> None:
        super().__init__(stack.key_of(fetch.name))
        self._stack = stack
        self._client = client
        self.is_held = False
        self._valid_from = client.behind.valid_from(self.key)
        self.fetch = fetch
        self.is_left = False
        """Nobody waits for it any more: it is given no memory."""
        self.header: ValueHeader | None = None
        self.pending: PendingPut | None = None

    @property
    def lent_nbytes(self) -> int:
        if self.pending is None:
            return self.coming_nbytes
        return self.pending.region.nbytes

    async def place(self, header: bytes | memoryview) -> TierMemory | None:
        try:
            found, self.header_nbytes = unpack_header(header)
        except ShortHeader as short:
            self.header_nbytes = short.needed
            raise
        except ForeignHeader:
            return None
        self.discard()
        if not self.is_right(found):
            return None
        self.is_held = True
        try:
            self.pending = await self._stack.reserve(self.fetch.name, found)
        finally:
            self.is_held = False
        if self.pending is None:
            return None
        if self.fetch.is_void or self.is_left:
            self.discard()
            return None
        self.header = found
        return tier_memory(self.pending.region)

    def is_right(self, header: ValueHeader) -> bool:
        """Is it the value that is wanted, and not an older one?"""
        expires_at_s = header.expires_at_s
        known = self._valid_from, self._client.behind.valid_from(self.key)
        return (
            header.name == self._stack.full_name(self.fetch.name)
            and not (self.fetch.is_void or self.is_left)
            and (expires_at_s is None or expires_at_s > time.time())
            and all(one.has(header.epoch, _identity_of(header)) for one in known)
        )

    def discard(self) -> None:
        """Give back the memory that it was to land in. Again is nothing."""
        pending, self.pending = self.pending, None
        if pending is not None:
            self._stack.values.discard(pending)


class TierStack(LowerTiers):
    """Tiers by name below ``values``; ``namespace`` keeps its keys from others'.

    ``admit`` says when a value is written to tiers: when it is put, or when it is used
    for the first time after that.
    """

    def __init__(
        self,
        values: StoredValues,
        pool: CopyPool,
        *,
        max_bytes: int,
        admit: Literal["always", "second_use"],
        namespace: str,
    ) -> None:
        self.values = values
        self._pool = pool
        self._namespace = namespace
        self._admits_at_once = admit == "always"
        self._quarantine = Quarantine(max(max_bytes // 8, 1))
        self.clients: list[TierClient[_HeldValue]] = []
        self._fetches: dict[Name, _Fetch] = {}
        self._is_closed = False
        self._no_room_until_s = 0.0
        self._suspects: OrderedDict[tuple[str, str, int], None] = OrderedDict()
        self._later: OrderedDict[Name, Sequence[TierClient[_HeldValue]]] = OrderedDict()
        self._tasks = OwnTasks()
        self._at_once = asyncio.Semaphore(_FETCHES)
        self._epoch = 0

    async def open(self, tiers: Mapping[str, StoreTier]) -> None:
        """Open ``tiers``. A failed or a cancelled call closes all of them.

        :raises ConfigError: one cannot be used as it was configured
        :raises BufferClosed: the store was closed meanwhile
        """
        self._loop = asyncio.get_running_loop()
        self._check_open()
        self.clients = [
            TierClient(
                *(name, tier, self._quarantine, self._quarantine.max_bytes),
                lambda held: self.values.release(held.pinned),
            )
            for name, tier in tiers.items()
        ]
        try:
            for client in self.clients:
                await client.open()
            self._check_open()
        except BaseException:
            self.abort()
            raise

    def full_name(self, name: Name) -> ValueName:
        """Return what a header calls it."""
        key, owner = name
        if isinstance(owner, TenantModel):
            namespace = f"{self._namespace}\0{owner.tenant}"
            return ValueName(key, owner.fingerprint, namespace)
        return ValueName(key, owner, self._namespace)

    def key_of(self, name: Name) -> str:
        """Return what tiers call it."""
        return self.full_name(name).tier_key

    def stored(self, name: Name) -> None:
        self._void(name)
        epoch = self._next_epoch()
        if self._admits_at_once:
            self._write(name, epoch, self.clients)
            return
        pinned = self.values.hold_name(name)
        if pinned is not None:
            for client in self.clients:
                client.note(self.key_of(name), epoch, _identity_of(pinned))
            self.values.release(pinned)
        self._write_later(name, self.clients)

    def used(self, keys: Sequence[str], owner: Owner) -> None:
        if self._later:
            for key in keys:
                self._write_again((key, owner))

    def _write_again(self, name: Name) -> None:
        """Write it, if it was to be written once it is used again."""
        if not (later := self._later.pop(name, ())):
            return
        takers = [one for one in later if one.takes_writes]
        self._write_later(name, [one for one in later if one not in takers])
        if takers:
            self._write(name, self._next_epoch(), takers)

    def _write_later(
        self, name: Name, clients: Sequence[TierClient[_HeldValue]]
    ) -> None:
        """It is to be written when it is used again, if memory has it then."""
        if not clients:
            return
        self._later[name] = (*self._later.pop(name, ()), *clients)
        if len(self._later) > _WRITTEN_LATER:
            self._later.popitem(last=False)

    def deleted(self, name: Name) -> None:
        self._void(name)
        epoch = self._next_epoch()
        for client in self.clients:
            client.delete(self.key_of(name), epoch)

    def cleared(self, owner: Owner) -> None:
        # What is on its way from a tier is void by its epoch.
        prefix, epoch = self.full_name(("", owner)).tier_prefix, self._next_epoch()
        for client in self.clients:
            client.clear(prefix, epoch)

    async def fetch(self, keys: Sequence[str], owner: Owner) -> None:
        missing = [(key, owner) for key in keys]
        for _ in range(_RETRIES):
            if self._is_closed:
                return
            begun = list[_Fetch]()
            fetches = [self._fetch_of(name, begun) for name in missing]
            for first in range(0, len(begun), _FETCH_KEYS):
                some = begun[first : first + _FETCH_KEYS]
                self._tasks.start(functools.partial(self._find, some), "a fetch")
            try:
                await asyncio.wait([fetch.done for fetch in fetches])
            finally:
                for fetch in fetches:
                    self._leave(fetch)
            missing = [
                fetch.name
                for fetch in fetches
                if fetch.is_void and not self.values.has_name(fetch.name)
            ]
            if not missing:
                return

    async def touch(self, keys: Sequence[str], owner: Owner) -> None:
        tier_keys = await self._keys_of(keys, owner)
        for client in self.clients:
            client.touch(tier_keys)

    async def where(self, keys: Sequence[str], owner: Owner) -> list[list[str]]:
        tier_keys = await self._keys_of(keys, owner)
        # All at once.
        there = await asyncio.gather(*(one.contains(tier_keys) for one in self.clients))
        where: list[list[str]] = [[] for _ in keys]
        for client, has in zip(self.clients, there, strict=True):
            for tiers, key in zip(where, tier_keys, strict=True):
                if key in has:
                    tiers.append(client.name)
        return where

    async def _keys_of(self, keys: Sequence[str], owner: Owner) -> list[str]:
        """As :meth:`key_of`, of thousands: others have their turn in between."""
        prefix = self.full_name(("", owner)).tier_prefix
        tier_keys: list[str] = []
        for start in range(0, len(keys), _NAMES_A_TURN):
            if start:
                await asyncio.sleep(0)
            some = keys[start : start + _NAMES_A_TURN]
            tier_keys += [prefix + hashed_key(key) for key in some]
        return tier_keys

    async def reserve(self, name: Name, header: ValueHeader) -> PendingPut | None:
        """Return memory for a value that was found; ``None``: there is no room now."""
        key, owner = name
        try:
            pending = self.values.reserve_nowait(key, header.spec, owner)
            may_wait = self._loop.time() >= self._no_room_until_s
            if pending is None and (may_wait or self.values.is_evicting):
                async with asyncio.timeout(_ROOM_S):
                    pending = await self.values.reserve(key, header.spec, owner)
        except (BufferClosed, EntryTooLarge):
            return None
        except TimeoutError:
            self._no_room_until_s = self._loop.time() + _ROOM_S
            return None
        return pending

    async def flush(self) -> dict[str, FlushResult]:
        """Wait until all that was put is in every tier, or is known not to be.

        A cancelled call leaves no trace.
        """
        epoch = self._epoch
        for client in self.clients:
            await client.flush(epoch)
        return {
            client.name: FlushResult(one.accepted, one.dropped, one.failed)
            for client in self.clients
            for one in (client.behind,)
        }

    def statistics(self) -> dict[str, TierStatistics]:
        """Return those of each tier. Never waits."""
        return {client.name: client.statistics() for client in self.clients}

    async def aclose(self) -> None:
        """Close all tiers, in bounded time."""
        self._stop()
        await self._tasks.quiesce()
        await asyncio.gather(*(client.aclose() for client in self.clients))

    def abort(self) -> None:
        """Ask and tell tiers nothing more. Never waits."""
        self._stop()
        for client in self.clients:
            client.abort()

    def _check_open(self) -> None:
        if self._is_closed:
            raise BufferClosed("the store was closed while it was opened")

    def _stop(self) -> None:
        """Nobody waits for a fetch any more, whether or not it has begun."""
        self._is_closed = True
        self._tasks.cancel()
        for name in list(self._fetches):
            self._fetches.pop(name).end()

    def _next_epoch(self) -> int:
        self._epoch = max(self._epoch + 1, time.time_ns())
        return self._epoch

    def _void(self, name: Name) -> None:
        """It has changed: what is looked for, or was to be written, is void."""
        self._later.pop(name, None)
        fetch = self._fetches.pop(name, None)
        if fetch is not None:
            fetch.is_void = True
            fetch.end()

    def _write(
        self, name: Name, epoch: int, clients: Sequence[TierClient[_HeldValue]]
    ) -> None:
        pinned = [self.values.hold_name(name) for _ in clients]
        if not pinned or pinned[0] is None:
            return
        full_name, first = self.full_name(name), pinned[0]
        header = ValueHeader(
            *(full_name, first.spec, first.digest, epoch), first.expires_at_s
        )
        key, packed = full_name.tier_key, pack_header(header)
        identity = _identity_of(header)
        dropped = []
        for client, one in zip(clients, pinned, strict=True):
            if one is None or len(packed) > MAX_HEADER_NBYTES:
                client.note(key, epoch, identity)
                if one is not None:
                    self.values.release(one)
                continue
            held, nbytes = _HeldValue(packed, one), one.region.nbytes
            if not client.write(key, epoch, held, nbytes, identity):
                dropped += [client] if client.fits(nbytes) else []
        self._write_later(name, dropped)

    def _fetch_of(self, name: Name, begun: list[_Fetch]) -> _Fetch:
        """Return who looks for ``name``, for one more who wants it.

        It is one of ``begun``, too, if nobody has looked for it yet.
        """
        fetch = self._fetches.get(name)
        if fetch is None:
            fetch = self._fetches[name] = _Fetch(name, self._loop.create_future())
            begun.append(fetch)
        fetch.wanted += 1
        return fetch

    async def _find(self, fetches: Sequence[_Fetch]) -> None:
        """Look for values in one tier after the other."""
        try:
            async with self._at_once:
                left = [fetch for fetch in fetches if fetch.wanted]
                for fetch in fetches:
                    if not fetch.wanted:  # who comes now begins another one
                        self._forget(fetch)
                for client in self.clients:
                    left = await self._find_in(client, left) if left else left
        finally:
            for fetch in fetches:
                self._forget(fetch)

    def _leave(self, fetch: _Fetch) -> None:
        """One of those who want it goes on, and takes it in this very turn."""
        fetch.wanted -= 1
        if not fetch.wanted and fetch.held is not None:
            held, fetch.held = fetch.held, None
            self._loop.call_soon(self.values.release, held)

    def _forget(self, fetch: _Fetch) -> None:
        if self._fetches.get(fetch.name) is fetch:
            del self._fetches[fetch.name]
        fetch.end()

    async def _find_in(
        self, client: TierClient[_HeldValue], fetches: Sequence[_Fetch]
    ) -> list[_Fetch]:
        """Look in one tier, and return what is still to be looked for."""
        wanted = [
            _Wanted(self, client, fetch)
            for fetch in fetches
            if not fetch.is_void and client.may_have(self.key_of(fetch.name))
        ]
        found = await self._take(client, wanted) if wanted else set()
        return [one for one in fetches if one not in found and not one.is_void]

    async def _take(
        self, client: TierClient[_HeldValue], wanted: Sequence[_Wanted]
    ) -> set[_Fetch]:
        is_over = False

        def ended() -> None:
            nonlocal is_over
            is_over = True
            for one in wanted:
                if one.is_left:
                    one.discard()

        try:
            results = await client.fetch(wanted, ended)
            found = set()
            for one, result in zip(wanted, results, strict=True):
                if result is TierResult.DONE and await self._admit(client, one):
                    found.add(one.fetch)
            return found
        finally:
            for one in wanted:
                one.is_left = True
                if is_over:
                    one.discard()

    async def _admit(self, client: TierClient[_HeldValue], one: _Wanted) -> bool:
        """Verify a value that has landed, and keep it in memory."""
        header, pending = one.header, one.pending
        if header is None or pending is None:
            return False
        (digest,) = await self._pool.digest([place_of(pending.region, header.spec)])
        if digest != header.digest:
            self._note_corrupt(client, one.key, header)
            return False
        if not one.is_right(header):
            return False
        one.pending = None
        try:
            self.values.commit(
                *(pending, digest), expires_at_s=header.expires_at_s, is_fetched=True
            )
        except BufferClosed:
            return False
        if one.fetch.wanted:
            one.fetch.held = self.values.hold_name(one.fetch.name)
        self._forget(one.fetch)
        return True

    def _note_corrupt(
        self, client: TierClient[_HeldValue], key: str, header: ValueHeader
    ) -> None:
        """It is deleted where it is read so twice: the first time may be our memory."""
        client.corrupt += 1
        suspect = (client.name, key, header.epoch)
        if suspect not in self._suspects:
            logger.warning("%s has a value that is not as it was written", client.name)
            self._suspects[suspect] = None
            if len(self._suspects) > _SUSPECTS:
                self._suspects.popitem(last=False)
        elif client.behind.is_sure(key):
            del self._suspects[suspect]
            client.delete(key, header.epoch + 1)


def tier_memory(region: Region) -> TierMemory:
    """Return where the bytes of ``region`` lie, in order; also as pages if it has any.

    A region of 64 KiB or more in the slabs of an arena has pages of its own.
    """
    pages = region.page_memory()
    if pages is None:
        pieces = pieces_of(region.memory(), 0, region.nbytes)
        return TierMemory(region.nbytes, pieces)
    return TierMemory(
        region.nbytes,
        pieces_of(pages, 0, region.nbytes),
        pieces_of(pages, 0, pages.nbytes),
    )


def _identity_of(value: ValueHeader | PinnedValue) -> Hashable:
    return value.digest, value.spec, value.expires_at_s
