from __future__ import annotations

from asynckv.devices.cuda import DeviceMemory
from asynckv.transports.nccl.directions import DevicePart


class Told(list[tuple[bytes, BaseException | None]]):
    def __call__(self, digest: bytes, error: BaseException | None) -> None:
        self.append((digest, error))


def part_of(told: Told, owner: object = None) -> DevicePart:
    return DevicePart(1, 0, DeviceMemory(64, 8, 0, owner), told)


def test_operations_take_its_bytes_in_order() -> None:
    part = part_of(Told())
    first, second = part.begin(5), part.begin(3)
    assert (first.address, first.nbytes) == (64, 5)
    assert (second.address, second.nbytes) == (69, 3)
    assert not part.left_bytes and part.operations == 2


def test_it_is_told_once_and_without_a_digest() -> None:
    told = Told()
    part = part_of(told)
    part.complete()
    part.complete(ConnectionError())
    assert told == [(b"", None)]


def test_an_error_is_told() -> None:
    told = Told()
    part_of(told).complete(error := ConnectionError())
    assert told == [(b"", error)]


def test_nobody_is_told_of_a_stopped_part() -> None:
    told = Told()
    part = part_of(told)
    part.stopped = True
    part.complete()
    assert not told
