from __future__ import annotations

import asyncio

import pytest

from asynckv.tensors.cuda import DeviceMemory
from asynckv.testing.blocked import until
from asynckv.transports.nccl.parts import DevicePart, Operation, OperationJob, call_on


def part_of(memory: DeviceMemory) -> DevicePart:
    return DevicePart(1, 0, memory, lambda digest, error: None)


def test_bytes_of_a_gpu_move_where_they_lie() -> None:
    part = part_of(DeviceMemory(4096, 100, 0))
    for offset, nbytes in ((0, 10), (10, 20)):
        operation = Operation(part, nbytes)
        assert operation.offset == offset
        assert operation.memory == DeviceMemory(4096 + offset, nbytes, 0)


def test_it_keeps_its_memory_when_nobody_wants_the_part_any_more() -> None:
    owner = object()
    part = part_of(DeviceMemory(4096, 100, 0, owner))
    operation = Operation(part, 20)
    part.stop()
    assert operation.memory.owner is owner


def test_a_closed_loop_is_told_nothing() -> None:
    loop = asyncio.new_event_loop()
    loop.close()
    call_on(loop, lambda: None)


@pytest.mark.parametrize("way", ["settle", "abandon"])
async def test_the_loop_hears_how_it_ended(way: str) -> None:
    heard: list[tuple[Operation, Exception | None]] = []
    operation = Operation(part_of(DeviceMemory(4096, 100, 0)), 20)
    loop = asyncio.get_running_loop()
    job = OperationJob(operation, loop, lambda *told: heard.append(told), 1.0)
    getattr(job, way)(error := ValueError())
    await until(lambda: bool(heard))
    assert heard == [(operation, error)]
