from __future__ import annotations

import threading

import pytest

import asynckv
from asynckv.cli.bench.report import Settings
from asynckv.cli.bench.rig import Rig, WrongBytes, copy_all, make_memory, open_rig
from asynckv.cli.bench.server import serving


async def test_a_rig_reaches_buffer_and_baselines(rig: Rig) -> None:
    assert await rig.lookup.peek(rig.prefix) == 0
    target = [memoryview(bytearray(10))]
    assert await rig.in_thread(rig.baselines.raw.pull, target) > 0
    assert len(await rig.baselines.streams.exchange(2, 1, 10)) == 2
    assert await rig.baselines.echo.ping(b"there and back") == b"there and back"


@pytest.mark.parametrize("lanes", [1, 3])
async def test_there_are_as_many_raw_streams_as_lanes(lanes: int) -> None:
    async with serving("tcp://127.0.0.1:0", Settings(lanes=3)) as url:
        async with open_rig(url, Settings(lanes=lanes)) as rig:
            assert (rig.lanes, len(rig.baselines.raw)) == (lanes, lanes)


async def test_cpu_seconds_grow(rig: Rig) -> None:
    assert 0 < await rig.cpu_s() < await rig.cpu_s()


async def test_no_two_keys_are_the_same(rig: Rig) -> None:
    keys = [rig.new_tokens(), rig.new_tokens()]
    assert keys[0] != keys[1]
    assert {key[0] for key in keys} == set(rig.prefix)


async def test_what_blocks_does_not_run_in_the_loop_s_thread(rig: Rig) -> None:
    assert await rig.in_thread(threading.get_ident) != threading.get_ident()


async def test_any_server_of_a_lookup_buffer_will_do_without_raw_sockets(
    plain_rig: Rig,
) -> None:
    assert not plain_rig.is_bench and plain_rig.lanes > 0
    assert await plain_rig.lookup.peek(plain_rig.prefix) == 0
    assert await plain_rig.cpu_s() == 0.0
    with pytest.raises(asynckv.ConfigError, match="no bench"):
        plain_rig.baselines  # noqa: B018


async def test_a_server_without_a_lookup_buffer_is_refused() -> None:
    async with (
        asynckv.StoreBuffer("1MiB") as store,
        asynckv.serve("tcp://127.0.0.1:0", store=store) as server,
    ):
        with pytest.raises(asynckv.ConfigError):
            async with open_rig(server.url, Settings()):
                pass


def test_what_was_copied_is_what_is_checked_for() -> None:
    memory = make_memory(300, 8)
    memory.poison()
    copy_all(memory.target_views, memory.source_views)
    memory.check()


def test_a_part_that_did_not_land_is_noticed() -> None:
    memory = make_memory(3, 8)
    copy_all(memory.target_views, memory.source_views)
    memory.targets[2][-1] = 99
    with pytest.raises(WrongBytes, match="tensor 2"):
        memory.check()


def test_names_are_those_of_the_layers_of_a_key() -> None:
    memory = make_memory(2, 8)
    assert list(memory.layers) == ["0", "1"]
    assert list(memory.into) == ["0.key", "1.key"]
    assert memory.nbytes == 16


def test_scattered_targets_lie_apart_and_never_overlap() -> None:
    memory = make_memory(50, 8, scattered=True)
    places = [target.data_ptr() for target in memory.targets]
    assert len(set(places)) == 50
    assert places != sorted(places)
    assert all(target.is_contiguous() for target in memory.targets)
    assert memory.paged is not None
    for blocks, tensors in zip(
        memory.paged, (memory.sources, memory.targets), strict=True
    ):
        places = [blocks.pool[place].data_ptr() for place in blocks.block_ids]
        assert places == [tensor.data_ptr() for tensor in tensors]
    assert (list(memory.layers), list(memory.into)) == (["0"], ["0.key"])


def test_scattered_sources_are_marked() -> None:
    memory = make_memory(300, 8, scattered=True)
    memory.poison()
    copy_all(memory.target_views, memory.source_views)
    memory.check()
