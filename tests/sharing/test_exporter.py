"""Memory that is shown to a peer until it has closed it, and a file of the peer's.

What buffers show of theirs is tried in ``tests/buffers/test_sharing.py``.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import gc
import os
import socket
import sys
import threading
import tracemalloc
from collections.abc import AsyncIterator, Iterator

import numpy
import pytest

from asynckv.devices.access import gpu_access
from asynckv.devices.arena import DevicePages, DeviceRegion
from asynckv.devices.growth import Growth
from asynckv.errors import ConfigError, PeerLost, RemoteProtocolError
from asynckv.links.fd_socket import fetch_file, has_fd_sockets
from asynckv.protocol.transfer_frames import Exposed
from asynckv.protocol.values import Place
from asynckv.sharing import mappings as peer_files
from asynckv.sharing.exporter import (
    LEAST_NBYTES,
    MAX_PINS,
    ExportedMemory,
    Exporter,
    Importer,
    edges_in,
)
from asynckv.sharing.mappings import PeerFile, edges_at, import_file
from asynckv.tensors.paged_arena import PagedArena
from asynckv.tensors.shared_file import SharedFile
from asynckv.tensors.slabs import PAGE_NBYTES, Slabs, has_slabs
from asynckv.testing.blocked import until
from harness.fake_devices import FakeDevice
from harness.link_pairs import LinkPair, linked

needs_sockets = pytest.mark.skipif(
    not has_fd_sockets(), reason="no sockets for handles"
)

MIB = 2**20


@pytest.fixture
async def growth(gpu: FakeDevice) -> AsyncIterator[Growth]:
    growth = Growth(MIB, device=gpu.device)
    await growth.open()
    yield growth
    await growth.aclose()


@pytest.fixture
async def pair() -> AsyncIterator[LinkPair]:
    async with linked() as pair:
        yield pair


def region_of(growth: Growth) -> DeviceRegion:
    assert isinstance(growth.arena, PagedArena)
    (region,) = growth.arena.take_spares([4096]) or []
    assert isinstance(region, DeviceRegion)
    return region


@needs_sockets
async def test_whatever_gpu_the_peer_has_is_told_which_one_this_is(
    gpu: FakeDevice, growth: Growth, pair: LinkPair
) -> None:
    shown = Exporter(growth.arena, lambda: None)
    with pytest.raises(ConfigError, match="has no memory"):
        shown.export(pair.far, "edges")
    exposed = shown.export(pair.far, "off", "0" * 32).exposed
    assert exposed.digest == "off" and exposed.gpu_uuid == gpu.process.cuda.uuid(0)
    shown.close()


@needs_sockets
async def test_a_peer_of_another_host_is_shown_no_gpu(
    gpu: FakeDevice, growth: Growth, pair: LinkPair
) -> None:
    shown = Exporter(growth.arena)
    pair.far.peer_host = "192.0.2.1"
    with pytest.raises(ConfigError, match="no memory of a GPU"):
        shown.export(pair.far, "edges", gpu.process.cuda.uuid(0))
    shown.close()


@needs_sockets
async def test_of_too_little_memory_nothing_is_left_open(
    gpu: FakeDevice, growth: Growth, pair: LinkPair
) -> None:
    shown = Exporter(growth.arena, drop=growth.drop_soon)
    uuid = gpu.process.cuda.uuid(0)
    with pytest.raises(ConfigError, match="too little"):
        shown.export(pair.far, "edges", uuid, least_nbytes=LEAST_NBYTES)
    assert shown._door is None and shown._file is None
    shown.export(pair.far, "edges", uuid)
    shown.close()


@needs_sockets
async def test_a_region_stays_until_its_pin_ends_or_the_peer_is_gone(
    gpu: FakeDevice, growth: Growth, pair: LinkPair
) -> None:
    told: list[Importer] = []
    shown = Exporter(growth.arena, lambda: told.append(importer), growth.drop_soon)
    importer = shown.export(pair.far, "edges", gpu.process.cuda.uuid(0))
    exposed = importer.exposed
    assert not importer.is_connected
    sock, fd = await fetch_file(exposed.address, exposed.ticket)
    nonce = growth.device_pages and growth.device_pages.allocation.nonce
    assert (
        importer.verify(nonce or b"") and importer.is_connected and importer.is_usable
    )
    region = region_of(growth)
    numbers = [importer.pin([region]).number for _ in range(MAX_PINS)]
    assert importer.is_connected and not importer.is_usable
    region.release()
    importer.unpin(numbers[0])
    assert growth.arena.pinned_bytes and not told
    sock.close()
    await until(lambda: bool(told))
    assert not (growth.arena.pinned_bytes or importer.is_connected)
    shown.close()
    os.close(fd)


@needs_sockets
async def test_memory_is_used_by_who_has_read_in_it_what_is_there_alone(
    gpu: FakeDevice, growth: Growth, pair: LinkPair
) -> None:
    shown = Exporter(growth.arena, lambda: None, growth.drop_soon)
    importer = shown.export(pair.far, "edges", gpu.process.cuda.uuid(0))
    exposed = importer.exposed
    sock, fd = await fetch_file(exposed.address, exposed.ticket)
    assert not importer.is_connected
    assert not importer.verify(bytes(16)) and not importer.is_usable
    sock.close()
    shown.close()
    os.close(fd)


FIRST, SECOND = Place((), 0, 1), Place((), 4096, 2)


def opened(gpu: FakeDevice) -> DevicePages:
    pages = DevicePages(2**20, gpu.device, lambda: None)
    pages.add_slab(pages.make_slab())
    return pages


def test_what_is_shown_is_not_freed_before_it_is_dropped(gpu: FakeDevice) -> None:
    pages = opened(gpu)
    shown, idle = ExportedMemory(pages.allocation), pages.unmap()
    assert idle is not None
    idle.drop()
    shown.close()
    assert gpu.process.owned
    shown.drop()
    assert not gpu.process.owned
    shown.drop()  # again is nothing


def test_what_is_shown_is_not_freed_while_an_operation_waits_for_a_peer(
    gpu: FakeDevice,
) -> None:
    quiet, pages = gpu_access(gpu.process.cuda, gpu.index), opened(gpu)
    shown, idle = ExportedMemory(pages.allocation), pages.unmap()
    assert idle is not None
    idle.drop()
    quiet.begin_operation()
    thread = threading.Thread(target=shown.drop)
    thread.start()
    thread.join(0.02)
    assert gpu.process.owned
    quiet.end_operation()
    thread.join(30)
    assert not gpu.process.owned


def test_a_descriptor_is_open_until_it_is_closed(gpu: FakeDevice) -> None:
    shown = ExportedMemory(opened(gpu).allocation)
    fd = shown.fileno()
    os.fstat(fd)
    shown.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    shown.close()


def test_without_a_descriptor_nothing_is_shown_and_nothing_else_is_wrong(
    gpu: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    pages, told = opened(gpu), list[object]()
    monkeypatch.setattr(sys, "unraisablehook", told.append)
    with monkeypatch.context() as patch, pytest.raises(OSError, match="too many"):
        patch.setattr(os, "open", refuse)
        ExportedMemory(pages.allocation)
    gc.collect()
    assert not told


def test_edges_tell_generations_and_bytes_apart() -> None:
    found = edges_in([FIRST, SECOND], [b"a" * 16, b"b" * 16])
    assert found != edges_in([SECOND, FIRST], [b"a" * 16, b"b" * 16])
    assert found != edges_in([FIRST, SECOND], [b"a" * 16, b"c" * 16])
    assert found == edges_in([FIRST, None, SECOND], [b"a" * 16, b"", b"b" * 16])


def test_there_are_no_edges_where_one_was_never_read_back() -> None:
    assert edges_in([FIRST, SECOND], [b"a" * 16, b""]) == b""


PAGES = 64
NBYTES = 4 * PAGE_NBYTES
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
PLACE = Place(((8 * PAGE_NBYTES, NBYTES),), 0, 5)


@pytest.fixture
def shown() -> Iterator[SharedFile]:
    slabs = Slabs(PAGES * PAGE_NBYTES)
    slabs.grow()
    shown = SharedFile(slabs)
    slabs.memory[8 * PAGE_NBYTES : 12 * PAGE_NBYTES] = 7
    yield shown
    shown.close()


def opened_file(shown: SharedFile) -> tuple[PeerFile, socket.socket]:
    ours, theirs = socket.socketpair()
    return PeerFile(ours, os.dup(shown.fileno()), shown.nbytes), theirs


async def closed(file: PeerFile, peer: socket.socket) -> None:
    """Close it; the peer hears of that."""
    file.close()
    await file.wait_closed()
    peer.setblocking(False)
    assert peer.recv(1) == b""
    peer.close()


@pytest.mark.skipif(not has_slabs(), reason="no memory files here")
async def test_a_file_that_is_not_as_large_as_was_said_is_not_mapped(
    shown: SharedFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = socket.socketpair()

    async def fetch(*_: object) -> tuple[socket.socket, int]:
        return ours, os.dup(shown.fileno())

    monkeypatch.setattr(peer_files, "fetch_file", fetch)
    with pytest.raises(ValueError):
        await import_file(Exposed("", b"", shown.nbytes + PAGE_NBYTES))
    assert theirs.recv(1) == b""  # it hears that nobody has it
    theirs.close()


@pytest.mark.skipif(not has_slabs(), reason="no memory files here")
async def test_a_place_is_forgotten_among_too_many(
    shown: SharedFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_files, "_MAX_REMEMBERED", 1)
    file, peer = opened_file(shown)
    for first in (8, 16):
        place = Place(((first * PAGE_NBYTES, NBYTES),), 0, 5)
        file.claim(place, NBYTES)
        file.release(place)
    file.claim(PLACE, NBYTES)
    await closed(file, peer)


@pytest.mark.skipif(not has_slabs(), reason="no memory files here")
async def test_it_shows_what_the_peer_has(shown: SharedFile) -> None:
    file, peer = opened_file(shown)
    assert file.nonce == shown.nonce
    file.claim(PLACE, NBYTES)
    with file.reading(PLACE, NBYTES) as memory:
        assert memory.nbytes == NBYTES and (memory == 7).all()
        assert not memory.flags.writeable
        expected = numpy.full(NBYTES, 7, numpy.uint8)
        assert edges_at(memory, 5) == edges_at(expected, 5) != edges_at(expected, 6)
        del memory
    await closed(file, peer)


@pytest.mark.skipif(not has_slabs(), reason="no memory files here")
async def test_pieces_that_lie_apart_are_shown_as_one(shown: SharedFile) -> None:
    file, peer = opened_file(shown)
    page = PAGE_NBYTES
    place = Place(((11 * page, page), (20 * page, page)), 64, 1)
    file.claim(place, 2 * page - 64)
    with file.reading(place, 2 * page - 64) as memory:
        assert (memory[: page - 64] == 7).all() and not memory[page - 64 :].any()
        del memory
    await closed(file, peer)


@pytest.mark.skipif(not has_slabs(), reason="no memory files here")
@pytest.mark.parametrize(
    "place",
    [
        Place(((PAGES * PAGE_NBYTES, NBYTES),), 0, 9),
        Place(((1, NBYTES),), 0, 9),
        Place(((8 * PAGE_NBYTES, NBYTES),), 64, 9),
        Place(((8 * PAGE_NBYTES, NBYTES),), 1, 9),
        Place((), 0, 9),
        Place(((9 * PAGE_NBYTES, NBYTES),), 0, 9),
        Place(((0, PAGE_NBYTES), (8 * PAGE_NBYTES, NBYTES)), 0, 9),
        Place(PLACE.runs, 0, 5),
        Place(PLACE.runs, 0, 4),
    ],
)
async def test_a_place_that_makes_no_sense_is_refused(
    shown: SharedFile, place: Place
) -> None:
    file, peer = opened_file(shown)
    file.claim(PLACE, NBYTES)
    with pytest.raises(RemoteProtocolError):
        file.claim(place, NBYTES)
    await closed(file, peer)


@pytest.mark.skipif(not has_slabs(), reason="no memory files here")
async def test_what_is_over_may_be_somebody_elses(shown: SharedFile) -> None:
    file, peer = opened_file(shown)
    file.claim(PLACE, NBYTES)
    file.release(PLACE)
    with pytest.raises(RemoteProtocolError, match="before"):
        file.claim(PLACE, NBYTES)
    file.claim(Place(PLACE.runs, 0, 6), NBYTES)
    await closed(file, peer)


@pytest.mark.skipif(not has_slabs(), reason="no memory files here")
async def test_what_a_claim_costs_does_not_grow_with_what_is_claimed() -> None:
    nbytes = 2**40
    written = os.memfd_create("huge", os.MFD_ALLOW_SEALING)
    os.ftruncate(written, nbytes)
    fcntl.fcntl(written, fcntl.F_ADD_SEALS, SEALS)
    ours, theirs = socket.socketpair()
    fd = os.open(f"/proc/self/fd/{written}", os.O_RDONLY)
    os.close(written)
    tracemalloc.start()
    file = PeerFile(ours, fd, nbytes)
    file.claim(Place(((0, nbytes - PAGE_NBYTES),), 0, 1), nbytes - PAGE_NBYTES)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()
    await closed(file, theirs)


@pytest.mark.skipif(not has_slabs(), reason="no memory files here")
async def test_what_lies_between_two_others_is_no_matter(shown: SharedFile) -> None:
    file, peer = opened_file(shown)
    page = PAGE_NBYTES
    for generation, first in enumerate((16, 8, 12)):
        file.claim(Place(((first * page, NBYTES),), 0, generation), NBYTES)
    middle = Place(((12 * page, NBYTES),), 0, 2)
    for _ in range(2):
        file.release(middle)
    for first, count in ((7, 2), (11, 2), (15, 2), (4, 32), (19, 1)):
        with pytest.raises(RemoteProtocolError, match="another"):
            file.claim(Place(((first * page, count * page),), 0, 9), page)
    file.claim(Place(((12 * page, NBYTES),), 0, 9), NBYTES)
    await closed(file, peer)


@pytest.mark.skipif(not has_slabs(), reason="no memory files here")
async def test_it_is_not_closed_while_it_is_read(shown: SharedFile) -> None:
    file, peer = opened_file(shown)
    peer.setblocking(False)
    with file.reading(PLACE, NBYTES) as memory:
        file.close()
        file.close()
        await asyncio.sleep(0)
        assert not file.is_open and (memory == 7).all()
        with pytest.raises(BlockingIOError):
            peer.recv(1)
        del memory
    await closed(file, peer)
    with pytest.raises(PeerLost), file.reading(PLACE, NBYTES):
        pass
    with pytest.raises(PeerLost):
        assert file.nonce


@pytest.mark.skipif(not has_slabs(), reason="no memory files here")
async def test_a_forked_child_does_not_close_what_its_parent_reads(
    shown: SharedFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, peer = opened_file(shown)
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: -1)
        file.close()
    assert file.is_open and file.nonce == shown.nonce
    await closed(file, peer)


@pytest.mark.skipif(not has_slabs(), reason="no memory files here")
async def test_what_is_no_file_of_a_peers_is_refused(shown: SharedFile) -> None:
    ours, theirs = socket.socketpair()
    fd = os.open(os.devnull, os.O_RDONLY)
    with ours, theirs, pytest.raises(ValueError, match="no memory file"):
        PeerFile(ours, fd, shown.nbytes)
    os.close(fd)
