from __future__ import annotations

import asyncio

import pytest

from asynckv.tensors.cuda import DeviceMemory
from asynckv.testing.blocked import until
from asynckv.transports.nccl.operations import Operation, SendJob, call_on
from asynckv.transports.nccl.parts import AnyMemory, DevicePart


def part_of(memory: AnyMemory) -> DevicePart:
    return DevicePart(1, 0, memory, lambda digest, error: None, b"")


def test_bytes_of_a_gpu_move_where_they_lie() -> None:
    operation = Operation(part_of(DeviceMemory(4096, 100, 0)), 10, 20, None)
    assert operation.address() == 4106


def test_bytes_of_the_host_need_a_slot() -> None:
    with pytest.raises(ValueError, match="need a slot"):
        Operation(part_of(memoryview(b"abc")), 0, 3, None).address()


def test_a_closed_loop_is_told_nothing() -> None:
    loop = asyncio.new_event_loop()
    loop.close()
    call_on(loop, lambda: None)


@pytest.mark.parametrize("way", ["settle", "abandon"])
async def test_the_loop_hears_how_it_ended(way: str) -> None:
    heard: list[tuple[Operation, Exception | None]] = []
    operation = Operation(part_of(DeviceMemory(4096, 100, 0)), 0, 20, None)
    loop = asyncio.get_running_loop()
    job = SendJob(operation, loop, lambda *told: heard.append(told), 1.0)
    getattr(job, way)(error := ValueError())
    await until(lambda: bool(heard))
    assert heard == [(operation, error)]
