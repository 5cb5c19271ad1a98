from __future__ import annotations

import asyncio
import errno
import gc
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

from asynckv.devices import growth as growth_module
from asynckv.devices.growth import Growth, SpareMemory, allocate_but
from asynckv.errors import GPUFailed
from asynckv.tensors import slabs as slabs_module
from asynckv.tensors.arena import HeapArena
from asynckv.tensors.paged_arena import PagedArena, SlabArena, SlabRegion
from asynckv.tensors.slabs import MIN_SLAB_NBYTES, has_slabs
from asynckv.testing.blocked import until
from asynckv.types import TensorSpec
from harness.fake_devices import FakeDevice, fake_device
from harness.fake_gpus.gates import Gate

pytestmark = pytest.mark.skipif(not has_slabs(), reason="no memory files here")


_MIB = 2**20


class Changes:
    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> None:
        self.times += 1


@pytest.fixture
def changes() -> Changes:
    return Changes()


@pytest.fixture
async def growth(changes: Changes) -> AsyncIterator[Growth]:
    growth = Growth(64 * _MIB, changes)
    yield growth
    await growth.aclose()


def _nbytes(growth: Growth) -> int:
    assert isinstance(growth.arena, SlabArena)
    return growth.arena.pages.nbytes


def _mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:asynckv")


async def test_slabs_come_until_so_much_is_spare(
    growth: Growth, changes: Changes
) -> None:
    assert growth.awaits(20 * _MIB)
    await growth.reach(20 * _MIB)
    assert _nbytes(growth) == 2 * MIN_SLAB_NBYTES
    assert not growth.awaits(20 * _MIB)
    assert changes.times == 2


async def test_nothing_is_waited_for_that_slabs_cannot_help(growth: Growth) -> None:
    for nbytes in (0, 64 * 1024, 65 * _MIB):
        assert not growth.awaits(nbytes)
        await growth.reach(nbytes)
    assert _nbytes(growth) == 0


async def test_what_the_application_keeps_is_not_waited_for(growth: Growth) -> None:
    spec = TensorSpec((60 * _MIB,), "uint8")
    await growth.reach(spec.nbytes)
    kept = growth.spares.spare(spec)
    assert growth.arena.handed_out_bytes == spec.nbytes
    await growth.reach(spec.nbytes)
    assert growth.spares.spare(spec).nbytes == spec.nbytes
    assert growth.arena.handed_out_bytes == spec.nbytes
    del kept


async def test_a_cancelled_wait_leaves_no_trace(growth: Growth) -> None:
    with anyio.move_on_after(0) as scope:
        await growth.reach(_MIB)
    assert scope.cancelled_caught
    await growth.reach(_MIB)
    assert _nbytes(growth) == MIN_SLAB_NBYTES


async def test_a_slab_that_is_refused_is_not_waited_for_again(
    growth: Growth, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, start: int, nbytes: int) -> None:
        raise OSError(errno.ENOMEM, "no memory")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    await growth.reach(_MIB)
    assert not growth.awaits(_MIB)
    assert growth.arena.refused_slabs == 1


async def test_without_a_thread_nothing_is_waited_for(
    growth: Growth, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    await growth.reach(_MIB)
    assert not growth.awaits(_MIB)


async def test_without_memory_files_everything_is_on_the_heap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(os, "memfd_create")
    growth = Growth(64 * _MIB)
    assert isinstance(growth.arena, HeapArena)
    await growth.reach(_MIB)
    assert growth.spares.spare(TensorSpec((_MIB,), "uint8")).nbytes == _MIB
    await growth.aclose()


async def test_without_a_thread_memory_of_a_gpu_is_not_taken_for_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with fake_device() as gpu:
        growth = Growth(_MIB, device=gpu.device)
        monkeypatch.setattr(threading.Thread, "start", refuse)
        for _ in range(2):
            with pytest.raises(GPUFailed, match="threads"):
                await growth.open()


async def test_memory_of_the_host_is_open_without_any_slab(growth: Growth) -> None:
    await growth.open()
    assert _nbytes(growth) == 0


async def test_what_the_application_let_go_of_is_found_free(
    growth: Growth, changes: Changes
) -> None:
    spec = TensorSpec((4 * _MIB,), "uint8")
    await growth.reach(spec.nbytes)
    kept, before = growth.spares.spare(spec), changes.times
    assert growth.arena.handed_out_bytes == spec.nbytes
    del kept
    await until(lambda: changes.times > before)
    assert growth.arena.handed_out_bytes == 0


async def test_closed_it_wants_no_more_slabs(growth: Growth) -> None:
    await growth.aclose()
    assert not growth.awaits(_MIB)
    await growth.reach(_MIB)


async def test_what_is_idle_is_given_back_at_the_end() -> None:
    growth, mappings = Growth(64 * _MIB), _mappings()
    await growth.reach(60 * _MIB)
    slabs = growth.arena.pages._slabs  # type: ignore[union-attr]
    assert slabs is not None
    tensor = growth.spares.spare(TensorSpec((_MIB,), "uint8")).fill_(7)
    copy = os.dup(slabs.fileno())
    del slabs
    await growth.aclose()
    assert os.fstat(copy).st_blocks * 512 == _MIB
    os.close(copy)
    assert bool((tensor == 7).all())
    assert _mappings() == mappings + 1
    del tensor
    assert _mappings() == mappings


async def test_without_a_thread_it_is_given_back_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    growth, mappings = Growth(64 * _MIB), _mappings()
    await growth.reach(_MIB)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    growth.close()
    assert _mappings() == mappings
    await growth.aclose()


def test_after_the_loop_it_is_given_back_at_once() -> None:
    growth, mappings = Growth(64 * _MIB), _mappings()
    asyncio.run(growth.reach(_MIB))
    growth.close()
    assert _mappings() == mappings


def test_who_holds_a_view_and_its_memory_is_no_cycle_that_stays() -> None:
    class Owner:
        def __init__(self) -> None:
            self.growth = Growth(16 * _MIB, self.look)
            self.tensor: torch.Tensor | None = None

        def look(self) -> None: ...

    owner, mappings = Owner(), _mappings()
    asyncio.run(owner.growth.reach(_MIB))
    owner.tensor = owner.growth.spares.spare(TensorSpec((_MIB,), "uint8"))
    assert _mappings() == mappings + 1
    for thread in threading.enumerate():
        if thread.name == "asynckv-slab":
            thread.join()
    del owner
    for _ in range(2):  # the arena is what the view referred to
        gc.collect()
    assert _mappings() == mappings


class Idle:
    """Memory whose end takes as long as a test likes."""

    def __init__(self) -> None:
        self.may_go = threading.Event()
        self.is_gone = False

    def drop(self) -> None:
        self.may_go.wait()
        self.is_gone = True


async def test_its_end_waits_for_all_that_is_dropped(growth: Growth) -> None:
    await growth.reach(_MIB)
    first, second = Idle(), Idle()
    for idle in (first, second):
        growth.drop_soon(idle)
    second.may_go.set()
    closing = asyncio.create_task(growth.aclose())
    await until(lambda: second.is_gone)
    assert not closing.done() and not first.is_gone
    first.may_go.set()
    await closing
    assert first.is_gone


class Held:
    """A call of CUDA that keeps whoever makes it until a test lets go."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call
        self.may_return = threading.Event()
        self.is_under_way = self.has_returned = False

    def __call__(self, *args: Any) -> Any:
        self.is_under_way = True
        self.may_return.wait(30)
        self.has_returned = True
        return self._call(*args)


def hold(gpu: FakeDevice, name: str) -> Held:
    held = Held(getattr(gpu.process.cuda, name))
    setattr(gpu.process.cuda, name, held)
    return held


@pytest.mark.parametrize("name", ["malloc", "free"])
async def test_its_end_does_not_wait_for_ever_while_a_gpu_allocates_or_frees(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(growth_module, "_CLOSE_S", 0.01)
    with fake_device() as gpu:
        growth = Growth(_MIB, device=gpu.device)
        if name == "free":
            await growth.open()
        held = hold(gpu, name)
        growth.awaits(_MIB)
        await until(lambda: held.is_under_way or name == "free")
        await growth.aclose()
        assert not held.has_returned
        held.may_return.set()
        await until(lambda: not gpu.process.owned and not growth._dropping)


def test_what_is_allocated_after_the_loop_is_freed() -> None:
    async def begin(growth: Growth, held: Held) -> None:
        growth.awaits(_MIB)
        await until(lambda: held.is_under_way)
        growth.close()

    with fake_device() as gpu:
        growth, held = Growth(_MIB, device=gpu.device), hold(gpu, "malloc")
        asyncio.run(begin(growth, held))
        held.may_return.set()
        for thread in threading.enumerate():
            if thread.name == "asynckv-slab":
                thread.join()
        assert not gpu.process.owned and not growth.arena.used_bytes


async def test_a_slab_that_is_not_under_way_is_not_waited_for() -> None:
    growth = Growth(2**20)
    assert not await growth.grown()
    await growth.aclose()


async def test_whoever_wants_to_know_is_told_when_memory_of_a_gpu_is_free_again() -> (
    None
):
    told: list[int] = []
    with fake_device() as gpu:
        growth = Growth(2**20, device=gpu.device)
        await growth.open()
        arena = growth.arena
        assert isinstance(arena, PagedArena)
        growth.call_when_given_back(lambda: told.append(arena.used_bytes))
        taken = arena.take_spares([2**19, 2**18])
        assert taken is not None
        one, two = taken
        assert arena.take_spares([2**17, 2**18]) is None
        hold = two.hold()
        one.release()
        two.release()
        assert told == [2**18]
        hold.release()
        assert (len(told), arena.pinned_bytes) == (2, 0)
        await growth.aclose()


async def test_memory_is_found_free_whose_views_ended_before_it_was_released(
    changes: Changes,
) -> None:
    with fake_device() as gpu:
        growth, gate = Growth(_MIB, changes, gpu.device), Gate()
        await growth.open()
        regions = growth.arena.allocate([_MIB]) or []
        view = regions[0].tensor(_LARGE)
        gpu.tensors.stream(0).add(gate)
        del view
        growth.arena.free(regions)
        before = changes.times
        gate.open()
        await until(lambda: changes.times > before and not growth.arena.pinned_bytes)
        await growth.aclose()


_LARGE = TensorSpec((_MIB,), "uint8")


@pytest.fixture
def arena() -> Iterator[SlabArena]:
    arena = SlabArena(16 * _MIB, wanted=lambda: None, freed=lambda: None)
    arena.add_slab(arena.pages.make_slab())
    yield arena
    arena.close()
    gc.collect()


@pytest.fixture
def lending(arena: SlabArena) -> SpareMemory:
    return SpareMemory(arena)


def _region(lending: SpareMemory, tensor: torch.Tensor) -> SlabRegion | None:
    (region,) = lending.regions_of([tensor]) or (None,)
    return region


def test_a_lent_tensor_is_charged_as_long_as_it_lives(
    arena: SlabArena, lending: SpareMemory
) -> None:
    tensor = lending.empty(_LARGE)
    assert arena.pinned_bytes == _MIB
    del tensor
    arena.collect()
    assert arena.pinned_bytes == arena.used_bytes == 0


def test_a_lent_tensor_is_known_again(arena: SlabArena, lending: SpareMemory) -> None:
    ordinary = torch.empty(_MIB, dtype=torch.uint8)
    assert lending.regions_of([ordinary]) == ()
    tensor = lending.empty(_LARGE)
    assert _region(lending, tensor) is not None
    for other in (tensor[1:], tensor.view(torch.int32)[::2], ordinary):
        assert _region(lending, other) is None
    del tensor, other
    arena.collect()
    assert lending.regions_of([ordinary]) == ()


def test_an_owner_keeps_a_lent_tensors_memory(
    arena: SlabArena, lending: SpareMemory
) -> None:
    tensor = lending.empty(_LARGE)
    tensor[5] = 6
    region = _region(lending, tensor)
    assert region is not None
    assert region.own()
    assert not region.own()
    assert _region(lending, tensor) is None
    assert arena.pinned_bytes == 0
    del tensor
    arena.collect()
    assert region.view()[5] == 6
    region.release()
    assert arena.used_bytes == 0


def test_what_is_small_or_has_no_room_is_ordinary_and_not_charged(
    arena: SlabArena, lending: SpareMemory
) -> None:
    for nbytes in (0, 16, 17 * _MIB):
        tensor = lending.empty(TensorSpec((nbytes,), "uint8"))
        assert tensor.nbytes == nbytes
        assert arena.pinned_bytes == arena.used_bytes == 0


def test_what_has_no_place_is_ordinary_and_not_charged(
    arena: SlabArena, lending: SpareMemory
) -> None:
    spare = lending.spare(TensorSpec((16 * _MIB,), "uint8"))
    assert lending.empty(_LARGE).nbytes == _MIB
    assert arena.pinned_bytes == arena.used_bytes == 0
    del spare


def test_spare_tensors_are_charged_to_nobody_and_come_back(
    arena: SlabArena, lending: SpareMemory
) -> None:
    first = lending.spare(_LARGE)
    address = first.data_ptr()
    assert (arena.used_bytes, arena.pinned_bytes) == (0, 0)
    assert arena.handed_out_bytes == _MIB
    assert _region(lending, first) is None
    second = lending.spare(_LARGE)
    assert second.data_ptr() != address
    del first
    assert lending.spare(_LARGE).data_ptr() == address


def test_without_idle_memory_a_spare_tensor_is_ordinary(arena: SlabArena) -> None:
    lending = SpareMemory(arena)
    for nbytes in (16, 17 * _MIB):
        assert lending.spare(TensorSpec((nbytes,), "uint8")).nbytes == nbytes
    assert arena.handed_out_bytes == 0


def test_where_no_more_can_be_mapped_tensors_are_ordinary(
    arena: SlabArena, lending: SpareMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, runs: object, *, writable: bool) -> None:
        raise OSError(errno.ENOMEM, "too many mappings")

    monkeypatch.setattr(slabs_module, "stitch", refuse)
    others = [lending.empty(_LARGE) for _ in range(16)]
    others.sort(key=torch.Tensor.data_ptr)
    del others[::2]
    for lend in (lending.empty, lending.spare):
        assert lend(TensorSpec((3 * _MIB,), "uint8")).nbytes == 3 * _MIB
        arena.collect()
        assert (arena.used_bytes, arena.pinned_bytes) == (0, 8 * _MIB)
        assert arena.handed_out_bytes == 0
        assert arena.pages.free_bytes == 8 * _MIB


def test_a_heap_lends_ordinary_tensors() -> None:
    arena = HeapArena(8 * _MIB)
    lending = SpareMemory(arena)
    for tensor in (lending.empty(_LARGE), lending.spare(_LARGE)):
        assert tensor.nbytes == _MIB
        assert _region(lending, tensor) is None
    assert arena.used_bytes == arena.handed_out_bytes == 0


def test_what_is_there_already_is_not_taken_twice(
    arena: SlabArena, lending: SpareMemory
) -> None:
    tensor = lending.empty(TensorSpec((10 * _MIB,), "uint8"))
    lent = lending.regions_of([tensor])
    sizes = [_MIB, 10 * _MIB, 2 * _MIB]
    assert allocate_but((None, *lent, None), arena, [7 * _MIB, *sizes[1:]], 0) is None
    assert (arena.used_bytes, arena.pinned_bytes) == (0, 10 * _MIB)
    regions = allocate_but((None, *lent, None), arena, sizes, 5) or []
    assert [region.nbytes for region in regions] == sizes
    assert regions[1] is lent[0]
    assert (arena.used_bytes, arena.pinned_bytes) == (13 * _MIB + 5, 0)
    arena.free(regions, 5)
