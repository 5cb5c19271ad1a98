from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from asynckv.devices.cuda import DeviceMemory
from asynckv.errors import LocalProtocolError, RemoteProtocolError
from asynckv.protocol.transfer_frames import DeviceGrant, DeviceOffer, DeviceSkip
from asynckv.testing.blocked import until
from asynckv.transports.nccl.connecting import DeviceDescription
from asynckv.transports.nccl.directions import (
    Arrivals,
    DevicePart,
    NcclSettings,
    Operation,
)
from asynckv.transports.parts import call_on
from harness.fake_gpus import FakeGpus
from harness.nccl_pairs import NcclPair


def test_more_bytes_may_take_longer() -> None:
    settings = NcclSettings(patience_s=2.0, least_bytes_per_s=100.0)
    assert settings.timeout_s(0) == 2.0
    assert settings.timeout_s(300) == 5.0


def test_operations_take_its_bytes_in_order() -> None:
    part = DevicePart(1, 0, DeviceMemory(64, 8, 0), lambda digest, error: None)
    first, second = part.begin(5), part.begin(3)
    assert (first.address, first.nbytes) == (64, 5)
    assert (second.address, second.nbytes) == (69, 3)
    assert not part.left_bytes and part.operations == 2


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


def part(transfer: int, number: int = 0, nbytes: int = 10) -> DevicePart:
    memory = DeviceMemory(4096, nbytes, 0)
    return DevicePart(transfer, number, memory, lambda digest, error: None)


def offer(transfer: int, offset: int = 0, nbytes: int = 5) -> DeviceOffer:
    return DeviceOffer(0, transfer, 0, offset, nbytes)


def test_what_is_offered_of_a_part_is_found() -> None:
    arrivals = Arrivals()
    arrivals.add(one := part(3))
    assert arrivals.find(offer(3)) is one
    one.moved_bytes = 4
    assert arrivals.landed_bytes(3) == 4


def test_nobody_wants_what_was_stopped() -> None:
    arrivals = Arrivals()
    arrivals.add(part(3))
    arrivals.stop(3)
    arrivals.check(offer(3))
    assert arrivals.find(offer(3)) is None


def test_what_was_never_announced_is_a_lie() -> None:
    arrivals = Arrivals()
    arrivals.announce(4)
    arrivals.check(offer(4))
    with pytest.raises(RemoteProtocolError, match="never announced"):
        arrivals.check(offer(5))


@pytest.mark.parametrize("wrong", [offer(3, 1), offer(3, 0, 11)])
def test_bytes_come_in_order_and_no_more_than_there_is_room_for(
    wrong: DeviceOffer,
) -> None:
    arrivals = Arrivals()
    arrivals.add(part(3))
    with pytest.raises(RemoteProtocolError, match="expected 10 at 0"):
        arrivals.find(wrong)


def test_a_part_that_has_landed_is_not_offered_again() -> None:
    arrivals = Arrivals()
    arrivals.add(one := part(3))
    arrivals.add(part(3, 1))
    arrivals.landed(one)
    with pytest.raises(RemoteProtocolError, match="has landed"):
        arrivals.find(offer(3))


def test_a_transfer_is_forgotten_with_its_last_part() -> None:
    arrivals = Arrivals()
    arrivals.add(one := part(3))
    arrivals.landed(one)
    assert arrivals.find(offer(3)) is None


def test_a_part_is_waited_for_once() -> None:
    arrivals = Arrivals()
    arrivals.add(part(3))
    with pytest.raises(LocalProtocolError, match="twice"):
        arrivals.add(part(3))


def test_what_is_forgotten_is_wanted_by_nobody() -> None:
    arrivals = Arrivals()
    arrivals.add(part(3))
    arrivals.add(part(5))
    arrivals.clear()
    assert arrivals.find(offer(3)) is arrivals.find(offer(5)) is None


QUICK = NcclSettings(chunk_bytes=64, open_s=5.0)


def offers(pair: NcclPair) -> list[DeviceOffer]:
    return [one for one in pair.channels[0].said if isinstance(one, DeviceOffer)]


async def test_a_part_is_cut_into_operations_of_one_size_and_a_rest(
    pair: NcclPair,
) -> None:
    told = asyncio.Event()
    source, target = pair.memory(0, bytes(150)), pair.memory(1, bytes(150))
    pair.far.receive(1, 0, target, lambda digest, error: None)
    pair.near.send(1, 0, source, lambda digest, error: told.set())
    await told.wait()
    assert [one.nbytes for one in offers(pair)] == [64, 64, 22]
    assert [one.offset for one in offers(pair)] == [0, 64, 128]
    assert not pair.near.sender.nbytes and not pair.near.sender.is_busy


async def test_the_smaller_chunk_of_both_sides_counts(gpus: FakeGpus) -> None:
    made = NcclPair(gpus, lambda _: None, lambda _: None, settings=QUICK)
    theirs = DeviceDescription.decode(made.far.describe())
    said = msgspec.structs.replace(theirs, chunk_bytes=16).encode()
    async with asyncio.TaskGroup() as group:
        group.create_task(made.far.open(made.near.describe(), made.channels[1]))
        await made.near.open(said, made.channels[0])
    made.near.send(1, 0, made.memory(0, bytes(40)), lambda digest, error: None)
    assert [one.nbytes for one in offers(made)] == [16, 16, 8]
    await made.aclose()


async def test_to_the_sender_what_nobody_wants_has_left(pair: NcclPair) -> None:
    told, source = list[object](), pair.memory(0, bytes(range(200)))
    pair.far.announce(1)
    pair.near.send(1, 0, source, lambda *found: told.append(found))
    await until(lambda: bool(told))
    assert told == [(b"", None)]
    assert not pair.near.sender


@pytest.mark.parametrize("call", ["send", "receive"])
async def test_memory_of_the_host_is_refused(pair: NcclPair, call: str) -> None:
    move = getattr(pair.near, call)
    with pytest.raises(TypeError, match="memory of the host"):
        move(1, 0, memoryview(bytearray(3)), lambda digest, error: None)


def answers(pair: NcclPair, kind: type) -> int:
    return sum(isinstance(frame, kind) for frame in pair.channels[1].said)


async def test_what_nobody_waits_for_is_skipped_and_not_granted(pair: NcclPair) -> None:
    told, source = list[object](), pair.memory(0, b"abc")
    pair.far.announce(1)
    pair.near.send(1, 0, source, lambda *found: told.append(found))
    await until(lambda: bool(told))
    assert (answers(pair, DeviceSkip), answers(pair, DeviceGrant)) == (1, 0)


async def test_each_part_is_told_of_when_it_is_whole(pair: NcclPair) -> None:
    source, target = pair.memory(0, bytes([7]) * 130), pair.memory(1, bytes(130))
    told = list[object]()
    pair.far.receive(1, 0, target, lambda *found: told.append(found))
    assert bool(pair.far.receiver)
    pair.near.send(1, 0, source, lambda digest, error: None)
    await until(lambda: bool(told))
    assert pair.content(1, target) == bytes([7]) * 130
    assert not pair.far.receiver and not pair.far.receiver.nbytes


async def test_what_is_stopped_is_written_to_no_more(pair: NcclPair) -> None:
    source, target = pair.memory(0, bytes([7]) * 1000), pair.memory(1, bytes(1000))
    pair.far.receive(1, 0, target, lambda digest, error: None)
    pair.near.send(1, 0, source, lambda digest, error: None)
    await until(lambda: pair.far.landed_bytes(1) > 0)
    await pair.far.quiesce(1)
    pair.processes[1].cuda.view(target)[:] = 0
    await until(lambda: not pair.near.sender)
    assert pair.content(1, target) == bytes(1000)
