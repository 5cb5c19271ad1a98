"""Entries that move tensor by tensor: aborted or given back, and never half there."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any, Final

from asynckv.abc import KVEntry
from asynckv.buffers.lookup import LookupBuffer
from asynckv.errors import EntryAborted
from asynckv.testing.blocked import until
from asynckv.testing.cancellation import Outcome
from asynckv.testing.expectations import expect, expect_same
from asynckv.types import TensorSpec
from harness.cancellations.entries import OVERWRITE, TOKENS, Entries
from harness.cancellations.grounds import BUFFER_BYTES, Ground
from harness.cancellations.partners import Filler, Partner
from harness.cancellations.scenario import Scenario
from harness.cancellations.sweeper import Sweeper, ticks
from harness.fake_devices import fake_device

__all__ = (
    "STREAMING",
    "a_reader",
    "a_reader_beside_its_writer",
    "a_reader_of_views",
    "a_writer",
    "a_writer_before_a_select",
    "a_writer_beside_its_reader",
    "a_writer_that_waits_for_another",
    "a_writer_that_waits_for_room",
)

_UNTIL_IT_WAITS: Final = 20
"""Ticks in which an ``open_insert`` comes to where it waits."""


class _Writer:
    """Writes an entry of two tensors; ``is_whole`` once both were put."""

    def __init__(self, ground: Ground, entries: Entries) -> None:
        self.is_whole = False
        self._ground = ground
        self._entries = entries
        spec = TensorSpec((entries.nbytes,), "uint8")
        self._specs = {"key": spec, "value": spec}

    async def write(self) -> None:
        """The tensor is overwritten as soon as it has been put, or was not."""
        self.is_whole = False
        entries = self._entries
        opened = self._ground.producer.open_insert(
            TOKENS, None, self._specs, entry_id=entries.name
        )
        async with opened as writer:
            for name in self._specs:
                entries.key.copy_(entries.contents)
                try:
                    await writer.put(name, entries.key)
                finally:
                    entries.key.fill_(OVERWRITE)
            self.is_whole = True

    async def bring(self) -> None:
        """Begin a round with the entry in the buffer."""
        self._entries.begin()
        await self.write()


class _Reader:
    """Reads an entry to its end; ``is_used`` once it has all of it.

    It waits for its last tensor by name first, if it is to read ``by_name``. Where the
    buffer is on a GPU of this process it may read ``views``.
    """

    def __init__(
        self,
        ground: Ground,
        entries: Entries,
        *,
        by_name: bool = True,
        views: bool = False,
    ) -> None:
        self.is_used = False
        self._ground = ground
        self._entries = entries
        self._by_name = by_name
        self._views = views

    async def read(self) -> None:
        self.is_used = False
        contents = self._entries.contents
        opened = self._ground.consumer.open_drop_select(TOKENS)
        if self._views:
            opened = self._ground.local.open_views(self._entries.name)
        async with opened as stream:
            expect(stream.entry_id == self._entries.name, "another entry")
            if self._by_name:
                expect_same(await stream.wait_for("value"), contents)
            async for _, tensor in stream:
                expect_same(tensor, contents)
            self.is_used = True


async def _is_aborted_or_whole(
    ground: Ground, entries: Entries, writer: _Writer, outcome: Outcome[None]
) -> None:
    await entries.settled(ground.producer)
    if outcome.cancelled and not writer.is_whole:
        expect(ground.local.statistics().entries == 0, "an aborted entry is there")
    else:
        # Cancelled while it was committed: it is whole, or it is not there.
        expect(outcome.cancelled or entries.is_in, "it was committed")
    if entries.is_in:
        entries.expect_in(True)
    await entries.clear(ground.consumer)
    await ground.check_quiet()


async def a_writer(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Into a buffer that has room."""
    entries = Entries(ground, nbytes)
    writer = _Writer(ground, entries)

    async def before() -> None:
        entries.begin()

    async def check(outcome: Outcome[None]) -> None:
        await _is_aborted_or_whole(ground, entries, writer, outcome)

    await sweeper.sweep(f"a writer of {nbytes} bytes", writer.write, check, before)


async def a_writer_that_waits_for_room(
    ground: Ground, sweeper: Sweeper, nbytes: int
) -> None:
    """And that gets it, soon or in that very tick."""
    entries, filler = Entries(ground, nbytes), Filler(ground.local)
    writer = _Writer(ground, entries)
    partner: Partner

    async def before() -> None:
        nonlocal partner
        entries.begin()
        partner = await filler.fill_for(sweeper, filler.free)

    async def check(outcome: Outcome[None]) -> None:
        await partner.ended()
        await _is_aborted_or_whole(ground, entries, writer, outcome)

    await sweeper.sweep(
        f"a writer of {nbytes} bytes that waits", writer.write, check, before
    )


async def a_writer_that_waits_for_another(
    ground: Ground, sweeper: Sweeper, nbytes: int
) -> None:
    """Under its own id, which fails soon, or in that very tick."""
    entries, filler = Entries(ground, nbytes), Filler(ground.local)
    writer = _Writer(ground, entries)
    partner: Partner

    async def end_the_other() -> None:
        await ticks(_UNTIL_IT_WAITS)
        await filler.free()

    async def before() -> None:
        nonlocal partner
        writer.is_whole = False
        entries.begin()
        await filler.fill(entries.name)
        partner = Partner(sweeper, lambda: True, end_the_other)

    async def check(outcome: Outcome[None]) -> None:
        await partner.ended()
        await _is_aborted_or_whole(ground, entries, writer, outcome)

    await sweeper.sweep(
        f"a writer of {nbytes} bytes that waits for another",
        writer.write,
        check,
        before,
    )


async def a_reader(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Of an entry that is whole: in ``wait_for``, in the iteration, on leaving."""
    entries = Entries(ground, nbytes)
    writer, reader = _Writer(ground, entries), _Reader(ground, entries)

    async def before() -> None:
        reader.is_used = False
        await writer.bring()

    async def check(outcome: Outcome[None]) -> None:
        await _is_given_back(ground, entries, reader, outcome)

    await sweeper.sweep(f"a reader of {nbytes} bytes", reader.read, check, before)


async def a_reader_beside_its_writer(
    ground: Ground, sweeper: Sweeper, nbytes: int
) -> None:
    """The entry is given back while it is still written; the next begins anew.

    Once it waits for a tensor by its name, once for the next, whichever that is.
    """
    for by_name in (True, False):
        await _read_beside_a_writer(ground, sweeper, nbytes, by_name)


async def a_reader_of_views(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """As a reader of copies; and no view is left that keeps memory from others."""
    with fake_device() as gpu:
        async with LookupBuffer(
            BUFFER_BYTES, device=gpu.device, drain_s=0, max_deliver=1000
        ) as own:
            watched = dataclasses.replace(ground.watched, local=own)
            there = dataclasses.replace(
                ground, producer=own, consumer=own, local=own, watched=watched
            )
            for by_name in (True, False):
                await _read_beside_a_writer(there, sweeper, nbytes, by_name, views=True)


async def _read_beside_a_writer(
    ground: Ground,
    sweeper: Sweeper,
    nbytes: int,
    by_name: bool,
    *,
    views: bool = False,
) -> None:
    entries = Entries(ground, nbytes)
    writer = _Writer(ground, entries)
    reader = _Reader(ground, entries, by_name=by_name, views=views)
    partner: Partner

    async def before() -> None:
        nonlocal partner
        reader.is_used = False
        entries.begin()
        partner = Partner(
            sweeper,
            lambda: ground.local.statistics().waiting_selects > 0,
            writer.write,
        )

    async def check(outcome: Outcome[None]) -> None:
        await partner.ended()
        await _is_given_back(ground, entries, reader, outcome)

    way = ("by name" if by_name else "in order") + " of views" * views
    await sweeper.sweep(
        f"a reader {way} of {nbytes} bytes beside its writer",
        reader.read,
        check,
        before,
    )


async def _is_given_back(
    ground: Ground, entries: Entries, reader: _Reader, outcome: Outcome[None]
) -> None:
    await entries.settled(ground.consumer)
    either = outcome.cancelled and reader.is_used  # cancelled on the way out
    entries.expect_in(entries.is_in if either else not reader.is_used)
    await entries.clear(ground.consumer)
    await ground.check_quiet()


async def a_writer_beside_its_reader(
    ground: Ground, sweeper: Sweeper, nbytes: int
) -> None:
    """The reader hears of the abort, or has read all of it."""
    entries = Entries(ground, nbytes)
    writer, reader = _Writer(ground, entries), _Reader(ground, entries)
    reading: asyncio.Task[None]

    async def before() -> None:
        nonlocal reading
        writer.is_whole = False
        entries.begin()
        await sweeper.pause()
        reading = asyncio.create_task(reader.read())
        await sweeper.pause()

    async def check(outcome: Outcome[None]) -> None:
        await entries.settled(ground.producer)
        if outcome.cancelled:
            # It hears of it, or waits (again) for what will never be written.
            await until(lambda: reading.done() or not _has_begun(ground))
            reading.cancel()
        result = (await asyncio.gather(reading, return_exceptions=True))[0]
        _expect_told(result, outcome, writer)
        await entries.settled(ground.consumer)
        expect(ground.local.statistics().entries == 0, "an aborted entry is there")
        await ground.check_quiet()

    await sweeper.sweep(
        f"a writer of {nbytes} bytes beside its reader", writer.write, check, before
    )


def _has_begun(ground: Ground) -> bool:
    """Whether the reader has an entry, or had one."""
    return ground.local.statistics().waiting_selects == 0


def _expect_told(result: Any, outcome: Outcome[None], writer: _Writer) -> None:
    ended = (EntryAborted, asyncio.CancelledError)
    may_fail = outcome.cancelled and isinstance(result, ended)
    expect(result is None or may_fail, f"the reader ended with {result!r}")
    if outcome.cancelled and not writer.is_whole:
        expect(result is not None, "the reader has read what was never written")


async def a_writer_before_a_select(
    ground: Ground, sweeper: Sweeper, nbytes: int
) -> None:
    """A plain select that waits for its end waits on, and takes the next entry."""
    entries = Entries(ground, nbytes)
    writer = _Writer(ground, entries)
    select: asyncio.Task[KVEntry]

    async def before() -> None:
        nonlocal select
        entries.begin()
        await sweeper.pause()
        select = asyncio.create_task(entries.take(ground.consumer))
        await sweeper.pause()

    async def check(outcome: Outcome[None]) -> None:
        await entries.settled(ground.producer)
        if outcome.cancelled and not entries.is_in:
            entries.key.copy_(entries.contents)
            await ground.consumer.peek(TOKENS)
            if ground.local.statistics().waiting_selects:
                await ground.producer.insert(
                    TOKENS, None, entries.key, None, None, entry_id=entries.name
                )
        await select
        await entries.settled(ground.consumer)
        expect(ground.local.statistics().entries == 0, "it is there and was taken")
        await ground.check_quiet()

    await sweeper.sweep(
        f"a writer of {nbytes} bytes before a select", writer.write, check, before
    )


_OPEN_INSERT: Final = (
    "KVLookupBuffer.open_insert",
    "InsertWriter.put",
    "RemoteWriter.granted",
    "RemoteWriter.commit",
)
_OPEN_SELECT: Final = (
    "KVLookupBuffer.open_drop_select",
    "SelectStream.__anext__",
    "SelectStream.wait_for",
)

_VIEWS: Final = ("LookupBuffer.open_views", "SelectStream.wait_for")

STREAMING: Final = (
    Scenario(a_writer, _OPEN_INSERT),
    Scenario(a_writer_that_waits_for_room, _OPEN_INSERT),
    Scenario(a_writer_that_waits_for_another, _OPEN_INSERT),
    Scenario(a_reader, _OPEN_SELECT),
    Scenario(a_reader_of_views, _VIEWS, ("local",), is_costly=True),
    Scenario(a_reader_beside_its_writer, _OPEN_SELECT),
    Scenario(a_writer_beside_its_reader, _OPEN_INSERT),
    Scenario(a_writer_before_a_select, _OPEN_INSERT),
)
