"""What every tier of a store keeps: checks to run on yours.

Make it of :class:`~asynckv.abc.StoreTier`, say how one is made over storage that is
empty, and let the checks loose on it. What is made is called for a tier, for the same
storage each time, one after the other::

    @contextlib.asynccontextmanager
    async def make_tier():
        with tempfile.TemporaryDirectory() as path:
            yield lambda: DiskTier(path, 256 * 2**20)

    async def test_my_tier_keeps_the_contract() -> None:
        await check_tier(make_tier)

It needs room for 128 MiB. A check verifies what it has read, as a store does: by a
digest in the header.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import mmap
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Final, TypeAlias

from asynckv.abc import (
    StoreTier,
    TierMemory,
    TierPrefix,
    TierResult,
    TierValue,
    WantedValue,
)
from asynckv.protocol.wire import digest_of
from asynckv.testing.blocked import until
from asynckv.testing.expectations import expect, naming

__all__ = (
    "DONE",
    "LASTING_CHECKS",
    "MISSING",
    "SIZES",
    "TIER_CHECKS",
    "MakeTier",
    "OpenTier",
    "SomeValue",
    "TierCheck",
    "a_clear_forgets_what_begins_so_or_says_that_it_cannot",
    "a_header_that_is_too_short_is_asked_for_again",
    "a_large_value_may_lie_in_pieces",
    "a_reader_never_sees_a_mix",
    "a_reopened_tier_has_what_it_had",
    "a_value_comes_back_as_it_was_stored",
    "check_tier",
    "every_item_of_a_call_has_its_result",
    "it_tells_which_keys_it_has",
    "memory_is_the_callers_after_a_call",
    "open_tier",
    "own_memory",
    "the_last_store_wins",
    "until_it_has",
    "what_is_not_wanted_is_refused",
    "what_was_deleted_is_missing",
    "what_was_never_stored_is_missing",
)

OpenTier: TypeAlias = Callable[[], StoreTier]
"""Makes a tier over the storage of one check; the one before was closed."""

MakeTier: TypeAlias = Callable[[], AbstractAsyncContextManager[OpenTier]]
"""Makes storage with nothing in it, and lets it go."""

TierCheck: TypeAlias = Callable[[OpenTier], Awaitable[None]]

SIZES: Final = (0, 1, 4095, 4096, 4097, 2 * 2**20 + 1)
_LARGE_NBYTES: Final = 16 * 2**20
_PAGE_NBYTES: Final = mmap.PAGESIZE
_DIGEST_NBYTES: Final = 16
_SCAN_S: Final = 30.0

DONE: Final = TierResult.DONE
MISSING: Final = TierResult.MISSING


@functools.lru_cache(maxsize=32)
def _noise(nbytes: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(nbytes)


def own_memory(nbytes: int, pieces: int = 1, *, has_pages: bool = True) -> TierMemory:
    """Return new memory in so many pieces; of whole pages, or of what comes.

    All of it, be it ever so little, belongs to the caller.
    """
    if not has_pages:
        places = [nbytes * number // pieces for number in range(pieces + 1)]
        spans = itertools.pairwise(places)
        # One byte further on: nothing begins where a page does.
        memory = memoryview(mmap.mmap(-1, nbytes + _PAGE_NBYTES))[1:]
        return TierMemory(nbytes, [memory[start:stop] for start, stop in spans])
    each = max(-(-nbytes // (_PAGE_NBYTES * pieces)) * _PAGE_NBYTES, _PAGE_NBYTES)
    sizes = [min(each, nbytes - start) for start in range(0, nbytes, each)]
    pages = [
        memoryview(mmap.mmap(-1, -(-size // _PAGE_NBYTES) * _PAGE_NBYTES))
        for size in sizes
    ]
    shown = [whole[:size] for whole, size in zip(pages, sizes, strict=True)]
    return TierMemory(nbytes, shown, pages)


class SomeValue(WantedValue):
    """A value of ``nbytes``, to be stored, or wanted; each ``seed`` has other bytes."""

    is_held = False

    def __init__(
        self,
        key: str,
        nbytes: int = 0,
        seed: int = 0,
        *,
        pieces: int = 1,
        has_pages: bool = True,
    ) -> None:
        super().__init__(key)
        self.nbytes = nbytes
        self.memory = own_memory(nbytes, pieces, has_pages=has_pages)
        self.is_wanted = True
        self.asked = 0
        self._seed = seed
        self._found_digest = b""

    @property
    def lent_nbytes(self) -> int:
        return self.nbytes

    @property
    def data(self) -> bytes:
        """What is in its memory."""
        return b"".join(self.memory.pieces)

    def to_store(self, header_nbytes: int = 64) -> TierValue:
        """Fill the memory, and return it as a value with a header."""
        data = _noise(self.nbytes, self._seed)
        self.fill(data)
        begin = header_nbytes.to_bytes(2, "little") + digest_of(data)
        return TierValue(self.key, begin.ljust(header_nbytes, b"."), self.memory)

    def fill(self, data: bytes) -> None:
        """Write to its memory."""
        start = 0
        for piece in self.memory.pieces:
            piece[:] = data[start : start + len(piece)]
            start += len(piece)

    async def place(self, header: bytes | memoryview) -> TierMemory | None:
        self.asked += 1
        self.header_nbytes = int.from_bytes(header[:2], "little")
        if len(header) < max(self.header_nbytes, 2 + _DIGEST_NBYTES):
            raise ValueError("this is too short for a header")
        self._found_digest = bytes(header[2 : 2 + _DIGEST_NBYTES])
        return self.memory if self.is_wanted else None

    def is_one_of(self, *seeds: int) -> bool:
        """Is it what was stored with one of these seeds, whole?"""
        return self.is_verified and any(
            self.data == _noise(self.nbytes, seed) for seed in seeds
        )

    @property
    def is_verified(self) -> bool:
        """Are its bytes those that its header has the digest of?"""
        return digest_of(self.data) == self._found_digest


@contextlib.asynccontextmanager
async def open_tier(make: OpenTier) -> AsyncIterator[StoreTier]:
    """Have a tier that was probed, until it is closed."""
    async with make() as tier:
        await tier.probe()
        yield tier


async def _store(tier: StoreTier, *values: TierValue) -> None:
    results = list(await tier.store(values))
    expect(results == [DONE] * len(values), f"stored: {results}")


async def _fetch(tier: StoreTier, *wanted: WantedValue) -> Sequence[TierResult]:
    results = await tier.fetch(wanted)
    expect(len(results) == len(wanted), "one result an item")
    return results


async def _expect_value(tier: StoreTier, wanted: SomeValue, seed: int) -> None:
    (result,) = await _fetch(tier, wanted)
    expect(result is DONE, f"{wanted.nbytes} bytes of {wanted.key}: {result}")
    expect(wanted.is_one_of(seed), f"{wanted.nbytes} bytes are not those stored")
    expect(wanted.moved_nbytes >= wanted.nbytes, "it says what it has moved")


async def a_value_comes_back_as_it_was_stored(make: OpenTier) -> None:
    """Of every size, from and to pages, and from and to whatever memory."""
    async with open_tier(make) as tier:
        for seed, nbytes in enumerate(SIZES):
            for has_pages in (True, False):
                key = f"k1/{nbytes:064x}"
                stored = SomeValue(key, nbytes, seed, has_pages=has_pages).to_store()
                await _store(tier, stored)
                expect(stored.moved_nbytes >= nbytes, "it says what it has moved")
                for to_pages in (True, False):
                    wanted = SomeValue(key, nbytes, has_pages=to_pages)
                    await _expect_value(tier, wanted, seed)


async def a_large_value_may_lie_in_pieces(make: OpenTier) -> None:
    """In other pieces where it goes than where it came from."""
    async with open_tier(make) as tier:
        stored = SomeValue("k1/a", _LARGE_NBYTES, 1, pieces=5)
        await _store(tier, stored.to_store())
        for pieces, has_pages in ((1, True), (7, True), (3, False), (2000, False)):
            wanted = SomeValue(
                "k1/a", _LARGE_NBYTES, pieces=pieces, has_pages=has_pages
            )
            await _expect_value(tier, wanted, 1)


async def the_last_store_wins(make: OpenTier) -> None:
    """Also in one call, and by a value of another size."""
    async with open_tier(make) as tier:
        for seed, nbytes in enumerate((9000, 9000, 100, 300_000)):
            await _store(tier, SomeValue("k1/a", nbytes, seed).to_store())
            await _expect_value(tier, SomeValue("k1/a", nbytes), seed)
        both = [SomeValue("k1/a", 5000, seed).to_store() for seed in (8, 9)]
        await _store(tier, *both)
        await _expect_value(tier, SomeValue("k1/a", 5000), 9)


async def what_was_never_stored_is_missing(make: OpenTier) -> None:
    """And nobody is asked where it should go."""
    async with open_tier(make) as tier:
        wanted = SomeValue("k1/a", 100)
        expect(list(await _fetch(tier, wanted)) == [MISSING], "it is missing")
        expect(not wanted.asked, "there is nothing to place")
        expect(list(await tier.contains(["k1/a"])) == [MISSING], "it has none")


async def what_was_deleted_is_missing(make: OpenTier) -> None:
    """A second time it is gone, too; and it may be stored again."""
    async with open_tier(make) as tier:
        for seed in range(2):
            await _store(tier, SomeValue("k1/a", 5000, seed).to_store())
            await _expect_value(tier, SomeValue("k1/a", 5000), seed)
            for _ in range(2):
                deleted = list(await tier.delete(["k1/a", "k1/b"]))
                expect(deleted == [DONE, DONE], f"deleted: {deleted}")
                results = await _fetch(tier, SomeValue("k1/a", 5000))
                expect(list(results) == [MISSING], "it is gone")


async def a_clear_forgets_what_begins_so_or_says_that_it_cannot(make: OpenTier) -> None:
    """And nothing else; it may be stored again. A second time there is nothing."""
    keys = [f"k1/{owner}/{number:064}" for owner in "ab" for number in range(70)]
    there = [MISSING] * 70 + [DONE] * 70
    async with open_tier(make) as tier:
        for seed in range(2):
            stored = [SomeValue(key, 100, seed).to_store() for key in keys]
            await _store(tier, *stored)
            prefix = TierPrefix("k1/a/")
            result = await tier.clear(prefix)
            if result is TierResult.REFUSED:
                return
            expect(result is DONE, f"cleared: {result}")
            expect(prefix.moved_nbytes > 0, "it says that it gets on")
            results = await _fetch(tier, *(SomeValue(key, 100) for key in keys))
            expect(list(results) == there, "others are gone, or those are not")
            expect(list(await tier.contains(keys[69:])) == there[69:], "it has them")
            expect(await tier.clear(TierPrefix("k1/a/")) is DONE, "nothing is there")
        expect(await tier.clear(TierPrefix("k1/never/")) is DONE, "nothing was there")


async def it_tells_which_keys_it_has(make: OpenTier) -> None:
    """In the order of the question, each as often as it is asked."""
    async with open_tier(make) as tier:
        values = [SomeValue(f"k1/{name}", 10).to_store() for name in "ac"]
        await _store(tier, *values)
        found = list(await tier.contains(["k1/a", "k1/b", "k1/c", "k1/a"]))
        expect(found == [DONE, MISSING, DONE, DONE], f"found {found}")
        expect(not list(await tier.contains([])), "nothing asked, nothing told")
        await tier.touch(["k1/a", "k1/b"])


async def every_item_of_a_call_has_its_result(make: OpenTier) -> None:
    """Many at once, some of them missing, some not wanted."""
    async with open_tier(make) as tier:
        keys = [f"k1/{number:02}" for number in range(40)]
        stored = [SomeValue(key, 3000, at).to_store() for at, key in enumerate(keys)]
        await _store(tier, *stored)
        gone = list(await tier.delete(keys[::5]))
        expect(gone == [DONE] * 8, f"deleted: {gone}")
        wanted = [SomeValue(key, 3000) for key in keys]
        for one in wanted[1::5]:
            one.is_wanted = False
        results = await _fetch(tier, *wanted)
        for at, (one, result) in enumerate(zip(wanted, results, strict=True)):
            meant = {0: MISSING, 1: TierResult.REFUSED}.get(at % 5, DONE)
            expect(result is meant, f"item {at}: {result}")
            expect(result is not DONE or one.is_one_of(at), f"item {at} is another")
        expect(not list(await tier.store([])), "nothing stored, nothing told")
        expect(not list(await tier.fetch([])), "nothing wanted, nothing told")
        expect(not list(await tier.delete([])), "nothing deleted, nothing told")


async def what_is_not_wanted_is_refused(make: OpenTier) -> None:
    """Its memory is left alone, and it stays where it is."""
    async with open_tier(make) as tier:
        await _store(tier, SomeValue("k1/a", 5000, 1).to_store())
        unwanted = SomeValue("k1/a", 5000)
        unwanted.is_wanted = False
        results = list(await _fetch(tier, unwanted))
        expect(results == [TierResult.REFUSED], f"it is {results}")
        expect(not any(unwanted.data), "nothing was written")
        await _expect_value(tier, SomeValue("k1/a", 5000), 1)


async def a_header_that_is_too_short_is_asked_for_again(make: OpenTier) -> None:
    """However long it is, also where nobody has said so before."""
    async with open_tier(make) as tier:
        for header_nbytes in (18, 500, 3072):
            for nbytes in (0, 5000):
                stored = SomeValue("k1/a", nbytes, 1).to_store(header_nbytes)
                await _store(tier, stored)
                await _expect_value(tier, SomeValue("k1/a", nbytes), 1)


async def a_reader_never_sees_a_mix(make: OpenTier) -> None:
    """While values of one key are replaced, each one that is read is whole."""
    async with open_tier(make) as tier:
        nbytes, seeds = 300_000, range(8)

        async def replace() -> None:
            for seed in seeds:
                await _store(tier, SomeValue("k1/a", nbytes, seed).to_store())

        async def read() -> None:
            for _ in seeds:
                wanted = SomeValue("k1/a", nbytes)
                (result,) = await _fetch(tier, wanted)
                if result is DONE and wanted.is_verified:
                    expect(wanted.is_one_of(*seeds), "it is none that was stored")

        await asyncio.gather(replace(), read(), read())
        await _expect_value(tier, SomeValue("k1/a", nbytes), seeds[-1])


async def memory_is_the_callers_after_a_call(make: OpenTier) -> None:
    """What is written to it then goes nowhere, and nobody else writes to it."""
    async with open_tier(make) as tier:
        source, wanted = SomeValue("k1/a", 300_000, 1), SomeValue("k1/a", 300_000)
        await _store(tier, source.to_store())
        source.fill(bytes(source.nbytes))
        await _expect_value(tier, wanted, 1)
        wanted.fill(bytes(wanted.nbytes))
        await _expect_value(tier, SomeValue("k1/a", 300_000), 1)
        await _store(tier, SomeValue("k1/a", 300_000, 2).to_store())
        await tier.delete(["k1/a"])
        expect(not any(source.data) and not any(wanted.data), "memory was written to")


async def a_reopened_tier_has_what_it_had(make: OpenTier) -> None:
    """What was stored last; not what was deleted, or replaced."""
    async with open_tier(make) as tier:
        for seed, nbytes in enumerate(SIZES):
            await _store(tier, SomeValue(f"k1/{nbytes}", nbytes, seed).to_store())
        for seed in range(2):
            await _store(tier, SomeValue("k1/new", 5000, seed).to_store())
        await _store(tier, SomeValue("k1/gone", 5000).to_store())
        await tier.delete(["k1/gone"])
        await _store(tier, SomeValue("k1/cleared/a", 5000).to_store())
        is_cleared = await tier.clear(TierPrefix("k1/cleared/")) is DONE
    async with open_tier(make) as tier:
        for seed, nbytes in enumerate(SIZES):
            await until_it_has(tier, f"k1/{nbytes}")
            await _expect_value(tier, SomeValue(f"k1/{nbytes}", nbytes), seed)
        await until_it_has(tier, "k1/new")
        await _expect_value(tier, SomeValue("k1/new", 5000), 1)
        results = list(await tier.delete(["k1/gone"]))
        expect(results == [DONE], f"it is certain that it is gone: {results}")
        found = list(await tier.contains(["k1/gone", "k1/cleared/a"]))
        expect(found[0] is MISSING, "it is gone")
        expect(not is_cleared or found[1] is MISSING, "what was cleared is gone")


async def until_it_has(tier: StoreTier, key: str) -> None:
    """Wait until a tier that is still looking at its storage has found a key.

    :raises TimeoutError: it does not
    """
    results: list[TierResult] = []

    async def ask() -> None:
        while DONE not in results:
            results[:] = await tier.contains([key])
            await asyncio.sleep(0)

    asking = asyncio.ensure_future(ask())
    try:
        await until(asking.done, timeout_s=_SCAN_S)
    finally:
        asking.cancel()


LASTING_CHECKS: Final[tuple[TierCheck, ...]] = (a_reopened_tier_has_what_it_had,)
"""Of tiers whose storage outlives them."""

TIER_CHECKS: Final[tuple[TierCheck, ...]] = (
    a_value_comes_back_as_it_was_stored,
    a_large_value_may_lie_in_pieces,
    the_last_store_wins,
    what_was_never_stored_is_missing,
    what_was_deleted_is_missing,
    a_clear_forgets_what_begins_so_or_says_that_it_cannot,
    it_tells_which_keys_it_has,
    every_item_of_a_call_has_its_result,
    what_is_not_wanted_is_refused,
    a_header_that_is_too_short_is_asked_for_again,
    a_reader_never_sees_a_mix,
    memory_is_the_callers_after_a_call,
    *LASTING_CHECKS,
)


async def check_tier(make_tier: MakeTier) -> None:
    """Run every check of :data:`TIER_CHECKS`, each on storage of its own.

    :raises AssertionError: the tier breaks the contract; a note names the check
    """
    for check in TIER_CHECKS:
        with naming(check):
            async with make_tier() as make:
                await check(make)
