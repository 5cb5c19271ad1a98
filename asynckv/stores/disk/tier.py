"""A tier of a store on a local disk: values in slots of files that are made before.

State is in :class:`~asynckv.stores.disk.index.SlotIndex` and changes on the loop; what
may block is done by the tier's threads. Nothing is promised if the power fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import mmap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import anyio

from asynckv.abc.tiers import (
    StoreTier,
    TierFacts,
    TierMemory,
    TierPrefix,
    TierResult,
    TierValue,
    WantedValue,
)
from asynckv.affinity import LoopBound
from asynckv.errors import ConfigError
from asynckv.stores.disk import slot_io
from asynckv.stores.disk.calls import PAGE_NBYTES, FileCalls
from asynckv.stores.disk.directory import NO_ROOM, OpenSlotFile, SlotDirectory
from asynckv.stores.disk.index import SlotIndex, place_of
from asynckv.stores.disk.room import Room
from asynckv.stores.disk.scan import scan
from asynckv.stores.disk.segments import Segment
from asynckv.stores.disk.slot_io import BOUNCE_NBYTES, Bounce
from asynckv.stores.disk.slots import (
    FoundSlots,
    SlotHeader,
    fits_page,
)
from asynckv.stores.disk.url import LEAST_MAX_BYTES, parse_disk_url
from asynckv.stores.threads import READ, SCAN, WRITE, Stopped, TierThreads, ask
from asynckv.types import as_count, as_timeout, parse_bytes
from asynckv.waits.waiting import OwnTasks

__all__ = ("DiskStatistics", "DiskTier")

logger = logging.getLogger(__name__)

_THREADS: Final = 4
_CLOSE_GRACE_S: Final = 1.0
_FULL_RETRY_S: Final = 60.0
_KEYS_AT_ONCE: Final = 1024
_SCAN_WAIT_S: Final = 0.2
"""More are looked up with a pause for others in between."""

_WHOLE_NBYTES: Final = 65 * PAGE_NBYTES
_SPACES: Final = 16
"""So many slots of 256 KiB may be read at once before there is a place for them."""

_VALUES_AT_ONCE: Final = 32
"""More would keep the loop for a millisecond, and no disk does more at once."""

_LOOKED_AT_ONCE: Final = 32
"""So many slots are looked at before anybody hears that it goes on."""

_GENERATION_SHIFT: Final = 40


@dataclasses.dataclass(frozen=True)
class DiskStatistics:
    """What a disk tier has. ``file_bytes`` never exceed ``max_bytes``.

    ``index_bytes`` and ``buffer_bytes`` are of memory. ``unverified``: headers that
    were not as they were written when a value was wanted; ``lost_slots`` can be neither
    read nor overwritten.
    """

    max_bytes: int
    file_bytes: int
    index_bytes: int
    buffer_bytes: int
    keys: int
    slots: int
    free_slots: int
    lost_slots: int
    evictions: int
    unverified: int
    is_scanning: bool
    is_direct: bool


class DiskTier(LoopBound, StoreTier):
    """Values in files of ``path``, of ``max_bytes`` altogether.

    While the slots that are there already are looked at, what was not found yet is
    ``MISSING``, and values are stored where a slot is known to be free, or there is
    room for more of them; else they are ``REFUSED``: waiting would keep their memory
    for as long as the scan takes, and what is to leave is not known before its end. A
    ``delete`` waits for it.

    Of a value that is written twice the later one is found. A header that does not
    verify is a miss, and forgotten; whether the value's bytes are right is for the
    caller to see, by the digest in its header. A full disk keeps what it has,
    and is asked for more ``full_retry_s`` later.

    :raises ConfigError: there can be no tier of ``max_bytes``
    """

    def __init__(
        self,
        path: str | Path,
        max_bytes: int | float | str,
        *,
        threads: int = _THREADS,
        close_grace_s: float = _CLOSE_GRACE_S,
        full_retry_s: float = _FULL_RETRY_S,
        calls: FileCalls | None = None,
    ) -> None:
        max_bytes = parse_bytes(max_bytes)
        if max_bytes < LEAST_MAX_BYTES:
            raise ConfigError(
                f"a disk tier of {max_bytes} bytes", hint="it needs max=1MiB at least"
            )
        self.path = Path(path).absolute()
        self.max_bytes = max_bytes
        self._count = as_count(threads, "threads")
        self._close_grace_s = as_timeout(close_grace_s, "close_grace_s")
        self._full_retry_s = as_timeout(full_retry_s, "full_retry_s")
        self._calls = calls or FileCalls()
        self._index = SlotIndex(self._off_loop)
        self._is_closed = False
        self._opening = asyncio.Lock()
        self._tasks = OwnTasks()
        self._scanned = asyncio.Event()
        self._sequence = 0
        self._unverified = 0
        self._scan_steps = 0
        """Of the scan under way: to read all slots, and to erase those it has found."""
        self._said: set[str] = set()
        self._spare: list[memoryview] = []
        self._spaces = 0
        self._threads: TierThreads[Bounce] | None = None
        self._directory = SlotDirectory(self.path, max_bytes, self._calls)
        self._room: Room | None = None

    @classmethod
    def from_url(cls, url: str) -> DiskTier:
        """Make the tier that ``disk:///var/kv?max=100GiB`` names.

        :raises ConfigError: it names none
        """
        return cls(*parse_disk_url(url))

    def statistics(self) -> DiskStatistics:
        """Say what it has. Never waits."""
        segments = self._index.segments.values()
        return DiskStatistics(
            max_bytes=self.max_bytes,
            file_bytes=self._index.file_nbytes,
            index_bytes=self._index.nbytes,
            buffer_bytes=self._count * BOUNCE_NBYTES + self._spaces * _WHOLE_NBYTES,
            keys=len(self._index),
            slots=sum(segment.count for segment in segments),
            free_slots=sum(segment.free for segment in segments),
            lost_slots=self._index.lost,
            evictions=self._index.evictions,
            unverified=self._unverified,
            is_scanning=self._scan_steps > 0,
            is_direct=self._directory.is_direct,
        )

    def counts(self) -> Mapping[str, float]:
        return dataclasses.asdict(self.statistics())

    async def _is_scanned_soon(self) -> bool:
        """Wait for that, for much less than a call may be silent."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SCAN_WAIT_S):
                await self._scanned.wait()
        return self._scanned.is_set()

    async def scanned(self) -> None:
        """Wait until all slots were looked at, or it is closed."""
        await self._scanned.wait()

    async def probe(self) -> TierFacts:
        loop = self._check_loop()
        if self._is_closed:
            raise OSError(f"the tier in {self.path} is closed")
        if self._room is None:
            await self._open(loop)
        elif self._threads is not None:
            await ask(self._threads, READ, lambda bounce: self._directory.look())
            self._room.try_again()
            for slot in self._index.retake_lost():
                self._erase_soon(slot, lambda result: None)
        return TierFacts(
            is_local=True,
            max_value_nbytes=self._room.max_body_nbytes if self._room else 0,
        )

    async def contains(self, keys: Sequence[str]) -> Sequence[TierResult]:
        slots = await self._find(keys)
        missing, done = TierResult.MISSING, TierResult.DONE
        return [missing if slot < 0 else done for slot in slots]

    async def touch(self, keys: Sequence[str]) -> None:
        for start in range(0, len(keys), _KEYS_AT_ONCE):
            if start:
                await asyncio.sleep(0)
            self._index.use(self._index.find(keys[start : start + _KEYS_AT_ONCE]))

    async def fetch(self, wanted: Sequence[WantedValue]) -> Sequence[TierResult]:
        results: list[TierResult] = []
        for start in range(0, len(wanted), _VALUES_AT_ONCE):
            some = wanted[start : start + _VALUES_AT_ONCE]
            slots = await self._find([one.key for one in some])
            self._index.use(slots)
            for slot in slots:
                if slot >= 0:
                    self._index.begin_read(slot)
            results += await asyncio.gather(*map(self._read, some, slots))
        return results

    async def store(self, values: Sequence[TierValue]) -> Sequence[TierResult]:
        self._check_loop()
        results: list[TierResult] = []
        for start in range(0, len(values), _VALUES_AT_ONCE):
            some = values[start : start + _VALUES_AT_ONCE]
            turns = range(self._sequence + 1, self._sequence + 1 + len(some))
            self._sequence += len(some)
            results += await asyncio.gather(*map(self._write, some, turns))
        return results

    async def delete(self, keys: Sequence[str]) -> Sequence[TierResult]:
        self._check_loop()
        if self._room is None:
            return [TierResult.FAILED] * len(keys)
        was_scanning = self._scan_steps > 0
        slots = [(self._index.remove(k), *self._index.retake_lost(k)) for k in keys]
        results = await asyncio.gather(*map(self._erase_all, slots))
        if was_scanning:
            if not await self._is_scanned_soon():
                return [TierResult.REFUSED] * len(keys)
            late = [self._index.retake_lost(key) for key in keys]
            again = await asyncio.gather(*map(self._erase_all, late))
            results = [
                max(both, key=_is_failed) for both in zip(results, again, strict=True)
            ]
        await self._room.settled()
        if self._is_closed or self._index.unread:
            # It may be where nobody could look, or could write.
            return [TierResult.FAILED] * len(keys)
        return results

    async def clear(self, prefix: TierPrefix) -> TierResult:
        """As of every tier. In memory there are hashes of keys alone: so the first page
        of every value is read, whosever it is, behind all else that is to be done.
        """
        self._check_loop()
        if self._room is None:
            return TierResult.FAILED
        while not await self._is_scanned_soon():
            prefix.moved_nbytes += 1
        await asyncio.gather(*map(self._erase, self._index.retake_lost()))
        is_read = True
        for slots in self._index.slots_with_values(_LOOKED_AT_ONCE):
            try:
                is_read &= await self._clear_slots(prefix.prefix, slots)
            except Exception as exc:  # noqa: BLE001 - also what only a bug would raise
                return self._failed("looked at", exc)
            prefix.moved_nbytes += 1
        await self._room.settled()
        if self._is_closed:
            return TierResult.FAILED
        # It may be where nobody can look, or can write; that is so the next time, too.
        is_sure = is_read and not self._index.lost
        return TierResult.DONE if is_sure else TierResult.REFUSED

    async def _clear_slots(self, prefix: str, slots: Sequence[int]) -> bool:
        """Erase those that have keys that begin so; say if all could be read."""
        threads = self._threads
        if threads is None or not slots:
            await asyncio.sleep(0)
            return True
        places = [self._file_of(slot) for slot in slots]

        def look(bounce: Bounce) -> list[str | None]:
            threads.check()
            return [_key_in(file, at, bounce) for file, at in places]

        for slot in slots:
            self._index.begin_read(slot)
        try:
            keys = await ask(threads, SCAN, look)
        finally:
            for slot in slots:
                self._index.end_read(slot)
        ours = [
            self._index.remove(key, slot)
            for slot, key in zip(slots, keys, strict=True)
            if key is not None and key.startswith(prefix)
        ]
        await self._erase_all(ours)
        return None not in keys

    async def aclose(self) -> None:
        self.abort()
        await self._tasks.quiesce()
        if self._threads is not None:
            with anyio.move_on_after(self._close_grace_s, shield=True) as scope:
                await self._threads.is_over.wait()
            if scope.cancelled_caught:
                logger.warning(
                    "a thread of the tier in %s hangs: nobody can open that before "
                    "it, or this process, has ended",
                    self.path,
                )

    def abort(self) -> None:
        self._is_closed = True
        self._tasks.cancel()
        if self._threads is not None:
            self._threads.stop()
        if self._room is not None:
            self._room.close()
        self._scanned.set()

    async def _open(self, loop: asyncio.AbstractEventLoop) -> None:
        async with self._opening:
            if self._room is not None:
                return
            directory = SlotDirectory(self.path, self.max_bytes, self._calls)
            threads = TierThreads(
                self._count, loop, directory.close, Bounce, name="disk tier"
            )
            self._directory, self._threads = directory, threads
            try:
                opened, segments = await ask(threads, READ, self._open_directory)
            except BaseException as exc:
                threads.stop()
                if isinstance(exc, Stopped):
                    raise OSError(f"the tier in {self.path} was closed") from exc
                raise
            self._sequence = opened << _GENERATION_SHIFT
            self._index.begin(self._sequence)
            for segment in segments:
                self._index.add_segment(segment, is_free=False)
            self._room = Room(
                *(self._index, directory, threads, self.max_bytes),
                full_retry_s=self._full_retry_s,
            )
            if self._is_closed:
                self._room.close()
            self._scan_steps = 1
            # Now: files that are added later have no slots to look at.
            files = list(directory.files.values())
            look = partial(self._scan, threads, files)
            self._tasks.start(look, f"scan of {self.path}")

    async def _scan(
        self, threads: TierThreads[Bounce], files: Sequence[OpenSlotFile]
    ) -> None:
        with contextlib.suppress(Stopped):
            await scan(files, threads, self._count, self._found)
            self._end_scan_step(TierResult.DONE)

    def _open_directory(self, bounce: Bounce) -> tuple[int, list[Segment]]:
        opened = self._directory.open()
        files = self._directory.files.values()
        # Here, as there may be much to it.
        self._index.prepare(sum(file.count for file in files))
        return opened, [Segment(file.number, file.pages, file.count) for file in files]

    def _off_loop(self, work: Callable[[], None]) -> None:
        if self._threads is not None:
            self._threads.submit(SCAN, lambda bounce: work(), lambda *_: None)

    def _found(
        self, file: OpenSlotFile, slots: range, found: FoundSlots, unread: list[int]
    ) -> None:
        for slot in self._index.add_found(file.number, slots, found, unread):
            self._scan_steps += 1
            self._erase_soon(slot, self._end_scan_step)

    def _end_scan_step(self, result: TierResult) -> None:
        self._scan_steps -= 1
        if not self._scan_steps:
            # Only if somebody has taken the lock file away: else it is less already.
            self._sequence = max(self._sequence, self._index.end_scan())
            if self._room is not None:
                self._room.is_known = True
            self._scanned.set()

    async def _find(self, keys: Sequence[str]) -> list[int]:
        self._check_loop()
        found: list[int] = []
        for start in range(0, len(keys), _KEYS_AT_ONCE):
            if start:
                await asyncio.sleep(0)
            found += self._index.find(keys[start : start + _KEYS_AT_ONCE])
        return found

    async def _write(self, value: TierValue, sequence: int) -> TierResult:
        room, threads = self._room, self._threads
        if room is None or threads is None:
            return TierResult.FAILED
        if not fits_page(value.key, value.header):
            return TierResult.REFUSED
        slot = await room.take(value.memory.nbytes)
        if isinstance(slot, TierResult):
            return slot
        self._index.begin_write(value.key, slot)
        file, at = self._file_of(slot)
        header = SlotHeader(
            value.key,
            value.header,
            value.memory.nbytes,
            sequence,
            file.number,
            at,
            value.expires_at_s,
        )

        def work(bounce: Bounce) -> None:
            slot_io.write(file, header, value.memory, bounce, moved)

        def moved(nbytes: int) -> None:
            value.moved_nbytes += nbytes
            threads.check()

        try:
            await ask(threads, WRITE, work)
        except Exception as exc:  # noqa: BLE001 - nobody knows what is in the slot
            await self._erase(slot)
            return self._failed("written", exc)
        # What is to be overwritten might be found again when this one is gone.
        await self._erase(
            self._index.put(value.key, slot, sequence, value.expires_at_s)
        )
        return TierResult.DONE

    async def _erase(self, slot: int | None) -> TierResult:
        """Free a slot that was taken, once its header is gone from the disk too."""
        if slot is None:
            return TierResult.DONE
        erased: asyncio.Future[TierResult]
        erased = asyncio.get_running_loop().create_future()
        self._erase_soon(slot, erased.set_result)
        return await erased

    async def _erase_all(self, slots: Sequence[int | None]) -> TierResult:
        results = await asyncio.gather(*map(self._erase, slots))
        return max(results, key=_is_failed, default=TierResult.DONE)

    def _erase_soon(self, slot: int, answer: Callable[[TierResult], None]) -> None:
        file, at = self._file_of(slot)

        def done(result: None, error: Exception | None) -> None:
            if error is None:
                self._index.free(slot)
                answer(TierResult.DONE)
                return
            self._index.lose(slot)
            self._failed("overwritten", error)
            answer(TierResult.FAILED)

        if self._threads is not None:
            self._threads.submit(
                READ, lambda bounce: slot_io.erase(file, at, bounce), done
            )

    async def _read(self, wanted: WantedValue, slot: int) -> TierResult:
        """Read from a slot, of which the index was told."""
        if slot < 0 or self._threads is None:
            return TierResult.MISSING
        # To go to the disk twice costs more than to copy so little.
        space = self._space_for(slot)
        try:
            result = await self._read_slot(wanted, slot, space, self._threads)
        except Exception as exc:  # noqa: BLE001 - also what only a bug would raise
            result = self._failed("read", exc)
        # Not if it is cancelled, as it must not be: then a thread may be reading still.
        self._index.end_read(slot)
        if space is not None:
            self._spare.append(space)
        return result

    async def _read_slot(
        self,
        wanted: WantedValue,
        slot: int,
        space: memoryview | None,
        threads: TierThreads[Bounce],
    ) -> TierResult:
        file, at = self._file_of(slot)

        def look(bounce: Bounce) -> SlotHeader | None:
            there = bounce.head if space is None else space[: file.slot_nbytes]
            return slot_io.read_header(file, at, there)

        def moved(nbytes: int) -> None:
            wanted.moved_nbytes += nbytes
            threads.check()

        header = await ask(threads, READ, look)
        memory = await self._place_for(wanted, slot, header)
        if isinstance(memory, TierResult):
            return memory
        if space is None:
            body = partial(slot_io.read_body, file, at, memory, moved=moved)
            await ask(threads, READ, lambda bounce: body(bounce=bounce))
        else:
            slot_io.copy_body(space, memory)
            wanted.moved_nbytes += memory.nbytes
        return TierResult.DONE

    def _space_for(self, slot: int) -> memoryview | None:
        """Return memory for all of a slot, if that is little and there is any."""
        nbytes = self._file_of(slot)[0].slot_nbytes
        if nbytes > _WHOLE_NBYTES:
            return None
        if not self._spare and self._spaces < _SPACES:
            self._spaces += 1
            self._spare.append(memoryview(mmap.mmap(-1, _WHOLE_NBYTES)))
        return self._spare.pop() if self._spare else None

    async def _place_for(
        self, wanted: WantedValue, slot: int, header: SlotHeader | None
    ) -> TierMemory | TierResult:
        if header is None:
            self._disbelieve(wanted.key, slot)
            return TierResult.MISSING
        if header.key != wanted.key:  # two keys with one hash
            return TierResult.MISSING
        try:
            memory = await wanted.place(header.header)
        except ValueError:  # it was all that there is of the header
            return TierResult.MISSING
        if memory is None:
            return TierResult.REFUSED
        return memory if memory.nbytes == header.body_nbytes else TierResult.MISSING

    def _file_of(self, slot: int) -> tuple[OpenSlotFile, int]:
        number, at = place_of(slot)
        return self._directory.files[number], at

    def _failed(self, what: str, error: Exception) -> TierResult:
        """Say what has failed: once for each kind."""
        if not isinstance(error, Stopped) and what not in self._said:
            self._said.add(what)
            unforeseen = None if isinstance(error, OSError) else error
            logger.warning(
                "values in %s could not be %s: %r",
                self.path,
                what,
                error,
                exc_info=unforeseen,
            )
        is_full = isinstance(error, OSError) and error.errno in NO_ROOM
        return TierResult.REFUSED if is_full else TierResult.FAILED

    def _disbelieve(self, key: str, slot: int) -> None:
        """What is in the slot is not what was written, and was not twice."""
        if self._index.remove(key, slot) is None:
            return  # it was overwritten meanwhile, by somebody who knew
        self._unverified += 1
        if "verified" not in self._said:
            self._said.add("verified")
            logger.warning("a value in %s was not as it was written", self.path)
        self._erase_soon(slot, lambda result: None)


def _key_in(file: OpenSlotFile, slot: int, bounce: Bounce) -> str | None:
    """Return the key of a value, or ``""``: there is none; ``None``: who knows."""
    try:
        header = slot_io.read_header(file, slot, bounce.head)
    except OSError:
        return None
    return "" if header is None else header.key


def _is_failed(result: TierResult) -> bool:
    return result is TierResult.FAILED
