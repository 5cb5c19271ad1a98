from __future__ import annotations

from asynckv.devices.arena import DeviceArena, DeviceRegion, HostRegion
from harness.fake_devices import FakeDevice

MIB = 2**20


def test_large_regions_are_on_the_gpu_and_small_ones_on_the_host(
    arena: DeviceArena,
) -> None:
    large, small = arena.allocate([MIB]), arena.allocate([64])
    assert large is not None and isinstance(large[0], DeviceRegion)
    assert small is not None and isinstance(small[0], HostRegion)
    arena.free([*large, *small])
    assert not arena.used_bytes


def test_the_bound_is_kept(arena: DeviceArena) -> None:
    held = arena.allocate([4 * MIB])
    assert held is not None and arena.allocate([MIB]) is None
    arena.free(held)
    assert arena.fits([4 * MIB]) and not arena.could_ever_fit([4 * MIB + 1])


def test_what_is_outside_of_it_is_on_the_host(arena: DeviceArena) -> None:
    outside = arena.allocate_outside([MIB], [8])
    assert [type(region) for region in outside] == [HostRegion, HostRegion]
    assert not arena.used_bytes


def test_a_closed_arena_lets_its_memory_go_with_the_last_region(
    gpu: FakeDevice,
) -> None:
    dropped = list[object]()
    arena = DeviceArena(
        *(4 * MIB, gpu.device),
        wanted=lambda: None,
        freed=lambda: None,
        unmapped=dropped.append,
    )
    arena.add_slab(arena.pages.make_slab())
    regions = arena.allocate([MIB])
    arena.close()
    assert regions is not None and not dropped
    arena.free(regions)
    assert len(dropped) == 1 and not arena.pages.is_open
