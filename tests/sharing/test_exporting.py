from __future__ import annotations

import os
import threading

import pytest

from asynckv.devices.arena import DevicePages
from asynckv.devices.quiet import quiet_gpu
from asynckv.protocol.values import Place
from asynckv.sharing.exporter import ExportedMemory, edges_in
from harness.fake_devices import FakeDevice

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
