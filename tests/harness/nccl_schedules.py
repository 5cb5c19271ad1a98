"""One random schedule of an NCCL transport: sends, stops, errors, deaths. Never stuck.

Memory is dropped as soon as its owner may do so: what the fakes say of it later is a
broken promise. A seed chooses what is done; threads choose when.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Callable
from typing import Final

import numpy

from asynckv.errors import GPUFailed
from asynckv.testing.blocked import until
from asynckv.transports.nccl.directions import NcclSettings
from asynckv.transports.nccl.transport import NcclTransport
from asynckv.transports.nccl.worker import DeviceWorker
from harness.fake_gpus import FakeGpus, FakeProcess
from harness.nccl_pairs import NcclPair

__all__ = ("Outcome", "run_schedule")

_SIZES: Final = (0, 1, 63, 64, 65, 200)
_CHUNK_BYTES: Final = 64
_MOST_PARTS: Final = 10
_ENDS_WITHIN_S: Final = 20.0


@dataclasses.dataclass
class Outcome:
    """What became of a schedule's parts."""

    moved: int = 0
    failed: int = 0
    stopped: int = 0
    lost: list[Exception] = dataclasses.field(default_factory=list)
    given_up: int = 0


class _End:
    """One side's end of one part, and its memory."""

    def __init__(
        self,
        process: FakeProcess,
        worker: DeviceWorker,
        transfer: int,
        content: bytes,
    ) -> None:
        self.process = process
        self._worker = worker
        self.transfer = transfer
        self.is_over = False
        self.told: tuple[bytes, BaseException | None] | None = None
        self.faults: list[str] = []
        self.memory = process.cuda.malloc(len(content))
        process.cuda.view(self.memory)[:] = numpy.frombuffer(content, numpy.uint8)

    def content(self) -> bytes:
        """What is there now."""
        return self.process.cuda.view(self.memory).tobytes()

    def done(self, digest: bytes, error: BaseException | None) -> None:
        """The transport tells of it: the memory is the owner's again."""
        if self.is_over:
            self.faults.append("told twice, or after it was stopped")
        self.told = digest, error
        if error is not None:
            self.drop()
        self.is_over = True

    def drop(self) -> None:
        """Its owner uses the memory for something else, unless it is kept for ever."""
        self.is_over = True
        if self._worker.error is not None:
            return
        try:
            self.process.cuda.drop(self.memory)
        except GPUFailed:
            return  # its process has died


class _Schedule:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.outcome = Outcome()
        self.gpus = FakeGpus(2, seed=seed, max_delay=self.rng.choice((0, 0, 3)))
        settings = NcclSettings(
            chunk_bytes=_CHUNK_BYTES,
            max_operations=self.rng.choice((1, 2, 4)),
            max_bytes=self.rng.choice((64, 128, 1024)),
            open_s=5.0,
            patience_s=0.3,
        )
        self.pair = NcclPair(
            self.gpus,
            self.outcome.lost.append,
            self.outcome.lost.append,
            settings=settings,
            stuck_s=3.0,
            abort_grace_s=0.1,
        )
        self.sides = (self.pair.near, self.pair.far)
        # Before anything moves: to allocate is to wait for all of a GPU's work.
        self.plan = [self._couple(number) for number in range(_MOST_PARTS)]
        self.couples: list[tuple[_End, _End, bytes]] = []
        self.waits: list[asyncio.Task[None]] = []

    async def run(self) -> Outcome:
        try:
            async with asyncio.timeout(_ENDS_WITHIN_S):
                await self.pair.open()
                for _ in range(self.rng.randint(2, _MOST_PARTS)):
                    self._choose()()
                    for _ in range(self.rng.choice((0, 0, 1, 3, 10, 40))):
                        await asyncio.sleep(0)
                await self._settle()
        finally:
            await self.pair.aclose()
        self._judge()
        return self.outcome

    def _choose(self) -> Callable[[], None]:
        rare: tuple[Callable[[], None], ...] = (
            self._stop,
            self._stop,
            self._stop,
            self._fail_later,
            self._fail_call,
            self._be_silent,
            self._abort,
            self._die,
            self._never_quiet,
        )
        is_rare = bool(self.couples) and self.rng.random() < 0.35
        return self.rng.choice(rare) if is_rare else self._move

    def _couple(self, number: int) -> tuple[_End, _End, bytes]:
        rng, sender = self.rng, self.rng.randrange(2)
        content = rng.randbytes(rng.choice(_SIZES))
        ends = []
        for side, data in ((sender, content), (1 - sender, bytes(len(content)))):
            process, worker = self.pair.processes[side], self.pair.workers[side]
            process.cuda.use_device(side)
            transfer = 2 * number + sender
            ends.append(_End(process, worker, transfer, data))
        return ends[0], ends[1], content

    def _move(self) -> None:
        couple = self.plan[len(self.couples)]
        source, target, _ = couple
        sender = self.pair.processes.index(source.process)
        self.sides[1 - sender].receive(target.transfer, 0, target.memory, target.done)
        self.sides[sender].send(source.transfer, 0, source.memory, source.done)
        self.couples.append(couple)

    def _stop(self) -> None:
        source, target, _ = self.rng.choice(self.couples)
        end = self.rng.choice((source, target))
        if not end.is_over:
            side = self.sides[self.pair.processes.index(end.process)]
            end.is_over = True
            self.outcome.stopped += 1
            side.stop(end.transfer)
            self.waits.append(asyncio.create_task(self._quiesce(side, end)))

    async def _quiesce(self, side: NcclTransport, end: _End) -> None:
        await side.quiesce(end.transfer)
        end.drop()

    def _fail_later(self) -> None:
        nccl = self.rng.choice(self.pair.processes).nccl
        nccl.async_error = self.rng.choice((GPUFailed("remote", code=6), KeyError(7)))
        later_s = self.rng.choice((0.0, 0.01, 0.05))
        loop = asyncio.get_running_loop()
        loop.call_later(later_s, lambda: setattr(nccl, "async_error", None))

    def _fail_call(self) -> None:
        nccl = self.rng.choice(self.pair.processes).nccl
        nccl.call_error = GPUFailed("invalid usage", code=5)

    def _be_silent(self) -> None:
        nccl = self.rng.choice(self.pair.processes).nccl
        nccl.is_silent = True
        loop = asyncio.get_running_loop()
        loop.call_later(0.02, lambda: setattr(nccl, "is_silent", False))

    def _abort(self) -> None:
        self.rng.choice(self.sides).abort()

    def _die(self) -> None:
        number = self.rng.randrange(2)
        self.pair.processes[number].end()
        error = GPUFailed("the process has died")
        for channel in self.pair.channels:
            channel.lose(error)

    def _never_quiet(self) -> None:
        self.rng.choice(self.pair.processes).nccl.abort_ticks = None

    async def _settle(self) -> None:
        """Whoever waits is told, for one that was told of an error the other too."""
        if self.waits:
            await asyncio.wait(self.waits)
        await until(lambda: all(map(self._is_over, self.couples)), timeout_s=15)

    def _is_over(self, couple: tuple[_End, _End, bytes]) -> bool:
        source, target, _ = couple
        if source.is_over and not target.is_over:
            # What will not come is no news of the transport's: its owner stops it.
            is_left = source.told is None or source.told[1] is not None
            side = self.sides[self.pair.processes.index(target.process)]
            if is_left:
                target.is_over = True
                side.stop(target.transfer)
        return source.is_over and target.is_over

    def _judge(self) -> None:
        faults = list(self.gpus.faults)
        for source, target, content in self.couples:
            for end in (source, target):
                faults += end.faults
                if end.told is not None and end.told[1] is not None:
                    self.outcome.failed += 1
            if target.told is not None and target.told[1] is None:
                self.outcome.moved += 1
                faults += self._compare(target, content)
        for side, worker in zip(self.sides, self.pair.workers, strict=True):
            if side.sender.nbytes or side.receiver.nbytes:
                faults.append("bytes are still budgeted for")
            self.outcome.given_up += worker.error is not None
        if faults:
            raise AssertionError("; ".join(faults))

    def _compare(self, target: _End, content: bytes) -> list[str]:
        try:
            found = target.content()
        except GPUFailed:
            return []  # its process has died since
        return [] if found == content else ["other bytes than were sent"]


async def run_schedule(seed: int) -> Outcome:
    """Run one schedule to its end, whatever that is.

    :raises AssertionError: wrong bytes, memory touched too late, a budget not returned
    :raises TimeoutError: it is stuck
    """
    return await _Schedule(seed).run()
