from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import NamedTuple

import pytest

from asynckv.links.link import Link
from asynckv.protocol.frames import (
    Get,
)
from asynckv.protocol.transfer_frames import Eager
from asynckv.protocol.wire import digest_of
from asynckv.testing.blocked import until
from asynckv.transfers.manifest import EAGER_NBYTES, is_eager
from asynckv.transfers.outgoing import EagerParts
from harness.link_pairs import Hearer, ScriptedService, linked

KIB = 1024


class Ends(NamedTuple):
    """A link whose near side has opened a stream, and what it sends on that."""

    near: Link
    riding: EagerParts
    service: ScriptedService

    def riders(self) -> list[tuple[Eager, bytes]]:
        (hearer,) = self.service.hearers
        return [(frame, b) for frame, b in hearer.frames if isinstance(frame, Eager)]

    async def heard(self, count: int) -> list[tuple[Eager, bytes]]:
        await until(lambda: sum(len(f.parts) for f, _ in self.riders()) >= count)
        return self.riders()


@pytest.fixture(params=["full", "off"])
async def ends(request: pytest.FixtureRequest) -> AsyncIterator[Ends]:
    digest = {"digest": request.param}
    async with linked("tcp://127.0.0.1:0", lambda *_: None, near=digest) as pair:
        stream_id = pair.near.open_stream(Hearer(), Get("k"))
        await until(lambda: bool(pair.service.asked))
        yield Ends(pair.near, EagerParts(pair.near, stream_id, 5), pair.service)


def part(index: int, nbytes: int) -> memoryview:
    return memoryview(bytes([index % 251]) * nbytes)


def add(ends: Ends, index: int, nbytes: int, digest: bytes | None = None) -> None:
    ends.riding.add(index, nbytes, partial(part, index, nbytes), digest)


def test_what_rides_is_a_matter_of_size_alone() -> None:
    assert is_eager(0) and is_eager(EAGER_NBYTES) and not is_eager(EAGER_NBYTES + 1)


async def test_as_many_ride_together_as_fit_in_a_frame_s_body(ends: Ends) -> None:
    sizes = [4 * KIB] * 16 + [16 * KIB] * 3 + [15 * KIB, 2 * KIB, 0]
    for index, nbytes in enumerate(sizes):
        add(ends, index, nbytes)
    heard = await ends.heard(len(sizes))
    assert [len(frame.parts) for frame, _ in heard] == [16, 4, 2]
    assert [p for frame, _ in heard for p in frame.parts] == [*range(22)]
    assert b"".join(body for _, body in heard) == b"".join(
        part(index, nbytes) for index, nbytes in enumerate(sizes)
    )
    assert {frame.transfer for frame, _ in heard} == {5}


async def test_each_has_its_digest_unless_the_link_carries_none(ends: Ends) -> None:
    add(ends, 3, 100)
    add(ends, 4, 100, b"known already")
    ((frame, _),) = await ends.heard(2)
    digests = (digest_of(part(3, 100)), b"known already")
    assert frame.digests == (digests if ends.near.digest == "full" else ())


async def test_those_without_bytes_are_too_many_for_a_frame_as_well(ends: Ends) -> None:
    for index in range(1025):
        add(ends, index, 0)
    heard = await ends.heard(1025)
    assert [len(frame.parts) for frame, _ in heard] == [1024, 1]


async def test_memory_is_read_a_little_in_each_tick_and_never_after_the_stop(
    ends: Ends,
) -> None:
    read = list[int]()

    def note(index: int) -> memoryview:
        read.append(index)
        return part(index, EAGER_NBYTES)

    for index in range(1000):
        ends.riding.add(index, EAGER_NBYTES, partial(note, index))
    assert not read
    await asyncio.sleep(0)
    assert 0 < len(read) <= 20
    ends.riding.stop()
    count = len(read)
    await ends.heard(count)
    add(ends, 1000, 10)
    await ends.heard(count + 1)
    assert len(read) == count


async def test_a_slow_reader_makes_nobody_hold_more_than_a_little(ends: Ends) -> None:
    most = 0
    for index in range(1000):
        add(ends, index, EAGER_NBYTES)
    while sum(len(frame.parts) for frame, _ in ends.riders()) < 1000:
        most = max(most, ends.near.outgoing_bytes)
        await asyncio.sleep(0)
    assert 0 < most < 2 * 2**20


async def test_while_much_is_unwritten_they_wait(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = list[Callable[[], None]]()
    with monkeypatch.context() as patch:
        patch.setattr(type(ends.near), "outgoing_bytes", 5 * 2**20)
        patch.setattr(ends.near, "call_when_drained", waiting.append)
        for index in range(100):
            add(ends, index, EAGER_NBYTES)
        await until(lambda: bool(waiting))
    (go_on,) = waiting
    heard = sum(len(frame.parts) for frame, _ in ends.riders())
    assert heard < 100
    go_on()
    assert sum(len(frame.parts) for frame, _ in await ends.heard(100)) == 100
