"""What is said of parts that a peer may read in memory of this side's GPU."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from asynckv.devices.copying import EDGE_NBYTES
from asynckv.links.fd_socket import has_fd_sockets
from asynckv.protocol.frames import Cancel, Get
from asynckv.protocol.handshake import DigestMode
from asynckv.protocol.transfer_frames import Eager, Grant, Sent
from asynckv.protocol.wire import digest_of
from asynckv.tensors.views import bytes_of
from asynckv.testing.blocked import until
from asynckv.testing.lookup_checks.values import MIB, noise
from asynckv.transfers.outgoing import GpuImporter, Outgoing
from asynckv.transfers.source import GpuStaging, HostSource, Source, StagedTensor
from harness.gpu_pairs import GpuPair
from harness.link_pairs import Hearer, LinkPair, linked

pytestmark = pytest.mark.skipif(not has_fd_sockets(), reason="no sockets for handles")

BYTES = bytes(bytes_of(noise(MIB, 1)))
WHOLE = digest_of(BYTES)
EDGES = digest_of(BYTES[:EDGE_NBYTES] + BYTES[-EDGE_NBYTES:])


def importer_of(pair: GpuPair) -> GpuImporter:
    importer = pair.peer.routes.importer(pair.peer._linked())
    assert importer is not None
    return importer


async def staged_in(pair: GpuPair) -> StagedTensor:
    staging = pair.peer.routes.staging(pair.peer._linked(), MIB)
    assert isinstance(staging, GpuStaging)
    found = await staging.staged(noise(MIB, 1))
    assert found is not None
    return found


@pytest.fixture
async def staged(pair: GpuPair) -> AsyncIterator[StagedTensor]:
    found = await staged_in(pair)
    yield found
    found.release()


def refuse(error: Exception) -> None:
    raise AssertionError(error)


class Granted:
    """One transfer, on a link of its own, and what is said of it."""

    def __init__(self, links: LinkPair, importer: GpuImporter | None) -> None:
        self._links = links
        self.stream = links.near.open_stream(Hearer(), Get("k"))
        self.outgoing = Outgoing(
            self.stream, 3, failed=refuse, importer=lambda link: importer
        )

    async def said(self) -> list[object]:
        """Return what the peer has heard when nothing more is to be said."""
        await until(lambda: not self.outgoing.is_busy)
        await asyncio.sleep(0)  # what is eager leaves then
        self.stream.send(Cancel())
        await until(lambda: bool(self._links.service.hearers))
        frames = self._links.service.hearers[0].frames
        await until(lambda: bool(frames) and frames[-1] == (Cancel(), b""))
        return [frame for frame, _ in frames[:-1]]


@asynccontextmanager
async def granted(
    parts: Sequence[tuple[int, Source]],
    importer: GpuImporter | None,
    kind: DigestMode = "edges",
) -> AsyncIterator[Granted]:
    async with linked("mem://", lambda *_: None) as links:
        one = Granted(links, importer)
        for part, source in parts:
            one.outgoing.add(part, source)
        one.outgoing.on_grant(Grant(3, "cuda_ipc", kind))
        yield one
        await one.outgoing.quiesce()


async def said_of(
    parts: Sequence[tuple[int, Source]],
    importer: GpuImporter | None,
    kind: DigestMode = "edges",
) -> list[object]:
    async with granted(parts, importer, kind) as one:
        said = await one.said()
        shared = [frame for frame in said if isinstance(frame, Sent)]
        is_read = any(frame.offset is not None for frame in shared)
        assert one.outgoing.is_read is is_read
        one.outgoing.release()
        one.outgoing.release()
        assert not one.outgoing.is_read
        return said


@pytest.mark.parametrize(
    ("kind", "known", "said", "digest"),
    [
        ("edges", None, "edges", EDGES),
        ("full", None, "full", WHOLE),
        ("off", None, "off", b""),
        ("off", b"", "off", b""),
        ("off", b"known already...", "off", b""),
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
    staged.digest = known or b""
    staged.region.edges = b""
    frames = await said_of([(2, staged)], importer_of(pair), kind)
    assert frames == [Sent(3, 2, digest, said, "cuda_ipc", staged.region.start)]


async def test_the_edges_of_several_parts_are_said_each_with_its_own(
    pair: GpuPair, staged: StagedTensor
) -> None:
    other = await staged_in(pair)
    other.digest = b"known already..."
    staged.region.edges = other.region.edges = b""
    frames = await said_of([(0, other), (1, staged)], importer_of(pair))
    offsets = other.region.start, staged.region.start
    assert frames == [
        Sent(3, 0, b"known already...", "full", "cuda_ipc", offsets[0]),
        Sent(3, 1, EDGES, "edges", "cuda_ipc", offsets[1]),
    ]
    other.release()


async def test_edges_that_were_read_already_are_not_read_again(
    pair: GpuPair, staged: StagedTensor
) -> None:
    staged.digest, staged.region.edges = b"known already...", b"read already"
    (frame,) = await said_of([(0, staged)], importer_of(pair))
    offset = staged.region.start
    assert frame == Sent(3, 0, b"read already", "edges", "cuda_ipc", offset)


async def test_one_part_that_lies_elsewhere_is_all_that_is_said(
    pair: GpuPair, staged: StagedTensor
) -> None:
    parts: list[tuple[int, Source]]
    parts = [(0, staged), (1, HostSource(noise(MIB)))]
    assert await said_of(parts, importer_of(pair)) == [
        Sent(3, 1, b"", "off", "cuda_ipc")
    ]
    assert await said_of(parts, None) == [Sent(3, 0, b"", "off", "cuda_ipc")]
    assert await said_of([], None) == []


async def test_small_parts_are_eager_all_the_same(
    pair: GpuPair, staged: StagedTensor
) -> None:
    small = HostSource(noise(8))
    said = await said_of([(0, small), (1, staged)], importer_of(pair), "off")
    assert {type(frame) for frame in said} == {Eager, Sent}
    assert [type(frame) for frame in await said_of([(0, small)], None)] == [Eager]


async def test_a_part_stays_until_the_reader_is_through(pair: GpuPair) -> None:
    staged = await staged_in(pair)
    async with granted([(0, staged)], importer_of(pair), "off") as one:
        staged.release()
        await one.said()
        one.outgoing.stop()
        assert pair.puts.staged_bytes == MIB
        one.outgoing.release()
        assert not pair.puts.staged_bytes


async def test_a_reader_that_is_gone_holds_nothing(pair: GpuPair) -> None:
    importer, staged = importer_of(pair), await staged_in(pair)
    async with granted([(0, staged)], importer, "off") as one:
        staged.release()
        await one.said()
        importer.importer.on_end()
        assert not pair.puts.staged_bytes
        one.outgoing.release()


async def test_who_is_gone_reads_nothing_more(pair: GpuPair) -> None:
    importer, link = importer_of(pair), pair.peer._linked()
    importer.importer.close()
    await until(lambda: not importer.importer.is_connected)
    assert pair.peer.routes.importer(link) is None
