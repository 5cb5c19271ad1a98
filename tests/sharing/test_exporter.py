"""Memory of a GPU that is shown to a peer, until it has closed it.

What buffers show of theirs is tried in ``tests/buffers/test_sharing.py``.
"""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncIterator

import pytest

from asynckv.devices.arena import DevicePages, DeviceRegion
from asynckv.devices.growth import Growth
from asynckv.devices.quiet import quiet_gpu
from asynckv.errors import ConfigError
from asynckv.links.fd_socket import fetch_file, has_fd_sockets
from asynckv.protocol.values import Place
from asynckv.sharing.exporter import (
    LEAST_NBYTES,
    MAX_PINS,
    ExportedMemory,
    Exporter,
    Importer,
    edges_in,
)
from asynckv.tensors.paged_arena import PagedArena
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
    region = growth.arena.take_spare(4096)
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
    quiet, pages = quiet_gpu(gpu.process.cuda, gpu.index), opened(gpu)
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


def test_edges_tell_generations_and_bytes_apart() -> None:
    found = edges_in([FIRST, SECOND], [b"a" * 16, b"b" * 16])
    assert found != edges_in([SECOND, FIRST], [b"a" * 16, b"b" * 16])
    assert found != edges_in([FIRST, SECOND], [b"a" * 16, b"c" * 16])
    assert found == edges_in([FIRST, None, SECOND], [b"a" * 16, b"", b"b" * 16])


def test_there_are_no_edges_where_one_was_never_read_back() -> None:
    assert edges_in([FIRST, SECOND], [b"a" * 16, b""]) == b""
