from __future__ import annotations

from asynckv.protocol.digests import digest_of
from asynckv.tensors.cuda import DeviceMemory
from asynckv.tensors.runs import runs_at
from asynckv.transports.nccl.parts import AnyMemory, DevicePart


class Told(list[tuple[bytes, BaseException | None]]):
    def __call__(self, digest: bytes, error: BaseException | None) -> None:
        self.append((digest, error))


def part_of(memory: AnyMemory, told: Told, known: bytes | None = None) -> DevicePart:
    return DevicePart(1, 0, memory, told, known)


def test_bytes_are_digested_while_they_are_copied_out() -> None:
    told, pinned = Told(), memoryview(bytearray(4))
    part = part_of(memoryview(b"abcdef"), told)
    part.copy_out(0, pinned)
    part.copy_out(4, pinned[:2])
    part.tell()
    assert bytes(pinned) == b"efcd"
    assert told == [(digest_of(b"abcdef"), None)]


def test_bytes_land_in_memory_that_lies_in_several_places() -> None:
    base, told = bytearray(8), Told()
    part = part_of(runs_at(memoryview(base), [(0, 2), (5, 8)]), told)
    part.copy_in(0, memoryview(b"abcde"))
    assert bytes(base) == b"ab\0\0\0cde"


def test_what_nobody_wants_is_digested_all_the_same() -> None:
    told = Told()
    part = part_of(memoryview(b"abcdef"), told)
    part.copy_out(0, memoryview(bytearray(2)))
    part.begun_bytes = 2
    assert part.needs_rest
    part.digest_rest()
    part.tell()
    assert told == [(digest_of(b"abcdef"), None)]


def test_a_stopped_part_touches_nothing_and_tells_nobody() -> None:
    target, told = bytearray(4), Told()
    part = part_of(memoryview(target), told)
    part.stop()
    part.copy_in(0, memoryview(b"abcd"))
    part.tell()
    assert target == bytes(4)
    assert not told and not part.is_touched
    target.clear()  # nothing holds it any more


def test_an_error_is_told_without_a_digest() -> None:
    told = Told()
    part_of(memoryview(b"abc"), told).tell(error := ConnectionError())
    assert told == [(b"", error)]


def test_memory_of_a_gpu_is_touched_while_the_worker_has_it() -> None:
    told = Told()
    part = part_of(DeviceMemory(64, 8, 0), told)
    part.operations = part.posted = 1
    part.stop()
    assert part.is_touched
    part.operations = part.posted = 0
    part.let_go_if_over()
    assert not part.is_touched


def test_memory_of_a_gpu_has_no_digest() -> None:
    told = Told()
    part = part_of(DeviceMemory(64, 8, 0), told)
    assert not part.needs_rest
    part.tell()
    assert told == [(b"", None)]
