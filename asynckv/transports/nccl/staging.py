"""The memory that a transport brings along: some bytes to begin with."""

from __future__ import annotations

import asyncio

from asynckv.errors import GPUFailed
from asynckv.tensors.cuda import DeviceMemory
from asynckv.transports.nccl.operations import call_on
from asynckv.transports.nccl.worker import DeviceWorker

__all__ = ("Staging",)

_SCRATCH_NBYTES = 256


class Staging:
    """Allocated before the pipes are opened, freed when nothing moves any more.

    Of a worker that was given up it is never freed.
    """

    def __init__(self, worker: DeviceWorker) -> None:
        self.scratch: DeviceMemory | None = None
        self._worker = worker
        self._is_freed = False

    async def allocate(self) -> DeviceMemory:
        """Allocate it all on the worker; cancelled, it is freed again.

        While operations wait for their peers it is put off, at most 5 s.

        :raises GPUFailed: there is not so much memory, or no such worker
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[DeviceMemory] = loop.create_future()

        def settle(scratch: DeviceMemory | None, error: Exception | None) -> None:
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            elif scratch is not None:
                future.set_result(scratch)

        def allocate() -> None:
            scratch, error = None, None
            try:
                scratch = self._allocate()
            except Exception as exc:  # noqa: BLE001 - raised on the loop
                error = exc
            call_on(loop, lambda: settle(scratch, error))

        if not self._worker.run_when_quiet(allocate):
            raise self._worker.error or GPUFailed("the GPU's worker has stopped")
        return await future

    def free(self) -> None:
        """Free it all, soon; a second call does nothing. Never waits."""
        if self._is_freed:
            return
        self._is_freed = True
        if not self._worker.run_when_quiet(self._free):
            self._worker.kept.append(self)

    def _allocate(self) -> DeviceMemory:
        self.scratch = scratch = self._worker.cuda.malloc(_SCRATCH_NBYTES)
        return scratch

    def _free(self) -> None:
        scratch, self.scratch = self.scratch, None
        if scratch is not None:
            self._worker.cuda.free(scratch)
