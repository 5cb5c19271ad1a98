"""Copies to, from and within one GPU of this machine.

Each figure stands beside what CUDA itself does in the same round. Another process has
the entries that are handed over: it prints two URLs, of a buffer on the GPU in which
one entry waits, and of one in host memory, into which parts of a tensor of the GPU are
copied as fast as they are taken. What NCCL does between two GPUs is not measured here.
Without a GPU it says what is missing.

    PYTHONPATH=tests python -m benchmarks.devices [--device cuda] [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import functools
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Final

import numpy
import torch

import asynckv
from asynckv.cli.bench.cases import GiveBack, tick, tick_beside
from asynckv.cli.bench.report import percentile
from asynckv.cli.bench.rig import WrongBytes
from asynckv.cli.bench.server import own_child, until_hung_up
from asynckv.cli.process import run
from asynckv.devices.copying import CopyPool
from asynckv.devices.cuda import CudaApi
from asynckv.devices.lanes import DeviceLanes, DeviceRows
from asynckv.devices.names import Device
from asynckv.devices.opening import OpenDevice, open_device
from asynckv.errors import GPUUnavailable
from asynckv.links.sockets import in_thread
from asynckv.transports.nccl.api import NcclApi, open_nccl
from asynckv.types import TensorSpec

__all__ = (
    "TOKENS",
    "DevicePair",
    "DeviceRow",
    "content_of",
    "device_number",
    "main",
    "open_device_pair",
    "run_device_bench",
    "serve_gpu",
)

_PARTS_AHEAD: Final = 4
"""So many parts wait in host memory, so that copies to it and from it overlap."""
TOKENS: Final = (1,)
_SPARE_BYTES: Final = 2**20
_GIVEN_BACK: Final = 1000
"""As often the bench gives an entry back at most."""


def content_of(nbytes: int) -> torch.Tensor:
    """Return what an entry of so many bytes holds."""
    return torch.arange(nbytes, dtype=torch.int32).to(torch.uint8)


async def serve_gpu(device: Device, nbytes: int, parts: int) -> None:
    """Serve entries of ``nbytes``, and of a part of that, until stdin ends.

    :raises GPUUnavailable: CuPy, torch with CUDA, a driver or the GPU is missing
    """
    opened = await open_device(device)
    if opened is None:
        raise TypeError("no GPU was named")
    part_nbytes = nbytes // parts
    async with (
        asynckv.LookupBuffer(
            nbytes + _SPARE_BYTES, device=device, max_deliver=_GIVEN_BACK
        ) as whole,
        asynckv.LookupBuffer(_PARTS_AHEAD * part_nbytes + _SPARE_BYTES) as layered,
        asynckv.serve("tcp://127.0.0.1:0", lookup=whole) as one,
        asynckv.serve("tcp://127.0.0.1:0", lookup=layered) as other,
        asyncio.TaskGroup() as tasks,
    ):
        layered.pool.lanes = opened.make_pool().lanes  # of this GPU, as opened
        filling = [
            tasks.create_task(_keep_filled(buffer, await _content(opened, size)))
            for buffer, size in ((whole, nbytes), (layered, part_nbytes))
        ]
        print(one.url, other.url, flush=True)
        await until_hung_up()
        for task in filling:
            task.cancel()


async def _content(opened: OpenDevice, nbytes: int) -> torch.Tensor:
    """Return a tensor of the GPU with something in each byte."""
    there = opened.device.empty(TensorSpec((nbytes,), "uint8"))
    pool = opened.make_pool()
    try:
        await pool.copy([content_of(nbytes)], [there])
    finally:
        pool.close()
    return there


async def _keep_filled(buffer: asynckv.LookupBuffer, tensor: torch.Tensor) -> None:
    while True:
        await buffer.insert(TOKENS, None, tensor, None, None)


class DevicePair:
    """This process's side: a peer of the GPU's buffer, and one for each other way."""

    def __init__(
        self,
        entries: asynckv.Peer,
        parts: Mapping[str, asynckv.Peer],
        nbytes: int,
        count: int,
    ) -> None:
        self.transport = entries.transport
        """How an entry of ``nbytes`` gets here."""
        self._entries, self._parts = entries, parts
        self._nbytes, self._count = nbytes, count

    async def check(self) -> None:
        """Take one of each.

        :raises WrongBytes: some byte is not what it was
        """
        part_nbytes = self._nbytes // self._count
        for peer, nbytes in (
            (self._entries, self._nbytes),
            *((peer, part_nbytes) for peer in self._parts.values()),
        ):
            entry = await peer.lookup.drop_select(TOKENS)
            if not await in_thread(partial(_is_content, entry.key, nbytes)):
                raise WrongBytes("what came from another process of the GPU")

    async def entry_s(self) -> float:
        """Return how long a plain await of an entry takes that is there."""
        while not await self._entries.lookup.peek(TOKENS):
            pass
        began_s = time.perf_counter()
        await self._entries.lookup.drop_select(TOKENS)
        return time.perf_counter() - began_s

    async def view_s(self) -> float:
        """Return how long an entry takes to be there as views, and give it back."""
        began_s = elapsed_s = time.perf_counter()
        with contextlib.suppress(GiveBack):
            async with self._entries.lookup.drop_select(TOKENS):
                elapsed_s = time.perf_counter() - began_s
                raise GiveBack
        return elapsed_s

    async def parts_s(self, way: str) -> float:
        """Return how long all parts take, while the other process copies the next."""
        began_s = time.perf_counter()
        for _ in range(self._count):
            await self._parts[way].lookup.drop_select(TOKENS)
        return time.perf_counter() - began_s


@contextlib.asynccontextmanager
async def open_device_pair(
    device: Device, nbytes: int, count: int, ways: Sequence[str], *arguments: str
) -> AsyncIterator[DevicePair]:
    """Start the other process with ``arguments``, and connect to its buffers.

    ``ways`` are those of an URL's ``?payload=`` by which ``count`` parts shall move.

    :raises ServerEnded: it could not serve
    """
    async with contextlib.AsyncExitStack() as stack:
        line = await stack.enter_async_context(own_child(*arguments))
        url, parts_url = line.split()

        async def connected(url: str) -> asynckv.Peer:
            peer = asynckv.connect(url, device=device, max_bytes=2 * nbytes)
            return await stack.enter_async_context(peer)

        entries = await connected(url)
        parts = {way: await connected(f"{parts_url}?payload={way}") for way in ways}
        yield DevicePair(entries, parts, nbytes, count)


def _is_content(found: object, nbytes: int) -> bool:
    return isinstance(found, torch.Tensor) and torch.equal(
        found.cpu(), content_of(nbytes)
    )


_ROUNDS: Final = 5
_BLOCK_NBYTES: Final = 64 * 1024
_BLOCKS_A_PART: Final = 256
_WAYS: Final = ("map", "inline")
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
    device: Device,
    told: Callable[[DeviceRow], None],
    *,
    blocks: int = 16_384,
    ticks: int = 2000,
    nccl: Callable[[], NcclApi] | None = open_nccl,
    child: Sequence[str] = (),
) -> None:
    """Measure on one GPU, and tell each row when it is there.

    All memory has the size of so many ``blocks`` of 64 KiB; lag is that of so many
    ``ticks`` of 1 ms. ``child`` are the arguments
    of the Python that serves its entries, if it is not this GPU's own.

    :raises GPUUnavailable: CuPy, torch with CUDA, NCCL, a driver or the GPU is missing
    :raises GPUFailed: CUDA or NCCL failed
    :raises WrongBytes: some byte came as another
    """
    opened = await open_device(device)
    if opened is None:
        raise TypeError("no GPU was named")
    bench = await in_thread(lambda: _Bench(opened, blocks))
    pool = opened.make_pool()
    parts = max(blocks // _BLOCKS_A_PART, 4)
    numbers = tuple(str(number) for number in (device.index, bench.nbytes, parts))
    child = child or ("-m", "benchmarks.devices", "--serve", *numbers)
    try:
        for measure in (bench.within, bench.gathered):
            told(await in_thread(measure))
        await _staged(bench, pool, told, ticks)
        opening = open_device_pair(device, bench.nbytes, parts, _WAYS, *child)
        async with opening as pair:
            await pair.check()
            await _handed_over(bench, pair, told, ticks)
            for way in _WAYS:
                told(await _in_parts(bench, pair, way))
        if nccl is not None:
            told(await in_thread(functools.partial(bench.sent_to_itself, nccl())))
    finally:
        pool.close()
        await in_thread(bench.close)


class _Bench:
    """Memory of one GPU, and CUDA's own copies of it. Everything here waits."""

    def __init__(self, opened: OpenDevice, blocks: int) -> None:
        self.cuda: CudaApi = opened.gpus.cuda
        self.device, self.blocks = opened.device.index, blocks
        self._opened = opened
        self.nbytes = blocks * _BLOCK_NBYTES
        cuda = self.cuda
        cuda.use_device(self.device)
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
        tensors = self._opened.gpus.tensors
        spec = TensorSpec((self.blocks, _BLOCK_NBYTES), "uint8")
        rows = DeviceRows(tensors.tensor_over(self._one, spec), order, self._one)
        lanes = DeviceLanes.of(lambda: self._opened.gpus)

        def gather_s() -> float:
            began_s = time.perf_counter()
            with lanes.lane(self.device) as lane:
                for _ in lane.within(rows, self._other):
                    pass
            return time.perf_counter() - began_s

        try:
            gather_s()  # loads what does it
            rounds = [(gather_s(), self.copy_s("d2d")) for _ in range(_ROUNDS)]
        finally:
            lanes.close()
        name = f"gather {self.blocks} blocks of 64 KiB"
        return self._row(name, rounds, "copy within")

    def sent_to_itself(self, nccl: NcclApi) -> DeviceRow:
        """NCCL from this GPU to itself, in a group: of a pair it needs two GPUs."""
        self.cuda.use_device(self.device)
        comm = nccl.open_comm(1, nccl.unique_id(), 0)

        def send_s() -> float:
            began_s = time.perf_counter()
            nccl.group_start()
            comm.send(self._one.address, self.nbytes, 0, self._stream)
            comm.receive(self._other.address, self.nbytes, 0, self._stream)
            nccl.group_end()
            self._stream.synchronize()
            return time.perf_counter() - began_s

        try:
            send_s()
            rounds = [(send_s(), self.copy_s("d2d")) for _ in range(_ROUNDS)]
        finally:
            comm.destroy()
        return self._row("NCCL, to itself", rounds, "copy within")

    def on_gpu(self) -> torch.Tensor:
        """Return a tensor of this GPU."""
        return self._opened.device.empty(TensorSpec((self.nbytes,), "uint8"))

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


async def _staged(
    bench: _Bench, pool: CopyPool, told: Callable[[DeviceRow], None], ticks: int
) -> None:
    """The staging alone: what an insert of a GPU's tensor does, and ``into=``."""
    there = await in_thread(bench.on_gpu)
    here = await in_thread(lambda: torch.zeros(bench.nbytes, dtype=torch.uint8))

    async def down_s() -> float:
        began_s = time.perf_counter()
        await pool.copy([there], [here], digest=False)
        return time.perf_counter() - began_s

    async def up_s() -> float:
        began_s = time.perf_counter()
        await pool.copy([here], [there], digest=False)
        return time.perf_counter() - began_s

    async def both_s() -> float:
        return await down_s() + await up_s()

    told(await bench.beside("staging, GPU to host", down_s, "d2h"))
    told(await bench.beside("staging, host to GPU", up_s, "h2d"))
    told(await _lag("staging", ticks, both_s))


async def _handed_over(
    bench: _Bench, pair: DevicePair, told: Callable[[DeviceRow], None], ticks: int
) -> None:
    """From the GPU of another process to that of this one, which is the same."""
    how = f"by {pair.transport}, from another process"
    told(await bench.beside(f"entry {how}", pair.entry_s, "d2d"))
    views_s = [await pair.view_s() for _ in range(_ROUNDS)]
    copies_s = [await pair.entry_s() for _ in range(_ROUNDS)]
    views_ms, copies_ms = (
        1e3 * statistics.median(some) for some in (views_s, copies_s)
    )
    told(DeviceRow(f"views {how}", "ms", views_ms, copies_ms, "copied"))
    told(await _lag(f"taking entries {how}", ticks, pair.entry_s))


async def _in_parts(bench: _Bench, pair: DevicePair, way: str) -> DeviceRow:
    """The same by pinned memory of both; CUDA's way that is slower is the limit."""
    slower = max("d2h", "h2d", key=bench.copy_s)
    name = f"parts by {way}, from another process"
    return await bench.beside(name, lambda: pair.parts_s(way), slower)


async def _lag(
    doing: str, ticks: int, do: Callable[[], Awaitable[object]]
) -> DeviceRow:
    idle_ms = await tick(ticks)
    busy_ms, _ = await tick_beside(ticks, do)
    late_ms = percentile(busy_ms, 0.99)
    most_ms = max(busy_ms) - max(idle_ms)
    name = f"loop lag {doing}, p99 (max {most_ms:+.1f} ms)"
    return DeviceRow(name, "ms", late_ms, percentile(idle_ms, 0.99), "idle loop")


def _print_row(row: DeviceRow) -> None:
    print(row.line(), flush=True)


def main() -> None:
    """Measure and print; say what is missing where there is no GPU."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--serve", type=int, nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        number, nbytes, parts = given.serve
        run(serve_gpu(Device(number), nbytes, parts))
        return
    blocks, ticks = (256, 200) if given.quick else (16_384, 2000)
    try:
        device = Device(device_number(given.device))
        run(run_device_bench(device, _print_row, blocks=blocks, ticks=ticks))
    except GPUUnavailable as exc:
        print(f"nothing was measured: {exc}")


if __name__ == "__main__":
    main()
