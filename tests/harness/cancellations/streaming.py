"""Entries that move tensor by tensor: aborted or given back, and never half there."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Final

from asynckv.buffers.lookup import LookupBuffer
from asynckv.errors import EntryAborted
from asynckv.testing.blocked import until
from asynckv.testing.cancellation import Outcome
from asynckv.testing.expectations import expect, expect_same
from asynckv.types import TensorSpec
from harness.cancellations.entries import OVERWRITE, TOKENS, Entries, Filler, Partner
from harness.cancellations.grounds import BUFFER_BYTES, Ground
from harness.cancellations.sweeper import Sweeper, scenario, ticks
from harness.fake_devices import fake_device

__all__: tuple[str, ...] = ()

_UNTIL_IT_WAITS: Final = 20
"""Ticks in which an ``open_insert`` comes to where it waits."""
_OPEN_INSERT: Final = (
    *("KVLookupBuffer.open_insert", "InsertWriter.put"),
    *("RemoteWriter.granted", "RemoteWriter.commit"),
)
_OPEN_SELECT: Final = (
    *("KVLookupBuffer.open_drop_select", "SelectStream.__anext__"),
    "SelectStream.wait_for",
)


class _Stream:
    """An entry of two tensors that is written or read.

    ``is_whole`` once both were put, ``is_used`` once a reader has all of it. It waits
    for its last tensor by name first, if it is to read ``by_name``. Where the buffer is
    on a GPU of this process it may read ``views``.
    """

    def __init__(
        self, ground: Ground, nbytes: int, *, by_name: bool = True, views: bool = False
    ) -> None:
        self.is_whole = self.is_used = False
        self.entries = Entries(ground, nbytes)
        self._ground, self._by_name, self._views = ground, by_name, views
        self._specs = dict.fromkeys(("key", "value"), TensorSpec((nbytes,), "uint8"))

    def begin(self) -> None:
        """Begin a round with a new entry."""
        self.is_whole = self.is_used = False
        self.entries.begin()

    async def write(self) -> None:
        """The tensor is overwritten as soon as it has been put, or was not."""
        self.is_whole, entries = False, self.entries
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

    async def read(self) -> None:
        self.is_used, contents = False, self.entries.contents
        opened = self._ground.consumer.open_drop_select(TOKENS)
        if self._views:
            opened = self._ground.local.open_views(self.entries.name)
        async with opened as stream:
            expect(stream.entry_id == self.entries.name, "another entry")
            if self._by_name:
                expect_same(await stream.wait_for("value"), contents)
            async for _, tensor in stream:
                expect_same(tensor, contents)
            self.is_used = True

    async def check_written(self, outcome: Outcome[None]) -> None:
        """It was aborted or is whole."""
        entries = self.entries
        await entries.settled(self._ground.producer)
        if outcome.cancelled and not self.is_whole:
            count = self._ground.local.statistics().entries
            expect(count == 0, "an aborted entry is there")
        else:
            # Cancelled while it was committed: it is whole, or it is not there.
            expect(outcome.cancelled or entries.is_in, "it was committed")
        if entries.is_in:
            entries.expect_in(True)
        await entries.clear(self._ground)

    async def check_read(self, outcome: Outcome[None]) -> None:
        """It was given back or used."""
        await self.entries.settled(self._ground.consumer)
        either = outcome.cancelled and self.is_used  # cancelled on the way out
        self.entries.expect_in(self.entries.is_in if either else not self.is_used)
        await self.entries.clear(self._ground)

    async def check_gone(self) -> None:
        """It was taken, or never whole."""
        await self.entries.settled(self._ground.consumer)
        expect(self._ground.local.statistics().entries == 0, "it is still there")
        await self._ground.check_quiet()


@scenario(*_OPEN_INSERT)
async def a_writer(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Into a buffer that has room."""
    stream = _Stream(ground, nbytes)
    async for cancel in sweeper.sweep():
        stream.begin()
        await stream.check_written(await cancel(stream.write))


@scenario(*_OPEN_INSERT)
async def a_writer_that_waits_for_room(
    ground: Ground, sweeper: Sweeper, nbytes: int
) -> None:
    """And that gets it, soon or in that very tick."""
    stream, filler = _Stream(ground, nbytes), Filler(ground.local)
    async for cancel in sweeper.sweep():
        stream.begin()
        partner = await filler.fill_for(sweeper, filler.free)
        outcome = await cancel(stream.write)
        await partner.ended()
        await stream.check_written(outcome)


@scenario(*_OPEN_INSERT)
async def a_writer_that_waits_for_another(
    ground: Ground, sweeper: Sweeper, nbytes: int
) -> None:
    """Under its own id, which fails soon, or in that very tick."""
    stream, filler = _Stream(ground, nbytes), Filler(ground.local)

    async def end_the_other() -> None:
        await ticks(_UNTIL_IT_WAITS)
        await filler.free()

    async for cancel in sweeper.sweep():
        stream.begin()
        await filler.fill(stream.entries.name)
        partner = Partner(sweeper, lambda: True, end_the_other)
        outcome = await cancel(stream.write)
        await partner.ended()
        await stream.check_written(outcome)


@scenario(*_OPEN_SELECT)
async def a_reader(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Of an entry that is whole: in ``wait_for``, in the iteration, on leaving."""
    stream = _Stream(ground, nbytes)
    async for cancel in sweeper.sweep():
        stream.begin()
        await stream.write()
        await stream.check_read(await cancel(stream.read))


@scenario(
    *("LookupBuffer.open_views", "SelectStream.wait_for"),
    kinds=("local",),
    is_costly=True,
)
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
            await _read_beside_a_writer(there, sweeper, nbytes, views=True)


@scenario(*_OPEN_SELECT)
async def a_reader_beside_its_writer(
    ground: Ground, sweeper: Sweeper, nbytes: int
) -> None:
    """The entry is given back while it is still written; the next begins anew."""
    await _read_beside_a_writer(ground, sweeper, nbytes, views=False)


async def _read_beside_a_writer(
    ground: Ground, sweeper: Sweeper, nbytes: int, *, views: bool
) -> None:
    """Once it waits for a tensor by its name, once for the next, whichever that is."""
    for by_name in (True, False):
        stream = _Stream(ground, nbytes, by_name=by_name, views=views)
        async for cancel in sweeper.sweep("by name" if by_name else "in order"):
            stream.begin()
            partner = Partner(
                sweeper,
                lambda: ground.local.statistics().waiting_selects > 0,
                stream.write,
            )
            outcome = await cancel(stream.read)
            await partner.ended()
            await stream.check_read(outcome)


@scenario(*_OPEN_INSERT)
async def a_writer_beside_its_reader(
    ground: Ground, sweeper: Sweeper, nbytes: int
) -> None:
    """The reader hears of the abort, or has read all of it."""
    stream = _Stream(ground, nbytes)
    async for cancel in sweeper.sweep():
        stream.begin()
        await sweeper.pause()
        reading = asyncio.create_task(stream.read())
        outcome = await cancel(stream.write)
        await stream.entries.settled(ground.producer)
        if outcome.cancelled:
            # It hears of it, or waits (again) for what will never be written.
            await until(
                lambda: reading.done() or ground.local.statistics().waiting_selects > 0
            )
            reading.cancel()
        (told,) = await asyncio.gather(reading, return_exceptions=True)
        ended = isinstance(told, EntryAborted | asyncio.CancelledError)
        expect(told is None or (outcome.cancelled and ended), f"it ended by {told!r}")
        if outcome.cancelled and not stream.is_whole:
            expect(told is not None, "the reader has read what was never written")
        await stream.check_gone()


@scenario(*_OPEN_INSERT)
async def a_writer_before_a_select(
    ground: Ground, sweeper: Sweeper, nbytes: int
) -> None:
    """A plain select that waits for its end waits on, and takes the next entry."""
    stream = _Stream(ground, nbytes)
    entries = stream.entries
    async for cancel in sweeper.sweep():
        stream.begin()
        await sweeper.pause()
        select = asyncio.create_task(entries.take(ground.consumer))
        outcome = await cancel(stream.write)
        await entries.settled(ground.producer)
        if outcome.cancelled and not entries.is_in:
            await ground.consumer.peek(TOKENS)
            if ground.local.statistics().waiting_selects:
                await entries.insert_again(ground.producer)
        await select
        await stream.check_gone()
