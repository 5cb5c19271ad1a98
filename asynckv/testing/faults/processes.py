"""A process that stops and goes on: its kernel still acknowledges for it."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import AsyncIterator

import anyio.to_thread

__all__ = ("frozen_peer",)


@contextlib.asynccontextmanager
async def frozen_peer(pid: int) -> AsyncIterator[None]:
    """Stop a child process (SIGSTOP) and let it go on when this is left (SIGCONT).

    On entering it stands still. That it dies meanwhile is no error.

    :raises ValueError: it is no child of this process, or has ended
    """
    try:
        handle = os.pidfd_open(pid)
    except OSError as exc:
        raise ValueError(f"process {pid} has ended") from exc
    try:
        await anyio.to_thread.run_sync(_stop, handle)
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGCONT)
        os.close(handle)


def _stop(handle: int) -> None:
    """Stop a process and wait until it is stopped."""
    # Looked at only: who started it still hears of all that happens to it.
    look = os.WEXITED | os.WNOWAIT
    try:
        ended = os.waitid(os.P_PIDFD, handle, look | os.WNOHANG)
    except ChildProcessError as exc:
        raise ValueError("only a process that this one has started") from exc
    if ended is not None:
        raise ValueError(f"process {ended.si_pid} has ended")
    signal.pidfd_send_signal(handle, signal.SIGSTOP)
    os.waitid(os.P_PIDFD, handle, look | os.WSTOPPED)
