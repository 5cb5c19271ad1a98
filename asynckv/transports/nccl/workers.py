"""The worker of each GPU: one in a process, however many links and buffers use it.

NCCL's rule is of the process, not of any object in it: no two threads in one GPU. So
this is the one place of the package that is the same for all.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Final

from asynckv.errors import ConfigError
from asynckv.tensors.cuda import CudaApi
from asynckv.tensors.devices import Device
from asynckv.tensors.imports import in_thread
from asynckv.transports.nccl.api import NcclApi, open_nccl
from asynckv.transports.nccl.parts import call_on
from asynckv.transports.nccl.worker import DeviceWorker

__all__ = ("WorkerUse", "use_worker", "worker_of")


class WorkerUse:
    """One user of a GPU's worker, until :meth:`end`."""

    def __init__(self, key: tuple[CudaApi, int], worker: DeviceWorker) -> None:
        self.worker = worker
        self._key: tuple[CudaApi, int] | None = key

    def end(self) -> None:
        """Use it no more; without users its thread ends. Again is nothing.

        To be called when nothing of the user's moves any more. One that was given up
        is kept: its GPU gets no other one in this process.
        """
        key, self._key = self._key, None
        if key is None:
            return
        with _lock:
            _users[key] -= 1
            if not _users[key] and self.worker.error is None:
                del _users[key], _workers[key]
                self.worker.stop()


_BLOCKED_S: Final = 5.0
_lock: Final = threading.Lock()
_workers: Final[dict[tuple[CudaApi, int], DeviceWorker]] = {}
_users: Final[dict[tuple[CudaApi, int], int]] = {}


def use_worker(device: Device) -> WorkerUse:
    """Return a use of the worker of ``device``, made if there is none. In a thread.

    :raises GPUUnavailable: CuPy, NCCL, a driver or that GPU is missing
    :raises GPUFailed: the worker was given up, or is blocked by what another link opens
    """
    gpus = device.opened()
    nccl = (gpus.open_nccl or open_nccl)()
    if not isinstance(nccl, NcclApi):
        raise ConfigError(f"{nccl!r} is no NCCL")
    key = gpus.cuda, device.index
    with _lock:
        worker = _workers.get(key)
        if worker is None:
            worker = DeviceWorker(gpus.cuda, nccl, device.index, blocked_s=_BLOCKED_S)
        elif (why_not := worker.why_not) is not None:
            raise why_not
        _workers[key] = worker
        _users[key] = _users.get(key, 0) + 1
    return WorkerUse(key, worker)


async def worker_of(device: Device) -> WorkerUse:
    """As :func:`use_worker`, for an event loop. Cancelled, it is used by nobody."""
    loop = asyncio.get_running_loop()
    opening: asyncio.Future[WorkerUse] = loop.create_future()

    def settle(use: WorkerUse | None, error: Exception | None) -> None:
        if use is not None and opening.cancelled():
            use.end()
        elif use is not None:
            opening.set_result(use)
        elif error is not None and not opening.cancelled():
            opening.set_exception(error)

    def make() -> None:
        use, error = None, None
        try:
            use = use_worker(device)
        except Exception as exc:  # noqa: BLE001 - raised on the loop
            error = exc
        call_on(loop, lambda: settle(use, error))

    in_thread(make)
    try:
        return await opening
    except asyncio.CancelledError:
        if not opening.cancelled() and opening.exception() is None:
            opening.result().end()  # it came in the same tick
        raise
