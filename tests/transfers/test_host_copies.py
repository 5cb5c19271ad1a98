from __future__ import annotations

import asyncio
import threading
import weakref
from typing import Any

import numpy
import pytest

from asynckv.testing.blocked import until, until_blocked
from asynckv.testing.cancellation import CancelMode, Outcome, sweep_cancellation
from asynckv.testing.lookup_checks.values import MIB, noise
from asynckv.transfers.host_copies import HostCopies
from harness.fake_gpus import FakeGpus
from harness.gpu_pairs import open_gpu_pair


async def test_memory_counts_until_the_last_view_of_it_is_gone() -> None:
    copies = HostCopies(10)
    memory = await copies.empty(6)
    view = memory[2:4]
    del memory
    await asyncio.sleep(0)
    assert copies.used_bytes == 6
    del view
    await until(lambda: not copies.used_bytes)


async def test_who_asked_first_is_first() -> None:
    copies = HostCopies(10)
    memory = [await copies.empty(6)]
    large, small = (asyncio.create_task(copies.empty(n)) for n in (8, 1))
    await until_blocked(large, small)
    memory.clear()
    assert (await large).nbytes == 8 and (await small).nbytes == 1


async def test_what_is_longer_than_the_bound_is_alone() -> None:
    copies = HostCopies(10)
    memory = [await copies.empty(1)]
    longer, other = (asyncio.create_task(copies.empty(n)) for n in (20, 1))
    await until_blocked(longer, other)
    memory.clear()
    memory.append(await longer)
    del longer
    await until_blocked(other)
    assert copies.used_bytes == 20
    memory.clear()
    await other


async def test_what_is_nothing_has_memory_all_the_same() -> None:
    assert (await HostCopies(0).empty(0)).nbytes == 0


async def test_views_may_end_in_any_thread() -> None:
    copies = HostCopies(10)
    memory = [await copies.empty(6)]
    thread = threading.Thread(target=memory.clear)
    thread.start()
    thread.join()
    await until(lambda: not copies.used_bytes)


def test_views_may_outlive_the_loop() -> None:
    async def take() -> memoryview:
        return await HostCopies(10).empty(6)

    assert asyncio.run(take()).nbytes == 6


async def test_memory_that_cannot_be_had_counts_for_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*anything: object) -> None:
        raise MemoryError

    copies = HostCopies(10)
    with monkeypatch.context() as patch:
        patch.setattr(numpy, "empty", refuse)
        with pytest.raises(MemoryError):
            await copies.empty(6)
    assert not copies.used_bytes


@pytest.mark.parametrize("mode", ["task", "scope", "again", "completion"])
async def test_a_cancelled_wait_leaves_no_trace(mode: CancelMode) -> None:
    copies = HostCopies(10)
    held = list[memoryview]()

    async def hold() -> None:
        held.append(await copies.empty(10))
        asyncio.get_running_loop().call_soon(held.clear)

    async def take() -> None:
        await copies.empty(6)  # and forgotten

    async def check(k: int, how: CancelMode, outcome: Outcome[None]) -> None:
        held.clear()
        await until(lambda: not copies.used_bytes)
        assert not copies._line

    await sweep_cancellation(take, check, before=hold, modes=(mode,))


async def test_one_that_waits_no_longer_lets_the_next_one_go_on() -> None:
    copies = HostCopies(10)
    memory = await copies.empty(6)
    large, small = (asyncio.create_task(copies.empty(n)) for n in (8, 1))
    await until_blocked(large, small)
    large.cancel()
    assert (await small).nbytes == 1
    assert memory.nbytes == 6


async def test_a_peer_that_never_reads_has_no_more_than_the_bound_in_host_memory(
    gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty, arrays = HostCopies.empty, list[weakref.ref[Any]]()
    most = 0

    async def noted(copies: HostCopies, nbytes: int) -> memoryview:
        nonlocal most
        memory = await empty(copies, nbytes)
        arrays.append(weakref.ref(memory.obj))
        alive = [array for ref in arrays if (array := ref()) is not None]
        most = max(most, sum(array.nbytes for array in alive))
        return memory

    monkeypatch.setattr(HostCopies, "empty", noted)
    async with open_gpu_pair(gpus, device=None, url="?payload=inline") as pair:
        link = pair.peer._linked()
        monkeypatch.setattr(link.payload._lanes, "receive", lambda: None)  # type: ignore[attr-defined]
        (services,), copies = pair.server._services, pair.devices.copies
        copies.max_bytes = 2 * MIB
        layers = {str(n): noise(MIB, n) for n in range(15)}
        await pair.buffer.insert([1], None, layers, None, None)
        selecting = asyncio.create_task(pair.peer.lookup.drop_select([1]))
        await until(lambda: most == 2 * MIB and bool(copies._line))
        assert services.lookup is not None
        tasks = [t for t in asyncio.all_tasks() if "asynckv: transfer" in t.get_name()]
        assert len(tasks) == len(services.lookup.tasks)
        await until_blocked(selecting, *tasks)
        assert most == copies.used_bytes == 2 * MIB
        selecting.cancel()
        await until(lambda: not copies._line)
        pair.peer.abort()
        await until(lambda: not copies.used_bytes)
    assert most == 2 * MIB
