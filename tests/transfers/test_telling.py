from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from asynckv.protocol.frames import Select
from asynckv.protocol.handshake import DigestMode
from asynckv.protocol.transfer_frames import SentDevices
from asynckv.tensors.arena import HeapArena, Region
from asynckv.testing.blocked import until
from asynckv.transfers.outgoing import Telling
from asynckv.types import TensorSpec
from harness.link_pairs import Hearer, LinkPair, linked

SPEC = TensorSpec((8,), "uint8")


class Digesting:
    """Digests what came without one, when it is told to."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.tasks: list[asyncio.Task[None]] = []

    def __call__(
        self, region: Region, spec: TensorSpec, told: Callable[[bytes], None]
    ) -> asyncio.Task[None]:
        async def digest() -> None:
            await self.go.wait()
            told(b"made")

        self.tasks.append(asyncio.create_task(digest()))
        return self.tasks[-1]


@pytest.fixture
async def links() -> AsyncIterator[LinkPair]:
    async with linked("mem://", lambda *_: None) as links:
        yield links


def telling(links: LinkPair, kind: DigestMode, digesting: Digesting) -> Telling:
    stream = links.near.open_stream(Hearer(), Select(has_key=False))
    return Telling(stream, 2, kind, digesting)


async def heard(links: LinkPair) -> SentDevices:
    await until(lambda: bool(links.service.hearers))
    frame, _ = await links.service.hearers[0].next()
    assert isinstance(frame, SentDevices)
    return frame


def region() -> Region:
    return (HeapArena(8).allocate([8]) or [])[0]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("off", SentDevices(2, 1, "off")),
        ("edges", SentDevices(2, 1, "full", b"known")),  # of the host: no edges
        ("full", SentDevices(2, 1, "full", b"known")),
    ],
)
async def test_a_part_is_told_with_what_both_want(
    links: LinkPair, kind: DigestMode, said: SentDevices
) -> None:
    telling(links, kind, Digesting()).tell(1, region(), SPEC, b"known")
    assert await heard(links) == said


async def test_what_has_no_digest_is_told_when_it_has_one(links: LinkPair) -> None:
    digesting = Digesting()
    telling(links, "full", digesting).tell(0, region(), SPEC, None)
    digesting.go.set()
    assert await heard(links) == SentDevices(2, 0, "full", b"made")


async def test_of_what_was_stopped_nothing_is_told(links: LinkPair) -> None:
    digesting = Digesting()
    one = telling(links, "full", digesting)
    one.tell(0, region(), SPEC, b"")
    one.stop()
    await asyncio.wait(digesting.tasks)
    assert digesting.tasks[0].cancelled()
