from __future__ import annotations

import fcntl
import gc
import os
import weakref

import numpy
import pytest
import torch

from asynckv.protocol.values import Place
from asynckv.tensors.shared_file import MappedFile, SharedFile, check_place, edges_of
from asynckv.tensors.slabs import PAGE_NBYTES, Slabs, has_slabs
from asynckv.tensors.views import bytes_of, spec_of
from asynckv.types import DTYPE_NBYTES, TensorSpec

pytestmark = pytest.mark.skipif(not has_slabs(), reason="no memory files here")

_MIB = 2**20
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Keeper:
    """Whose life a view prolongs."""


def grown() -> Slabs:
    slabs = Slabs(_MIB)
    slabs.grow()
    return slabs


def mapped(slabs: Slabs) -> tuple[SharedFile, MappedFile]:
    shared = SharedFile(slabs)
    return shared, MappedFile(os.dup(shared.fileno()), shared.nbytes)


def a_file(nbytes: int, seals: int = 0, flags: int = os.O_RDONLY) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    opened = os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC)
    os.close(fd)
    return opened


def page(number: int, pages: int = 1) -> tuple[int, int]:
    return number * PAGE_NBYTES, pages * PAGE_NBYTES


def view_of(
    file: MappedFile, place: Place, spec: TensorSpec, keeper: object = None
) -> torch.Tensor:
    return file.view(place, spec, spec.nbytes, file.lend(keeper))


def test_who_maps_the_file_reads_the_nonce_and_what_is_written_later() -> None:
    slabs = grown()
    shared, file = mapped(slabs)
    assert file.nonce == shared.nonce
    slabs.memory[5000:5004] = (1, 2, 3, 4)
    view = view_of(file, Place((page(1),), 904, 1), TensorSpec((4,), "uint8"))
    assert view.tolist() == [1, 2, 3, 4]


def test_no_two_files_have_the_same_nonce() -> None:
    slabs = grown()
    assert SharedFile(slabs).nonce != SharedFile(Slabs(_MIB)).nonce


def test_what_is_sent_can_only_be_read() -> None:
    slabs = grown()
    shared = SharedFile(slabs)
    with pytest.raises(OSError):
        os.write(shared.fileno(), b"x")
    with pytest.raises(OSError):
        fcntl.fcntl(shared.fileno(), fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_a_view_of_pages_that_lie_apart_is_one_tensor() -> None:
    slabs = grown()
    _, file = mapped(slabs)
    numbers = torch.arange(2 * PAGE_NBYTES // 4, dtype=torch.int32)
    raw = numbers.numpy().view(numpy.uint8)
    slabs.memory[slice(7 * PAGE_NBYTES, 8 * PAGE_NBYTES)] = raw[:PAGE_NBYTES]
    slabs.memory[slice(3 * PAGE_NBYTES, 4 * PAGE_NBYTES)] = raw[PAGE_NBYTES:]
    place = Place((page(7), page(3)), 0, 1)
    spec = TensorSpec((2, PAGE_NBYTES // 4), "int32")
    assert torch.equal(view_of(file, place, spec).flatten(), numbers)
    assert b"".join(piece.tobytes() for piece in file.pieces(place, 2 * PAGE_NBYTES))


def test_pieces_begin_within_the_run_that_holds_the_start() -> None:
    slabs = grown()
    _, file = mapped(slabs)
    slabs.memory[: 16 * PAGE_NBYTES] = numpy.arange(16 * PAGE_NBYTES) // PAGE_NBYTES
    place = Place((page(7), page(3), page(9)), PAGE_NBYTES + 10, 1)
    pieces = file.pieces(place, PAGE_NBYTES)
    assert [(p[0], p.nbytes) for p in pieces] == [(3, PAGE_NBYTES - 10), (9, 10)]


def test_a_view_keeps_its_keeper_as_long_as_any_of_its_parts() -> None:
    slabs = grown()
    _, file = mapped(slabs)
    keeper = Keeper()
    gone = weakref.ref(keeper)
    part = view_of(file, Place((page(0),), 0, 1), TensorSpec((9,), "int8"), keeper)[3:]
    del keeper
    gc.collect()
    assert gone() is not None
    del part
    gc.collect()
    assert gone() is None


def test_a_view_outlives_the_file_and_its_owner() -> None:
    slabs = Slabs(_MIB)
    slabs.grow()
    slabs.memory[:3] = 7
    shared, file = mapped(slabs)
    view = view_of(file, Place((page(0),), 0, 1), TensorSpec((3,), "uint8"))
    shared.close()
    slabs.close()
    del slabs, shared, file
    gc.collect()
    assert view.tolist() == [7, 7, 7]


@pytest.mark.parametrize(
    ("seals", "flags", "what"),
    [
        (0, os.O_RDONLY, "sealed"),
        (fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL, os.O_RDONLY, "sealed"),
        (fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK, os.O_RDONLY, "sealed"),
        (SEALS, os.O_RDWR, "written"),
    ],
)
def test_a_file_that_could_change_is_refused(seals: int, flags: int, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        MappedFile(a_file(2 * PAGE_NBYTES, seals, flags), 2 * PAGE_NBYTES)


@pytest.mark.parametrize("claimed", [1, 3])
def test_a_file_of_another_size_than_said_is_refused(claimed: int) -> None:
    with pytest.raises(ValueError, match="bytes"):
        MappedFile(a_file(2 * PAGE_NBYTES, SEALS), claimed * PAGE_NBYTES)


@pytest.mark.parametrize(
    "nbytes", [PAGE_NBYTES, 2 * PAGE_NBYTES + 1, 2**44 + PAGE_NBYTES]
)
def test_a_file_without_whole_pages_or_end_is_refused(nbytes: int) -> None:
    with pytest.raises(ValueError, match="bytes"):
        MappedFile(a_file(nbytes, SEALS), nbytes)


def test_what_is_no_memory_file_is_refused() -> None:
    with pytest.raises(ValueError, match="no memory file"):
        MappedFile(os.open("/dev/null", os.O_RDONLY), 2 * PAGE_NBYTES)


@pytest.mark.parametrize(
    ("runs", "start", "nbytes"),
    [
        ((page(255),), 0, 2 * PAGE_NBYTES),
        ((page(256),), 0, 1),
        ((page(2**50),), 0, 1),
        ((page(0, 2**50),), 0, 1),
        (((1, PAGE_NBYTES),), 0, 1),
        (((0, 100),), 0, 1),
        (((0, 0),), 0, 0),
        ((), 0, 1),
        ((page(0),), PAGE_NBYTES, 1),
        ((page(0),), 2**62, 0),
        ((page(0),), 8, 8),
    ],
)
def test_a_place_outside_of_the_file_is_refused(
    runs: tuple[tuple[int, int], ...], start: int, nbytes: int
) -> None:
    with pytest.raises(ValueError, match="lies|ends"):
        check_place(Place(runs, start, 1), nbytes, _MIB + PAGE_NBYTES)


def test_the_last_page_of_the_slabs_can_be_a_place() -> None:
    check_place(Place((page(254, 2),), 64, 1), 8128, _MIB + PAGE_NBYTES)


@pytest.mark.parametrize("changed", [0, 4095, 20 * 2**10 - 4096, 20 * 2**10 - 1])
def test_edges_see_the_first_and_the_last_bytes(changed: int) -> None:
    slabs = grown()
    places, sizes = [Place((page(0, 5),), 0, 1)], [20 * 2**10]
    before = edges_of(slabs.constant, places, sizes)
    slabs.memory[changed] ^= 1
    assert edges_of(slabs.constant, places, sizes) != before


@pytest.mark.parametrize("changed", [7 * PAGE_NBYTES, 4 * PAGE_NBYTES - 1])
def test_edges_are_those_of_pages_that_lie_apart(changed: int) -> None:
    slabs = grown()
    places, sizes = [Place((page(7), page(3)), 0, 1)], [2 * PAGE_NBYTES]
    before = edges_of(slabs.constant, places, sizes)
    slabs.memory[changed] ^= 1
    assert edges_of(slabs.constant, places, sizes) != before


def test_edges_see_another_generation_and_nothing_in_the_middle() -> None:
    slabs = grown()
    one, other = (Place((page(0, 5),), 0, generation) for generation in (1, 2))
    before = edges_of(slabs.constant, [one], [20 * 2**10])
    assert edges_of(slabs.constant, [other], [20 * 2**10]) != before
    slabs.memory[10_000] ^= 1
    assert edges_of(slabs.constant, [one], [20 * 2**10]) == before


@pytest.mark.parametrize("dtype", sorted(DTYPE_NBYTES))
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_a_view_is_of_any_dtype(dtype: str) -> None:
    slabs = grown()
    _, file = mapped(slabs)
    slabs.memory[:512] = numpy.arange(512) % 2
    spec = TensorSpec((2, 4, 1), dtype)
    view = view_of(file, Place((page(0),), 64, 1), spec)
    assert spec_of(view) == spec
    assert bytes(bytes_of(view)) == slabs.memory[64 : 64 + spec.nbytes].tobytes()


@pytest.mark.parametrize("shape", [(), (0,), (3, 0)])
def test_a_view_may_have_no_dimension_or_no_element(shape: tuple[int, ...]) -> None:
    slabs = grown()
    _, file = mapped(slabs)
    view = view_of(file, Place((page(0),), 0, 1), TensorSpec(shape, "bfloat16"))
    assert tuple(view.shape) == shape
