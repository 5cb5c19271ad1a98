from __future__ import annotations

import asyncio

import pytest

from asynckv.links.streams import (
    LOW_BYTES,
    MAX_ANSWER_BYTES,
    ControlStream,
    LinkWriter,
    StreamOwner,
)
from asynckv.protocol.frames import Get
from asynckv.protocol.outbox import Outbox
from asynckv.protocol.values import Limits


class Narrow(ControlStream):
    """Takes one write, and the next when it is told to."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.is_paused = False
        self.is_finished = False
        self.takes_one_at_a_time = False

    @property
    def is_full(self) -> bool:
        return bool(self.unsent_bytes)

    @is_full.setter
    def is_full(self, is_full: bool) -> None:
        self.unsent_bytes = int(is_full)

    def start(self, owner: StreamOwner) -> None: ...

    def write(self, data: bytes) -> None:
        self.writes.append(data)
        self.is_full = self.takes_one_at_a_time
        self.sent_bytes += len(data)

    def finish(self) -> None:
        self.is_finished = True

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    def abort(self) -> None: ...


class Sender:
    """An outgoing half whose peer opens the even streams."""

    def __init__(self, *, full: bool = False) -> None:
        self.stream = Narrow()
        self.stream.is_full = full
        self.outbox = Outbox(Limits(), own_parity=1)
        self.resumed = 0
        self.outgoing = LinkWriter(
            self.stream, self.outbox, asyncio.get_running_loop(), self._resume
        )

    def _resume(self) -> None:
        self.resumed += 1

    def answer(self, nbytes: int) -> None:
        while nbytes > 0:
            self.outbox.put(2, Get("a"), bytes(50_000))
            nbytes -= 50_000


async def test_what_is_queued_in_a_tick_leaves_in_one_write() -> None:
    sender = Sender()
    for stream in (1, 3, 5):
        sender.outbox.put(stream, Get("a"))
        sender.outgoing.flush_soon()
    assert sender.stream.writes == []
    await asyncio.sleep(0)
    assert len(sender.stream.writes) == 1
    assert sender.outgoing.nbytes == 0


async def test_the_first_request_of_a_tick_leaves_at_once() -> None:
    sender = Sender()
    for _ in range(2):
        for stream in (1, 3, 5):
            sender.outbox.put(stream, Get("a"))
            sender.outgoing.flush_first()
        first, *others = sender.stream.writes
        assert others == []
        await asyncio.sleep(0)
        assert len(sender.stream.writes.pop()) == 2 * len(first)
        sender.stream.writes.clear()


async def test_a_full_stream_is_given_nothing() -> None:
    sender = Sender(full=True)
    sender.outbox.put(1, Get("a"))
    sender.outgoing.flush()
    assert sender.stream.writes == []
    sender.stream.is_full = False
    sender.outgoing.flush()
    assert len(sender.stream.writes) == 1


async def test_reading_pauses_while_many_answers_wait_and_goes_on_after() -> None:
    sender = Sender(full=True)
    sender.answer(MAX_ANSWER_BYTES + 1)
    sender.outgoing.flush()
    assert sender.outgoing.is_reading_paused
    assert sender.stream.is_paused
    sender.stream.is_full = False
    sender.outgoing.flush()
    await asyncio.sleep(0)
    assert sender.resumed == 1
    sender.outgoing.flush()
    assert not sender.outgoing.is_reading_paused


async def test_what_this_side_asks_pauses_nothing() -> None:
    sender = Sender(full=True)
    for _ in range(200):
        sender.outbox.put(1, Get("a"), bytes(50_000))
    sender.outgoing.flush()
    sender.outgoing.flush()
    assert not sender.outgoing.is_reading_paused


async def test_a_peer_that_takes_what_it_is_sent_is_not_judged() -> None:
    sender = Sender(full=True)
    sender.stream.takes_one_at_a_time = True
    sender.answer(2 * MAX_ANSWER_BYTES)
    sender.outgoing.flush()
    for _ in range(5):
        sender.stream.is_full = False
        sender.outgoing.flush()
        assert sender.outgoing.judge_reader()


async def test_for_a_peer_that_takes_nothing_reading_goes_on_twice() -> None:
    sender = Sender(full=True)
    for _ in range(5):
        sender.answer(5 * MAX_ANSWER_BYTES)
        sender.outgoing.flush()
        sender.outgoing.judge_reader()
        await asyncio.sleep(0)
    assert sender.resumed == 2
    assert sender.stream.is_paused


async def test_who_waits_is_told_once_when_little_is_left() -> None:
    sender = Sender(full=True)
    told: list[int] = []
    sender.answer(2 * LOW_BYTES)
    sender.outgoing.call_when_drained(lambda: told.append(1))
    sender.outgoing.flush()
    await asyncio.sleep(0)
    assert told == []
    sender.stream.is_full = False
    sender.outgoing.flush()
    sender.outgoing.flush()
    await asyncio.sleep(0)
    assert told == [1]


async def test_who_need_not_wait_is_told_on_a_later_tick() -> None:
    told: list[int] = []
    Sender().outgoing.call_when_drained(lambda: told.append(1))
    assert told == []
    await asyncio.sleep(0)
    assert told == [1]


async def test_the_end_comes_after_all_that_is_queued() -> None:
    sender = Sender(full=True)
    sender.outbox.put(1, Get("a"))
    sender.outgoing.finish()
    assert not sender.stream.is_finished
    sender.stream.is_full = False
    sender.outgoing.flush()
    assert sender.stream.is_finished


async def test_nothing_leaves_after_a_stop() -> None:
    sender = Sender()
    sender.outbox.put(1, Get("a"))
    sender.outgoing.flush_soon()
    sender.outgoing.stop()
    await asyncio.sleep(0)
    assert sender.stream.writes == []


async def test_what_woken_tasks_say_leaves_in_the_same_tick() -> None:
    sender = Sender()
    loop = asyncio.get_running_loop()
    sender.outgoing.will_flush = True
    loop.call_soon(sender.outbox.put, 1, Get("a"))
    sender.outgoing.end_handling()
    await asyncio.sleep(0)
    assert len(sender.stream.writes) == 1


async def test_what_can_wait_is_done_behind_the_answers() -> None:
    sender = Sender()
    written: list[int] = []
    sender.outgoing.will_flush = True
    for _ in range(2):
        sender.outgoing.call_when_answered(
            lambda: written.append(len(sender.stream.writes))
        )
    sender.outbox.put(2, Get("a"))
    assert written == []
    sender.outgoing.end_handling()
    assert written == [1, 1]
    sender.outgoing.end_handling()
    assert written == [1, 1]


@pytest.mark.parametrize("will_flush", [False, True])
async def test_what_can_wait_waits_for_a_tick_if_nothing_is_handled(
    will_flush: bool,
) -> None:
    sender = Sender()
    if will_flush:
        sender.outgoing.flush_soon()
    done: list[bool] = []
    sender.outgoing.call_when_answered(lambda: done.append(True))
    assert not done
    await asyncio.sleep(0)
    assert done


async def test_what_is_written_first_is_alone_in_its_tick() -> None:
    sender = Sender()
    assert sender.outgoing.may_write
    sender.outgoing.write_first(b"first")
    assert sender.stream.writes == [b"first"]
    assert not sender.outgoing.may_write
    await asyncio.sleep(0)
    assert sender.outgoing.may_write
    sender.outbox.put(1, Get("a"))
    assert not sender.outgoing.may_write
    sender.outgoing.flush()
    sender.stream.is_full = True
    assert not sender.outgoing.may_write


async def test_nothing_is_written_first_behind_the_last_word() -> None:
    sender = Sender()
    sender.outgoing.finish()
    assert not sender.outgoing.may_write
