from __future__ import annotations

import subprocess
import sys

import pytest

from asynckv.devices.cuda import DeviceMemory, PinnedMemory


def test_a_part_of_device_memory_keeps_its_owner_and_its_gpu() -> None:
    memory = DeviceMemory(4096, 100, 1, owner=(owner := object()))
    part = memory.part(10, 30)
    assert (part.address, part.nbytes, part.device) == (4106, 20, 1)
    assert part.owner is owner


@pytest.mark.parametrize("span", [(-1, 5), (5, 4), (0, 101)])
def test_a_part_lies_within_its_memory(span: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="of 100 bytes"):
        DeviceMemory(4096, 100, 0).part(*span)


def test_pinned_memory_is_as_long_as_its_view() -> None:
    assert PinnedMemory(4096, memoryview(bytearray(7))).nbytes == 7


def test_the_seam_and_its_adapters_import_no_cupy() -> None:
    modules = "asynckv.devices.cupy, asynckv.transports.nccl.api"
    code = f"import sys, {modules}; assert 'cupy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
