from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asynckv.devices.cuda import DeviceMemory
from asynckv.testing.blocked import until
from asynckv.transports.nccl.directions import DevicePart, Operation
from asynckv.transports.parts import call_on

Heard = list[tuple[Operation, Exception | None]]


def part_of(memory: DeviceMemory) -> DevicePart:
    return DevicePart(1, 0, memory, lambda digest, error: None)


def operation_of(
    part: DevicePart, nbytes: int, heard: Heard | None = None
) -> Operation:
    def ended(*told: Any) -> None:
        if heard is not None:
            heard.append(told)

    return Operation(part, nbytes, asyncio.get_running_loop(), ended)


async def test_bytes_of_a_gpu_move_where_they_lie() -> None:
    part = part_of(DeviceMemory(4096, 100, 0))
    for offset, nbytes in ((0, 10), (10, 20)):
        operation = operation_of(part, nbytes)
        assert operation.offset == offset
        assert operation.memory == DeviceMemory(4096 + offset, nbytes, 0)


async def test_it_keeps_its_memory_when_nobody_wants_the_part_any_more() -> None:
    owner = object()
    part = part_of(DeviceMemory(4096, 100, 0, owner))
    operation = operation_of(part, 20)
    part.release()
    assert operation.memory.owner is owner


def test_a_closed_loop_is_told_nothing() -> None:
    loop = asyncio.new_event_loop()
    loop.close()
    call_on(loop, lambda: None)


@pytest.mark.parametrize("way", ["settle", "abandon"])
async def test_the_loop_hears_how_it_ended(way: str) -> None:
    heard = Heard()
    operation = operation_of(part_of(DeviceMemory(4096, 100, 0)), 20, heard)
    getattr(operation, way)(error := ValueError())
    await until(lambda: bool(heard))
    assert heard == [(operation, error)]
