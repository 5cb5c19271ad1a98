from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeAlias

import pytest
import torch

from asynckv.devices.block_copies import BlockCopier, CopyDirection, copy_kv_blocks
from asynckv.devices.copying import CopyPool

_Cancel: TypeAlias = Callable[[], Coroutine[Any, Any, None]]
_Begin: TypeAlias = Callable[
    [Coroutine[Any, Any, None]], tuple[asyncio.Task[None], _Cancel]
]


def _caches(blocks: int, width: int, fill: int) -> dict[str, torch.Tensor]:
    return {
        f"layers.{layer}": torch.full((blocks, width), fill, dtype=torch.uint8)
        for layer in range(4)
    }


@pytest.mark.parametrize("width", [16, 2**19])
async def test_small_and_large_blocks_are_copied(pool: CopyPool, width: int) -> None:
    src, dst = _caches(4, width, 1), _caches(4, width, 0)
    await BlockCopier(pool).copy(src, dst, [1, 2, 0], [3, 0, 1])
    assert [dst["layers.3"][block, -1].item() for block in range(4)] == [1, 1, 0, 1]


async def test_large_blocks_are_copied_in_threads_of_the_pool(pool: CopyPool) -> None:
    src, dst = _caches(24, 2**20, 1), _caches(24, 2**20, 0)
    copier, before = BlockCopier(pool), threading.active_count()
    task = asyncio.create_task(copier.copy(src, dst, range(24), range(24)))
    await asyncio.sleep(0)
    assert not task.done()
    assert threading.active_count() == before + 2
    await task
    assert all(cache.all() for cache in dst.values())


async def test_after_a_cancelled_copy_nothing_is_written_any_more(
    pool: CopyPool, begin: _Begin
) -> None:
    src, dst = _caches(24, 2**20, 1), _caches(24, 2**20, 0)
    _, cancel = begin(BlockCopier(pool).copy(src, dst, range(24), range(24)))
    while not dst["layers.0"][0, 0]:  # noqa: ASYNC110
        await asyncio.sleep(0)
    await cancel()
    left = {layer: cache.clone() for layer, cache in dst.items()}
    assert not all(cache.all() for cache in dst.values())
    await pool.copy([torch.ones(2**17)], [torch.zeros(2**17)])
    assert all(torch.equal(left[layer], dst[layer]) for layer in dst)


class _Own:
    """An engine's operation that notes where it ran."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []
        self.gate = threading.Event()
        self.gate.set()

    def __call__(
        self,
        src: Mapping[str, torch.Tensor],
        dst: Mapping[str, torch.Tensor],
        src_ids: list[int],
        dst_ids: list[int],
        direction: CopyDirection,
    ) -> None:
        self.threads.append(threading.current_thread())
        self.gate.wait(10)
        copy_kv_blocks(src, dst, src_ids, dst_ids, direction)


async def test_an_engines_own_operation_runs_in_a_thread(pool: CopyPool) -> None:
    copier, own = BlockCopier(pool), _Own()
    copier.set_host_xfer_buffer_ops(own)
    src, dst = _caches(4, 16, 1), _caches(4, 16, 0)
    await copier.copy(src, dst, torch.tensor([1]), torch.tensor([2]), "h2d")
    assert dst["layers.0"][2].all()
    assert [thread.name.startswith("asynckv-copy") for thread in own.threads] == [True]
    copier.set_host_xfer_buffer_ops(None)
    await copier.copy(src, dst, [1], [3])
    assert len(own.threads) == 1


async def test_a_cancelled_call_waits_for_an_engines_own_operation(
    pool: CopyPool,
) -> None:
    copier, own = BlockCopier(pool), _Own()
    own.gate.clear()
    copier.set_host_xfer_buffer_ops(own)
    src, dst = _caches(4, 16, 1), _caches(4, 16, 0)
    task = asyncio.create_task(copier.copy(src, dst, [1], [2], "h2d"))
    while not own.threads:  # noqa: ASYNC110
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    own.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert dst["layers.3"][2].all()


async def test_what_is_refused_is_refused_whoever_copies(pool: CopyPool) -> None:
    copier, own = BlockCopier(pool), _Own()
    src, dst = _caches(4, 16, 1), _caches(4, 16, 0)
    for operation in (None, own):
        copier.set_host_xfer_buffer_ops(operation)
        with pytest.raises(ValueError, match="2 blocks cannot go into 1"):
            await copier.copy(src, dst, [1, 2], [1], "h2d")
        await copier.copy(src, dst, [], [], "h2d")
    with pytest.raises(ValueError, match="needs a direction"):
        await copier.copy(src, dst, [1], [1])
    assert own.threads == []


class _Watched(torch.Tensor):
    """A cache that notes which threads look at it: at its shape, or its blocks."""

    threads: set[int]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        cls.threads.add(threading.get_ident())
        run = super().__torch_function__
        return run(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("ids", [[*range(24, 99)], [1, 1]])
async def test_no_cache_is_looked_at_on_the_loop(
    pool: CopyPool, ids: list[int]
) -> None:
    src, dst = (
        {f"layers.{layer}": torch.full((99, 16), fill) for layer in range(24)}
        for fill in (1, 0)
    )
    _Watched.threads = set()
    watched: dict[str, torch.Tensor] = {
        layer: cache.as_subclass(_Watched) for layer, cache in src.items()
    }
    watched["layers.0"] = src["layers.0"]  # it says on which device they all are
    with contextlib.suppress(ValueError):
        await BlockCopier(pool).copy(watched, dst, ids, ids)
    assert _Watched.threads
    assert threading.get_ident() not in _Watched.threads
    rows = {int(cache.all(1).sum()) for cache in dst.values()}
    assert rows == {0 if ids == [1, 1] else len(ids)}


async def test_ids_may_be_changed_while_they_are_copied(pool: CopyPool) -> None:
    src, dst = _caches(99, 2**14, 1), _caches(99, 2**14, 0)
    ids = [*range(80)]
    copied = asyncio.create_task(BlockCopier(pool).copy(src, dst, ids, ids))
    await asyncio.sleep(0)
    ids[:] = [98] * 80
    await copied
    assert dst["layers.3"].all(1).tolist() == [True] * 80 + [False] * 19


async def test_keys_may_come_before_values(pool: CopyPool) -> None:
    src, dst = ({"a": torch.full((2, 4, 3), fill)} for fill in (1, 0))
    await BlockCopier(pool, block_dim=1).copy(src, dst, [3], [0])
    assert dst["a"].sum((0, 2)).tolist() == [6, 0, 0, 0]
