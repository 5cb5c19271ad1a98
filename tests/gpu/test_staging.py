"""Pinned staging and blocks on a real GPU, against torch. ``nox -s gpu`` runs it."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import AsyncIterator, Callable

import pytest
import torch

import asynckv
from asynckv.cli.bench.cases import tick
from asynckv.cli.bench.report import percentile
from asynckv.devices.block_copies import BlockCopier, CopyDirection
from asynckv.devices.copying import CopyPool
from asynckv.devices.tensors import open_gpus
from asynckv.tensors.views import bytes_of
from asynckv.types import DTYPE_NBYTES, TensorSpec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        importlib.util.find_spec("cupy") is None,
        reason='CuPy is not installed: pip install ".[cuda12]"',
    ),
]

_LARGE = 64 * 2**20
_DTYPES = [name for name in DTYPE_NBYTES if hasattr(torch, name)]


@pytest.fixture(scope="module", autouse=True)
def cuda_is_started() -> None:
    """What CUDA opens for the whole process is not what a test leaves behind."""
    torch.zeros(1, device="cuda").add_(1)
    cuda = open_gpus().cuda
    cuda.use_device(0)
    cuda.host_free(cuda.host_alloc(4096))
    stream = cuda.stream()
    stream.synchronize()
    stream.close()


@pytest.fixture
async def pool() -> AsyncIterator[CopyPool]:
    pool = CopyPool()
    yield pool
    pool.close()


def _a_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def _keep_busy() -> None:
    """Give the current stream about 0.1 s to do."""
    torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]


def _random(nbytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bytes(bytes_of(one.cpu())) == bytes(bytes_of(other.cpu()))


@pytest.mark.parametrize("dtype", _DTYPES)
async def test_every_dtype_comes_back_bit_for_bit(pool: CopyPool, dtype: str) -> None:
    content = _random(48_000).view(getattr(torch, dtype))
    there = torch.zeros(48_000, dtype=torch.uint8, device="cuda")
    back = torch.zeros(48_000, dtype=torch.uint8)
    await pool.copy([content], [there.view(content.dtype)], digest=False)
    await pool.copy([there], [back], digest=False)
    assert torch.equal(back, content.view(torch.uint8))


@pytest.mark.parametrize("nbytes", [1, 8 * 2**20 - 1, 8 * 2**20 + 1, _LARGE + 3])
async def test_sizes_around_a_chunk_come_back(pool: CopyPool, nbytes: int) -> None:
    content, back = _random(nbytes), torch.zeros(nbytes, dtype=torch.uint8)
    await pool.copy([content.cuda()], [back], digest=False)
    assert torch.equal(back, content)


async def test_strides_are_resolved_on_the_gpu(pool: CopyPool) -> None:
    content, back = torch.rand(300, 200), torch.zeros(200, 300)
    await pool.copy([content.cuda().T], [back], digest=False)
    assert torch.equal(back, content.T)


async def test_what_is_read_is_what_the_callers_own_stream_had_made(
    pool: CopyPool,
) -> None:
    made, back = torch.zeros(_LARGE, device="cuda"), torch.zeros(_LARGE)
    torch.cuda.synchronize()
    with torch.cuda.stream(_a_stream()):
        _keep_busy()
        made.fill_(3)
        copying = asyncio.ensure_future(pool.copy([made], [back], digest=False))
        await asyncio.sleep(0)
    await copying
    assert bool((back == 3).all())


async def test_what_is_written_is_written_after_the_callers_own_stream_has_read(
    pool: CopyPool,
) -> None:
    target = torch.full((2**20,), 1.0, device="cuda")
    seen = torch.empty_like(target)
    torch.cuda.synchronize()
    with torch.cuda.stream(_a_stream()):
        _keep_busy()
        seen.copy_(target)
        copying = asyncio.ensure_future(
            pool.copy([torch.full((2**20,), 2.0)], [target], digest=False)
        )
        await asyncio.sleep(0)
    await copying
    torch.cuda.synchronize()
    assert bool((seen == 1).all()) and bool((target == 2).all())


async def test_a_reference_dropped_in_the_middle_does_not_change_what_is_copied(
    pool: CopyPool,
) -> None:
    back = torch.zeros(_LARGE, dtype=torch.uint8)
    copying = asyncio.ensure_future(
        pool.copy([torch.full((_LARGE,), 7, dtype=torch.uint8, device="cuda")], [back])
    )
    while not copying.done():
        # Takes what the caching allocator may have taken back.
        torch.full((_LARGE,), 9, dtype=torch.uint8, device="cuda")
        await asyncio.sleep(0)
    await copying
    assert bool((back == 7).all())


async def test_a_cancelled_copy_leaves_the_target_alone_afterwards(
    pool: CopyPool,
) -> None:
    target = torch.zeros(4 * _LARGE, dtype=torch.uint8, device="cuda")
    source = torch.full((4 * _LARGE,), 5, dtype=torch.uint8)
    copying = asyncio.ensure_future(pool.copy([source], [target], digest=False))
    while not bool(target[0] == 5) and not copying.done():  # noqa: ASYNC110
        await asyncio.sleep(0)
    copying.cancel()
    await asyncio.wait({copying})
    target.fill_(1)
    torch.cuda.synchronize()
    await asyncio.sleep(0.2)
    assert bool((target == 1).all())


async def test_memory_of_cuda_is_a_tensor_of_every_dtype() -> None:
    gpus = open_gpus()
    gpus.cuda.use_device(0)
    memory = gpus.cuda.malloc(4096)
    for dtype in _DTYPES:
        count = 4096 // DTYPE_NBYTES[dtype]
        tensor = gpus.tensors.tensor_over(memory, TensorSpec((count,), dtype))
        found = gpus.tensors.memory_of(tensor)
        assert (found.address, found.nbytes) == (memory.address, 4096)
        assert found.ready is not None
        found.ready.synchronize()
    del tensor, found
    gpus.cuda.free(memory)


@pytest.mark.parametrize("payload", ["map", "inline"])
async def test_an_entry_goes_from_gpu_to_gpu_over_a_link(
    pool: CopyPool, payload: str
) -> None:
    key = _random(_LARGE)
    into = torch.zeros(_LARGE, dtype=torch.uint8, device="cuda")
    async with (
        asynckv.LookupBuffer("512MiB") as buffer,
        asynckv.serve("tcp://127.0.0.1:0", lookup=buffer) as server,
        asynckv.connect(f"{server.url}?payload={payload}") as peer,
    ):
        await buffer.insert([1], None, key.cuda(), None, None)
        async with peer.lookup.drop_select([1]) as entry:
            assert isinstance(entry.key, torch.Tensor)
            await pool.copy([entry.key], [into], digest=False)
    assert _same(into, key)


async def test_a_remote_insert_takes_tensors_of_a_gpu() -> None:
    key, value = _random(_LARGE), _random(100)
    async with (
        asynckv.LookupBuffer("512MiB") as buffer,
        asynckv.serve("tcp://127.0.0.1:0", lookup=buffer) as server,
        asynckv.connect(server.url) as peer,
    ):
        await peer.lookup.insert([1], None, key.cuda(), value.cuda(), None)
        into = torch.zeros(_LARGE, dtype=torch.uint8, device="cuda")
        entry = await buffer.drop_select([1], into={"key": into})
    assert _same(into, key) and isinstance(entry.value, torch.Tensor)
    assert _same(entry.value, value)


@pytest.mark.parametrize("direction", ["d2h", "h2d", "d2d"])
@pytest.mark.parametrize("block_shape", [(4, 1024), (3, 5)])
@pytest.mark.parametrize("block_dim", [0, 1])
async def test_blocks_go_where_torch_would_put_them(
    pool: CopyPool,
    direction: CopyDirection,
    block_shape: tuple[int, ...],
    block_dim: int,
) -> None:
    shape = (2,) * block_dim + (64,) + block_shape
    one = {f"layers.{n}": torch.rand(shape).to(torch.bfloat16) for n in range(4)}
    other = {layer: torch.zeros_like(cache) for layer, cache in one.items()}
    ids, places = torch.randperm(64)[:40], torch.randperm(64)[:40]
    expected = {
        layer: torch.zeros_like(cache).index_copy_(
            block_dim, places, cache.index_select(block_dim, ids)
        )
        for layer, cache in one.items()
    }
    source = {k: v.cuda() for k, v in one.items()} if direction[0] == "d" else one
    target = {k: v.cuda() for k, v in other.items()} if direction[2] == "d" else other
    await BlockCopier(pool, block_dim=block_dim).copy(
        source, target, ids, places, direction
    )
    assert all(_same(target[layer], expected[layer]) for layer in expected)


async def test_the_loop_is_not_kept_while_all_of_it_runs(
    pool: CopyPool, record_property: Callable[[str, object], None]
) -> None:
    there = torch.zeros(8 * _LARGE, dtype=torch.uint8, device="cuda")
    here = torch.zeros(8 * _LARGE, dtype=torch.uint8)
    await pool.copy([there], [here])  # opens CUDA
    idle_ms = await tick(1000)
    ticker = asyncio.ensure_future(tick(1000))
    while not ticker.done():
        await pool.copy([there], [here])
        await pool.copy([here], [there], digest=False)
    late_ms = await ticker
    p99_ms = percentile(late_ms, 0.99) - percentile(idle_ms, 0.99)
    most_ms = max(late_ms) - max(idle_ms)
    figure = f"staging: the loop is late by p99 {p99_ms:.2f} ms, max {most_ms:.2f} ms"
    record_property("figure", figure)
    assert p99_ms <= 2 and most_ms <= 15
