"""Memory of a GPU that another process has allocated, open in this one.

CUDA opens an allocation once for each process, and GPU that reads it: so it is open
once, whoever wants it, and is closed with the last of them. Where it lies on another
GPU, CUDA lets the one reach the other if the hardware does. Rule of this file:
everything blocks, in a thread, but :func:`open_allocation`, which waits for one.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Final, TypeAlias

from asynckv.devices.arena import MARK_NBYTES, NONCE_NBYTES
from asynckv.devices.cuda import IPC_HANDLE_NBYTES, CudaApi, DeviceMemory
from asynckv.errors import GPUFailed

__all__ = (
    "ImportedAllocation",
    "import_allocation",
    "in_thread",
    "open_allocation",
    "set_done",
)

logger = logging.getLogger(__name__)


class ImportedAllocation:
    """One allocation, open here. Whoever was given it releases it once."""

    def __init__(self, cuda: CudaApi, handle: bytes, memory: DeviceMemory) -> None:
        self.handle = handle
        self.memory = memory
        self.users = 0
        self._cuda = cuda

    @property
    def nbytes(self) -> int:
        """What there is for tensors."""
        return self.memory.nbytes - MARK_NBYTES

    def nonce(self) -> bytes:
        """Read what its owner has written at its end.

        :raises GPUFailed: it cannot be read
        """
        cuda, stream = self._cuda, self._cuda.stream()
        pinned = cuda.host_alloc(NONCE_NBYTES)
        try:
            cuda.copy(
                *(pinned.address, self.memory.address + self.nbytes, NONCE_NBYTES),
                stream,
            )
            stream.synchronize()
            return bytes(pinned.view)
        finally:
            stream.close()
            cuda.host_free(pinned)

    def release(self) -> None:
        """Nothing here uses it any more, as far as this user goes."""
        _opened_by(self._cuda).release(self)


class _Opened:
    """What one CUDA has open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[tuple[int, bytes], ImportedAllocation] = {}

    def take(
        self, cuda: CudaApi, device: int, handle: bytes, nbytes: int
    ) -> ImportedAllocation:
        with self._lock:
            found = self._open.get((device, handle))
            if found is None:
                memory = cuda.open_memory(handle, nbytes)
                found = ImportedAllocation(cuda, handle, memory)
                self._open[device, handle] = found
            found.users += 1
            return found

    def release(self, allocation: ImportedAllocation) -> None:
        with self._lock:
            allocation.users -= 1
            if allocation.users:
                return
            self._open.pop((allocation.memory.device, allocation.handle), None)
            with contextlib.suppress(GPUFailed):  # else its context is gone
                allocation._cuda.close_memory(allocation.memory)


# Mutable and global, because CUDA's own table of what is open is: a process has one.
_of_cuda: Final[weakref.WeakKeyDictionary[CudaApi, _Opened]] = (
    weakref.WeakKeyDictionary()
)
_lock: Final = threading.Lock()


def import_allocation(
    cuda: CudaApi, device: int, handle: bytes, nbytes: int
) -> ImportedAllocation:
    """Open what another process has exported, or return what is open here already.

    :raises GPUFailed: it is gone, is not so large, or is this process's own; or that
        is no handle
    """
    if len(handle) != IPC_HANDLE_NBYTES:
        raise GPUFailed(f"a handle of {len(handle)} bytes is none")
    if nbytes <= MARK_NBYTES:
        raise GPUFailed(f"an allocation of {nbytes} bytes has no room for tensors")
    cuda.use_device(device)
    found = _opened_by(cuda).take(cuda, device, handle, nbytes)
    if found.memory.nbytes != nbytes:
        found.release()
        raise GPUFailed(f"an allocation has not {nbytes} bytes all of a sudden")
    return found


def _opened_by(cuda: CudaApi) -> _Opened:
    with _lock:
        if cuda not in _of_cuda:
            _of_cuda[cuda] = _Opened()
        return _of_cuda[cuda]


_Found: TypeAlias = tuple[ImportedAllocation, bytes]


async def open_allocation(
    cuda: CudaApi,
    device: int,
    handle: bytes,
    nbytes: int,
    ended: Callable[[], None],
) -> _Found:
    """Do :func:`import_allocation` in a thread; return what its owner has written too.

    A cancelled call does not wait for the thread: what it opens is closed again. A call
    that returns nothing calls ``ended``, once, when it is closed: in any thread.

    :raises GPUFailed: as there, or what is written cannot be read
    """
    loop = asyncio.get_running_loop()
    opening: asyncio.Future[_Found] = loop.create_future()

    def work(opening: asyncio.Future[_Found]) -> None:
        found = _open(cuda, device, handle, nbytes)
        if isinstance(found, Exception):
            ended()
        try:
            loop.call_soon_threadsafe(_settle, opening, found, ended)
        except RuntimeError:  # the loop is closed
            _close(found, ended)
        finally:
            del found, opening  # an error keeps this frame

    in_thread(functools.partial(work, opening))
    try:
        return await opening
    except BaseException:
        # Cancelled in the very tick in which it was there.
        is_there = opening.done() and not opening.cancelled()
        if is_there and opening.exception() is None:
            in_thread(functools.partial(_close, opening.result(), ended))
        raise
    finally:
        del opening  # it keeps the error, which keeps this frame and its callers'


def in_thread(work: Callable[[], None]) -> None:
    """Let a thread of its own do ``work``; this one, where there are no more."""
    if sys.is_finalizing():  # Python 3.11 would wait for ever for it to begin
        work()
        return
    thread = threading.Thread(target=work, name="asynckv-ipc")
    try:
        thread.start()
    except RuntimeError:
        logger.exception("no thread to close a peer's memory: others wait for it")
        work()


def set_done(future: asyncio.Future[None]) -> None:
    """Tell who waits for it on its loop, in any thread. Once, or again."""

    def tell() -> None:
        if not future.done():
            future.set_result(None)

    with contextlib.suppress(RuntimeError):  # the loop is closed
        future.get_loop().call_soon_threadsafe(tell)


def _open(cuda: CudaApi, device: int, handle: bytes, nbytes: int) -> _Found | Exception:
    try:
        allocation = import_allocation(cuda, device, handle, nbytes)
    except Exception as exc:  # noqa: BLE001 - raised on the loop
        return exc
    try:
        return allocation, allocation.nonce()
    except Exception as exc:  # noqa: BLE001 - raised on the loop
        allocation.release()
        return exc


def _settle(
    opening: asyncio.Future[_Found],
    found: _Found | Exception,
    ended: Callable[[], None],
) -> None:
    if opening.cancelled():
        in_thread(functools.partial(_close, found, ended))
    elif isinstance(found, Exception):
        opening.set_exception(found)
    else:
        opening.set_result(found)


def _close(found: _Found | Exception, ended: Callable[[], None]) -> None:
    if not isinstance(found, Exception):  # else it has ended
        found[0].release()
        ended()
