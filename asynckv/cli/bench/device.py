"""``asynckv bench --device cuda``: copies to, from and within one GPU of this machine.

Each figure stands beside what CUDA itself does in the same round. It is one process:
what two of them do over CUDA IPC or NCCL is measured elsewhere.
"""

from __future__ import annotations

import asyncio
import dataclasses
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Final

import numpy
import torch

import asynckv
from asynckv.cli.bench.figures import percentile
from asynckv.cli.bench.lag import tick
from asynckv.errors import GPUUnavailable
from asynckv.links.offloading import in_thread
from asynckv.tensors.copying import CopyPool
from asynckv.tensors.cuda import CudaApi
from asynckv.tensors.device_blocks import DeviceBlocks
from asynckv.tensors.device_tensors import Gpus, open_gpus

__all__ = ("DeviceRow", "device_number", "run_device_bench")

_ROUNDS: Final = 5
_BLOCK_NBYTES: Final = 64 * 1024
_Timed = Callable[[], Awaitable[float]]


@dataclasses.dataclass(frozen=True)
class DeviceRow:
    """One case: GB/s of ours and of CUDA's own copy, or milliseconds of lag."""

    name: str
    unit: str
    value: float
    baseline: float
    baseline_name: str

    def line(self) -> str:
        """Say it in one line."""
        ratio = self.value / self.baseline if self.baseline else float("inf")
        return (
            f"{self.name:<44} {self.value:8.2f} {self.unit:<4} "
            f"{self.baseline_name}: {self.baseline:.2f}, ratio {ratio:.2f}"
        )


def device_number(device: str) -> int:
    """Return which GPU ``cuda`` or ``cuda:N`` is.

    :raises GPUUnavailable: it is no GPU of CUDA's
    """
    kind, _, number = device.partition(":")
    if kind != "cuda" or (number and not number.isdecimal()):
        raise GPUUnavailable(
            f"--device {device} is no GPU", hint="cuda, or cuda:1 for the second one"
        )
    return int(number or 0)


async def run_device_bench(
    device: int, told: Callable[[DeviceRow], None], *, quick: bool = False
) -> None:
    """Measure on one GPU, and tell each row when it is there.

    :raises GPUUnavailable: CuPy, torch with CUDA, a driver or the GPU is missing
    :raises GPUFailed: CUDA failed
    """
    gpus = await in_thread(open_gpus)
    if not torch.cuda.is_available():
        raise GPUUnavailable(
            "this torch has no CUDA", hint="install torch for CUDA: pytorch.org"
        )
    blocks = 256 if quick else 16_384
    bench = await in_thread(lambda: _Bench(gpus, device, blocks))
    pool = CopyPool()
    try:
        for measure in (bench.within, bench.gathered):
            told(await in_thread(measure))
        await _staged(bench, pool, told)
        for payload in ("map", "inline"):
            told(await _handed_over(bench, pool, payload))
        told(await _lag(bench, pool, 200 if quick else 2000))
    finally:
        pool.close()
        await in_thread(bench.close)


class _Bench:
    """Memory of one GPU, and CUDA's own copies of it. Everything here waits."""

    def __init__(self, gpus: Gpus, device: int, blocks: int) -> None:
        self.cuda: CudaApi = gpus.cuda
        self.device, self.blocks = device, blocks
        self.nbytes = blocks * _BLOCK_NBYTES
        cuda = self.cuda
        cuda.use_device(device)
        self._one, self._other = cuda.malloc(self.nbytes), cuda.malloc(self.nbytes)
        self._pinned = cuda.host_alloc(self.nbytes)
        self._stream = cuda.stream()

    def copy_s(self, way: str) -> float:
        """Return how long one plain copy takes: ``d2d``, ``d2h`` or ``h2d``."""
        here, there = {
            "d2d": (self._one.address, self._other.address),
            "d2h": (self._one.address, self._pinned.address),
            "h2d": (self._pinned.address, self._one.address),
        }[way]
        self.cuda.use_device(self.device)
        self._stream.synchronize()
        began_s = time.perf_counter()
        self.cuda.copy(there, here, self.nbytes, self._stream)
        self._stream.synchronize()
        return time.perf_counter() - began_s

    def within(self) -> DeviceRow:
        """CUDA's copy within the GPU, beside itself: what the others are held to."""
        self.copy_s("d2d")
        rounds = [(self.copy_s("d2d"), self.copy_s("d2d")) for _ in range(_ROUNDS)]
        return self._row("copy within the GPU (baseline)", rounds, "again")

    def gathered(self) -> DeviceRow:
        """Every second block of twice as many would not fit: all, in another order."""
        order = numpy.random.default_rng(1).permutation(self.blocks)
        offsets = order.astype(numpy.uint64) * numpy.uint64(_BLOCK_NBYTES)
        sources = offsets + numpy.uint64(self._one.address)
        places = numpy.arange(self.blocks, dtype=numpy.uint64)
        targets = places * numpy.uint64(_BLOCK_NBYTES) + numpy.uint64(
            self._other.address
        )
        blocks = DeviceBlocks(lambda: self.cuda, self.device)

        def gather_s() -> float:
            began_s = time.perf_counter()
            blocks.copy(sources, targets, _BLOCK_NBYTES)
            return time.perf_counter() - began_s

        try:
            gather_s()  # compiles
            rounds = [(gather_s(), self.copy_s("d2d")) for _ in range(_ROUNDS)]
        finally:
            blocks.close()
        name = f"gather {self.blocks} blocks of 64 KiB"
        return self._row(name, rounds, "copy within")

    def close(self) -> None:
        """Give the memory back."""
        self.cuda.use_device(self.device)
        self._stream.close()
        self.cuda.free(self._one)
        self.cuda.free(self._other)
        self._pinned.view.release()
        self.cuda.host_free(self._pinned)

    def _row(
        self, name: str, rounds: list[tuple[float, float]], beside: str
    ) -> DeviceRow:
        ours, theirs = (
            self.nbytes / statistics.median(times) / 1e9
            for times in zip(*rounds, strict=True)
        )
        return DeviceRow(name, "GB/s", ours, theirs, beside)

    async def beside(self, name: str, ours: _Timed, way: str) -> DeviceRow:
        """Measure in turns with a plain copy."""
        await ours()
        rounds = [
            (await ours(), await in_thread(lambda: self.copy_s(way)))
            for _ in range(_ROUNDS)
        ]
        return self._row(name, rounds, f"one {way} copy")


def _on_gpu(bench: _Bench) -> torch.Tensor:
    device = torch.device("cuda", bench.device)
    return torch.full((bench.nbytes,), 1, dtype=torch.uint8, device=device)


async def _staged(
    bench: _Bench, pool: CopyPool, told: Callable[[DeviceRow], None]
) -> None:
    """The staging alone: what an insert of a GPU's tensor does, and ``into=``."""
    there = await in_thread(lambda: _on_gpu(bench))
    here = await in_thread(lambda: torch.zeros(bench.nbytes, dtype=torch.uint8))

    async def down_s() -> float:
        began_s = time.perf_counter()
        await pool.copy([there], [here], digest=False)
        return time.perf_counter() - began_s

    async def up_s() -> float:
        began_s = time.perf_counter()
        await pool.copy([here], [there], digest=False)
        return time.perf_counter() - began_s

    told(await bench.beside("staging, GPU to host", down_s, "d2h"))
    told(await bench.beside("staging, host to GPU", up_s, "h2d"))


async def _handed_over(bench: _Bench, pool: CopyPool, payload: str) -> DeviceRow:
    """From a GPU's tensor through a served buffer and a link into another."""
    source, target = await in_thread(lambda: (_on_gpu(bench), _on_gpu(bench)))
    async with (
        asynckv.LookupBuffer(2 * bench.nbytes + 2**20) as buffer,
        asynckv.serve("tcp://127.0.0.1:0", lookup=buffer) as server,
        asynckv.connect(
            f"{server.url}?payload={payload}", max_bytes=2 * bench.nbytes
        ) as peer,
    ):

        async def hand_over_s() -> float:
            began_s = time.perf_counter()
            await buffer.insert([1], None, source, None, None)
            async with peer.lookup.drop_select([1]) as entry:
                if isinstance(entry.key, torch.Tensor):
                    await pool.copy([entry.key], [target], digest=False)
            return time.perf_counter() - began_s

        name = f"GPU to GPU over a link by {peer.transport}"
        return await bench.beside(name, hand_over_s, "d2h")


async def _lag(bench: _Bench, pool: CopyPool, ticks: int) -> DeviceRow:
    there = await in_thread(lambda: _on_gpu(bench))
    here = await in_thread(lambda: torch.zeros(bench.nbytes, dtype=torch.uint8))
    idle_ms = await tick(ticks)
    ticker = asyncio.create_task(tick(ticks), name="ticker of the bench")
    try:
        while not ticker.done():
            await pool.copy([there], [here])
            await pool.copy([here], [there], digest=False)
    finally:
        ticker.cancel()
        await asyncio.wait({ticker})
    late_ms = percentile(ticker.result(), 0.99)
    most_ms = max(ticker.result())
    name = f"loop lag while staging, p99 (max {most_ms:.1f} ms)"
    return DeviceRow(name, "ms", late_ms, percentile(idle_ms, 0.99), "idle loop")
