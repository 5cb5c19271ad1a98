"""What is said of parts that a buffer's side may read where they are staged."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from asynckv.links.fd_socket import has_fd_sockets
from asynckv.protocol.digests import digest_of
from asynckv.protocol.handshake import DigestMode
from asynckv.protocol.transfer_frames import SentShared
from asynckv.tensors.device_copying import EDGE_NBYTES
from asynckv.tensors.views import bytes_of
from asynckv.testing.blocked import until
from asynckv.testing.lookup_checks.values import MIB, noise
from asynckv.transfers.outgoing import ShownParts, ShownTo
from asynckv.transfers.staging import GpuStaging, Source, StagedTensor
from harness.gpu_pairs import GpuPair

pytestmark = pytest.mark.skipif(not has_fd_sockets(), reason="no sockets for handles")

BYTES = bytes(bytes_of(noise(MIB, 1)))
WHOLE = digest_of(BYTES)
EDGES = digest_of(BYTES[:EDGE_NBYTES] + BYTES[-EDGE_NBYTES:])


def shown_to(pair: GpuPair) -> ShownTo:
    shown = pair.peer.ways.shown(pair.peer._linked())
    assert shown is not None
    return shown


@pytest.fixture
async def staged(pair: GpuPair) -> AsyncIterator[StagedTensor]:
    staging = pair.peer.ways.staging(MIB)
    assert isinstance(staging, GpuStaging)
    found = await staging.staged(noise(MIB, 1))
    assert found is not None
    yield found
    found.release()


async def said_of(
    parts: list[tuple[int, Source, bytes | None]],
    shown: ShownTo | None,
    kind: DigestMode = "edges",
) -> list[SentShared]:
    said = list[SentShared]()
    one = ShownParts(3, parts, shown, said.append)
    await one.show(kind)
    assert one.are_read is any(frame.offset is not None for frame in said)
    one.let_go()
    one.let_go()
    assert not one.are_read
    return said


@pytest.mark.parametrize(
    ("kind", "known", "said", "digest"),
    [
        ("edges", None, "edges", EDGES),
        ("full", None, "full", WHOLE),
        ("off", None, "off", b""),
        ("off", b"", "off", b""),
        ("edges", b"known already...", "full", b"known already..."),
    ],
)
async def test_a_part_is_told_of_with_its_place_and_digest(
    pair: GpuPair,
    staged: StagedTensor,
    kind: DigestMode,
    known: bytes | None,
    said: DigestMode,
    digest: bytes,
) -> None:
    frames = await said_of([(2, staged, known)], shown_to(pair), kind)
    assert frames == [SentShared(3, 2, said, staged.region.start, digest)]


async def test_one_part_that_lies_elsewhere_is_all_that_is_told(
    pair: GpuPair, staged: StagedTensor
) -> None:
    parts: list[tuple[int, Source, bytes | None]]
    parts = [(0, staged, None), (1, noise(MIB), None)]
    assert await said_of(parts, shown_to(pair)) == [SentShared(3, 1, "off")]
    assert await said_of(parts, None) == [SentShared(3, 0, "off")]
    assert await said_of([], None) == []


async def test_what_was_let_go_before_it_began_is_not_read(
    pair: GpuPair, staged: StagedTensor
) -> None:
    said = list[SentShared]()
    one = ShownParts(3, [(0, staged, None)], shown_to(pair), said.append)
    one.let_go()
    await one.show("edges")
    assert said == [SentShared(3, 0, "off")] and not one.are_read


async def test_a_part_stays_until_the_reader_is_through(pair: GpuPair) -> None:
    staging = pair.peer.ways.staging(MIB)
    assert staging is not None
    staged = await staging.staged(noise(MIB, 1))
    assert staged is not None
    one = ShownParts(3, [(0, staged, None)], shown_to(pair), lambda frame: None)
    await one.show("off")
    staged.release()
    assert pair.puts.staged_bytes == MIB
    one.let_go()
    assert not pair.puts.staged_bytes


async def test_a_reader_that_is_gone_holds_nothing(pair: GpuPair) -> None:
    shown, staging = shown_to(pair), pair.peer.ways.staging(MIB)
    assert staging is not None
    staged = await staging.staged(noise(MIB, 1))
    assert staged is not None
    one = ShownParts(3, [(0, staged, None)], shown, lambda frame: None)
    await one.show("off")
    staged.release()
    shown.holder.on_end()
    assert not pair.puts.staged_bytes
    one.let_go()
    await asyncio.sleep(0)


async def test_nothing_is_kept_for_a_reader_that_is_gone(pair: GpuPair) -> None:
    staging = pair.peer.ways.staging(MIB)
    assert staging is not None
    staged = await staging.staged(noise(MIB, 1))
    assert staged is not None
    said, shown = list[SentShared](), shown_to(pair)
    one = ShownParts(3, [(0, staged, None)], shown, said.append)
    shown.holder.close()
    await until(lambda: not shown.holder.is_connected)
    await one.show("edges")
    assert said == [SentShared(3, 0, "off")] and not one.are_read
    staged.release()
    assert not pair.puts.staged_bytes
