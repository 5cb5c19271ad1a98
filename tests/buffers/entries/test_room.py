from __future__ import annotations

import asyncio
import logging

import pytest

from asynckv.buffers.entries.admission import Room, check_not_aborted
from asynckv.buffers.entries.entries import EntryState, StoredEntry
from asynckv.errors import BufferClosed, EntryAborted
from asynckv.testing.blocked import until_blocked
from harness.holders import draft_of


class Space:
    """Room for so many entries."""

    def __init__(self, left: int) -> None:
        self.left = left
        self.room = Room(self.give, self.give, "a bench")

    def give(self, entry: StoredEntry) -> bool:
        if not self.left:
            return False
        self.left -= 1
        entry.state = EntryState.FILLING
        entry.in_arena = True
        return True

    def free(self) -> None:
        self.left += 1
        self.room.change()


def entry_of(seq: int) -> StoredEntry:
    return StoredEntry(draft_of(str(seq)), seq)


async def test_who_comes_first_goes_first() -> None:
    space = Space(0)
    entries = [entry_of(seq) for seq in range(3)]
    assert not any(space.room.join(entry) for entry in entries)
    turns = [asyncio.create_task(space.room.turn(entry)) for entry in entries]
    for count in range(1, 4):
        space.free()
        await turns[count - 1]
        await until_blocked(*turns)
        assert [turn.done() for turn in turns].count(True) == count
    assert len(space.room) == 0


async def test_nobody_passes_who_waits() -> None:
    space = Space(0)
    first, second = entry_of(1), entry_of(2)
    space.room.join(first)
    space.left = 1
    assert not space.room.join(second)
    assert (first in space.room, second in space.room) == (False, True)


async def test_who_was_selected_meanwhile_lets_others_pass() -> None:
    space = Space(0)
    first, second = entry_of(1), entry_of(2)
    space.room.join(first)
    space.room.join(second)
    first.state = EntryState.DIRECT
    await space.room.turn(first)
    space.free()
    assert second.in_arena
    first.state = EntryState.WAITING
    space.free()
    assert first.in_arena


async def test_who_passes_only_selected_ones_does_not_wait() -> None:
    space = Space(0)
    first = entry_of(1)
    space.room.join(first)
    first.state = EntryState.DIRECT
    space.left = 1
    assert space.room.join(entry_of(2))


async def test_what_began_outside_is_adopted_also_when_it_is_committed() -> None:
    for state in (EntryState.STREAMING, EntryState.READY):
        space = Space(0)
        entry = entry_of(1)
        space.room.join(entry)
        entry.state = state
        space.room.change()
        assert entry in space.room
        space.free()
        assert entry.in_arena
        assert entry not in space.room


async def test_a_cancelled_wait_leaves_the_line_to_the_next() -> None:
    space = Space(0)
    first, second = entry_of(1), entry_of(2)
    for entry in (first, second):
        space.room.join(entry)
    turn = asyncio.create_task(space.room.turn(first))
    await until_blocked(turn)
    turn.cancel()
    await asyncio.wait({turn})
    space.room.quit(first)
    space.free()
    assert second.in_arena


async def test_closing_refuses_who_waits_and_who_comes() -> None:
    space = Space(0)
    entry = entry_of(1)
    space.room.join(entry)
    turn = asyncio.create_task(space.room.turn(entry))
    await until_blocked(turn)
    await space.room.aclose()
    with pytest.raises(BufferClosed):
        await turn
    with pytest.raises(BufferClosed):
        space.room.join(entry_of(2))


async def test_an_entry_that_left_tells_its_insert_how() -> None:
    entry = entry_of(1)
    entry.state = EntryState.GONE
    check_not_aborted(entry)
    for reason, kind in (("withdrawn", EntryAborted), ("closed", BufferClosed)):
        entry.left_by = reason
        with pytest.raises(kind):
            check_not_aborted(entry)


async def test_a_wait_says_who_waits_for_how_much_of_what(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "asynckv.observability.waits")
    space = Space(0)
    entry = entry_of(1)
    space.room.join(entry)
    turn = asyncio.create_task(space.room.turn(entry))
    await until_blocked(turn)
    for _ in range(3):
        space.room.change()
        await until_blocked(turn)
    assert space.room.longest_wait_s(asyncio.get_running_loop().time()) >= 0
    space.free()
    await turn
    (message,) = caplog.messages
    assert message.startswith("insert of 1 (16 bytes) waits for room in a bench; ")
    assert message.endswith("it ends with a drop_select, a withdraw or aclose")
