from __future__ import annotations

import ctypes
import errno
import fcntl
import gc
import mmap
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
import torch

from asynckv.protocol.values import Place
from asynckv.tensors import stitching as private_pages
from asynckv.tensors.shared_file import MappedFile, SharedFile, check_place, edges_of
from asynckv.tensors.slabs import PAGE_NBYTES, Slabs, has_slabs
from asynckv.tensors.stitching import PrivatePages, stitch
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


@pytest.mark.parametrize(
    ("runs", "nbytes", "changed"),
    [
        *(((page(0, 5),), 20 * 2**10, at) for at in (0, 4095)),
        *(((page(0, 5),), 20 * 2**10, 20 * 2**10 - at) for at in (4096, 1)),
        ((page(7), page(3)), 2 * PAGE_NBYTES, 7 * PAGE_NBYTES),
        ((page(7), page(3)), 2 * PAGE_NBYTES, 4 * PAGE_NBYTES - 1),
    ],
)
def test_edges_see_the_first_and_the_last_bytes(
    runs: tuple[tuple[int, int], ...], nbytes: int, changed: int
) -> None:
    slabs = grown()
    places, sizes = [Place(runs, 0, 1)], [nbytes]
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


NBYTES = 16 * PAGE_NBYTES
FIRST = (0, 2 * PAGE_NBYTES)
SECOND = (4 * PAGE_NBYTES, 3 * PAGE_NBYTES)
_PAGEOUT = 21
_ONFAULT = 1
_libc = ctypes.CDLL(None, use_errno=True)


class Mapped:
    """A file of one byte's value a page, and a private mapping of it."""

    def __init__(self) -> None:
        fd = os.memfd_create("test", os.MFD_CLOEXEC)
        os.ftruncate(fd, NBYTES)
        self.owner = stitch(fd, [(0, NBYTES)], writable=True)
        self.fd = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        os.close(fd)
        self.pages = PrivatePages(self.fd, NBYTES)
        self.memory = self.pages.memory
        self.address: int = self.memory.ctypes.data
        self.owner[:] = 1

    def __del__(self) -> None:
        self.pages.close()
        os.close(self.fd)

    def write(self, *runs: tuple[int, int]) -> bool:
        """Write all of ``runs`` in a delivery that has them; tell if it got them."""
        claim = self.pages.claim(runs)
        if claim is None:
            return False
        for offset, nbytes in runs:
            self.memory[offset : offset + nbytes] = 7
        claim.exported += runs
        self.pages.release(claim)
        return True

    def shows_what_the_owner_writes(self) -> bool:
        self.owner[:] += 1
        return bool((self.memory == self.owner).all())


def test_what_was_written_is_nobody_else_s_and_is_gone_after_the_release() -> None:
    mapped = Mapped()
    assert mapped.write(FIRST, SECOND)
    assert (mapped.owner == 1).all()
    assert mapped.shows_what_the_owner_writes()


def test_pages_that_were_written_are_the_next_delivery_s_again() -> None:
    mapped = Mapped()
    assert mapped.write(FIRST)
    assert mapped.write(FIRST)


def test_a_mapping_lives_until_what_looks_through_it_has_ended() -> None:
    mapped = Mapped()
    claim = mapped.pages.claim([FIRST])
    assert claim is not None
    claim.exported.append(FIRST)
    pages, address = mapped.pages, f"{mapped.address:x}-"
    pages.close()
    del mapped.memory
    gc.collect()
    assert address in Path("/proc/self/maps").read_text()
    pages.release(claim)


def test_pages_are_one_delivery_s_at_a_time() -> None:
    mapped = Mapped()
    claim = mapped.pages.claim([FIRST, SECOND])
    assert claim is not None
    assert mapped.pages.claim([(PAGE_NBYTES, PAGE_NBYTES)]) is None
    assert mapped.pages.claim([(2 * PAGE_NBYTES, PAGE_NBYTES)]) is not None
    mapped.pages.release(claim)
    assert mapped.pages.claim([FIRST]) is not None


def test_without_a_page_map_pages_are_mapped_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened = os.open

    def without_page_map(path: str, flags: int) -> int:
        if "pagemap" in path:
            raise PermissionError
        return opened(path, flags)

    monkeypatch.setattr("os.open", without_page_map)
    mapped = Mapped()
    assert mapped.write(FIRST) and mapped.write(FIRST, SECOND)
    assert mapped.shows_what_the_owner_writes()


def test_pages_that_are_locked_are_mapped_again() -> None:
    mapped = Mapped()
    claim = mapped.pages.claim([FIRST, SECOND])
    assert claim is not None
    offset, nbytes = SECOND
    assert not _libc.mlock(ctypes.c_void_p(mapped.address + offset), nbytes)
    claim.exported += (FIRST, SECOND)
    mapped.pages.release(claim)
    assert mapped.shows_what_the_owner_writes()


@pytest.mark.parametrize("has_page_map", [True, False])
def test_what_can_be_neither_dropped_nor_mapped_is_shown_to_nobody(
    has_page_map: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: int) -> None:
        raise OSError("no more mappings")

    mapped = Mapped()
    if not has_page_map:
        monkeypatch.setattr("os.pread", fails)
    monkeypatch.setattr(private_pages, "map_again", fails)
    monkeypatch.setattr(private_pages, "drop", lambda address, nbytes: nbytes == 4096)
    assert mapped.write(FIRST, SECOND)
    assert not mapped.write(FIRST)
    assert not mapped.write(SECOND)
    assert mapped.write((3 * PAGE_NBYTES, PAGE_NBYTES))


def test_whoever_copies_every_page_gets_none_from_before_the_first_one_on() -> None:
    mapped = Mapped()
    # As mlockall() does, from the first address on, with what may be written.
    before = ctypes.c_void_p(mapped.address - PAGE_NBYTES)
    assert not _libc.mlock(before, PAGE_NBYTES)
    assert all(mapped.pages.claim([FIRST]) is None for _ in range(3))
    assert not _libc.munlock(before, PAGE_NBYTES)  # which makes no copy undone
    assert mapped.pages.claim([FIRST]) is None


_LOCKED_FROM_THE_FIRST = """
import ctypes, os, sys
from asynckv.tensors.stitching import PrivatePages
fd = os.memfd_create("x")
os.ftruncate(fd, 2**16)
if ctypes.CDLL(None).mlockall(2):
    sys.exit("may not")
pages = PrivatePages(fd, 2**16)
os.pwrite(fd, bytes([1]) * 2**16, 0)
assert pages.memory.all() and pages.claim([(0, 2**16)])
"""


@pytest.mark.multiprocess
def test_pages_that_are_locked_from_the_first_are_no_copies() -> None:
    program = [sys.executable, "-c", _LOCKED_FROM_THE_FIRST]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    if done.stderr == "may not\n":
        pytest.skip("this user may not lock memory")
    assert not done.returncode, done.stderr


def test_pages_that_are_locked_as_they_are_used_are_dropped_all_the_same() -> None:
    mapped = Mapped()
    everything = ctypes.c_void_p(mapped.address - PAGE_NBYTES)
    assert not _libc.mlock2(everything, PAGE_NBYTES + NBYTES, _ONFAULT)
    assert mapped.write(FIRST) and mapped.write(FIRST, SECOND)
    assert mapped.shows_what_the_owner_writes()


@pytest.mark.skipif(
    len(Path("/proc/swaps").read_text().splitlines()) < 2, reason="no swap here"
)
def test_what_was_written_and_swapped_out_is_dropped_too() -> None:
    mapped = Mapped()
    claim = mapped.pages.claim([SECOND])
    assert claim is not None
    offset, nbytes = SECOND
    mapped.memory[offset : offset + nbytes] = 7
    _libc.madvise(ctypes.c_void_p(mapped.address + offset), nbytes, _PAGEOUT)
    claim.exported.append(SECOND)
    mapped.pages.release(claim)
    assert mapped.shows_what_the_owner_writes()


def test_after_the_close_nothing_is_touched_any_more() -> None:
    mapped = Mapped()
    claim = mapped.pages.claim([FIRST])
    assert claim is not None
    mapped.memory[: FIRST[1]] = 7
    claim.exported.append(FIRST)
    mapped.pages.close()
    mapped.pages.release(claim)
    assert (mapped.memory[: FIRST[1]] == 7).all()


def test_a_private_mapping_dies_with_its_last_array() -> None:
    mapped = Mapped()
    part = mapped.memory[: mmap.PAGESIZE]
    address = f"{mapped.address:x}-"
    del mapped
    gc.collect()
    assert address in Path("/proc/self/maps").read_text()
    del part
    assert address not in Path("/proc/self/maps").read_text()


_RUNS = [(5 * PAGE_NBYTES, PAGE_NBYTES), (PAGE_NBYTES, 2 * PAGE_NBYTES)]


@pytest.fixture
def fd() -> Iterator[int]:
    fd = os.memfd_create("stitched")
    os.ftruncate(fd, 8 * PAGE_NBYTES)
    for page in range(8):
        os.pwrite(fd, bytes([page]) * PAGE_NBYTES, page * PAGE_NBYTES)
    yield fd
    os.close(fd)


def _stitched() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:stitched")


def test_pages_that_lie_apart_are_one_array(fd: int) -> None:
    array = stitch(fd, _RUNS, writable=True)
    assert array[::PAGE_NBYTES].tolist() == [5, 1, 2]
    array[2 * PAGE_NBYTES - 1] = 77
    assert os.pread(fd, 2, 2 * PAGE_NBYTES - 1) == bytes([77, 2])


def test_it_is_unmapped_with_the_last_array_over_it(fd: int) -> None:
    part = stitch(fd, _RUNS, writable=True)[PAGE_NBYTES:][:8].data
    assert _stitched() == 2
    assert part[0] == 1
    del part
    gc.collect()
    assert _stitched() == 0


def test_what_is_not_writable_cannot_be_written(fd: int) -> None:
    array = stitch(fd, _RUNS, writable=False)
    assert not array.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1
    assert "r--s" in Path("/proc/self/maps").read_text().split("/memfd:stitched")[0]


def test_writing_to_it_nevertheless_is_a_crash(fd: int) -> None:
    program = (
        "import ctypes, os; from asynckv.tensors.stitching import stitch; "
        "fd = os.memfd_create('x'); os.ftruncate(fd, 8192); "
        "array = stitch(fd, [(0, 8192)], writable=False); "
        "ctypes.memset(array.ctypes.data, 1, 1)"
    )
    code = subprocess.run([sys.executable, "-c", program], check=False).returncode
    assert code == -11


def test_a_closed_file_is_an_os_error_and_nothing_stays_mapped(fd: int) -> None:
    with pytest.raises(OSError, match="descriptor") as caught:
        stitch(-1, _RUNS, writable=True)
    assert caught.value.errno == errno.EBADF
    del caught
    assert _stitched() == 0


def test_a_private_array_may_be_larger_than_all_memory() -> None:
    fd = os.memfd_create("large")
    os.ftruncate(fd, 2**42)
    array = stitch(fd, [(0, 2**42)], writable=True, is_private=True)
    array[-1] = 7
    assert array.nbytes == 2**42
    os.close(fd)
