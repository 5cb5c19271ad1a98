"""Who may use an object: its event loop or its thread, and its process alone.

It belongs to the loop that first used it; what is used without a loop belongs to a
thread in the same way. What a fork has copied is its parent's to use and to close.
"""

from __future__ import annotations

import asyncio
import functools
import os
import threading
import weakref
from typing import Protocol

from asynckv.errors import WrongLoop

__all__ = (
    "KeepsForChild",
    "LoopBound",
    "ProcessBound",
    "ThreadBound",
    "watch_forks",
)


class LoopBound:
    """Mixed into what must not be shared between event loops or threads.

    It may be made anywhere, also before a loop runs.
    """

    _loop: asyncio.AbstractEventLoop | None = None

    def _check_loop(self) -> asyncio.AbstractEventLoop:
        """Return the running loop; the first call binds this object to it.

        To be called first by every public coroutine. Never waits.

        :raises WrongLoop: another loop runs here, or none does
        """
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            raise WrongLoop(
                f"{type(self).__name__} used where no event loop is running"
            ) from None
        if self._loop is None:
            self._loop = running
        elif self._loop is not running:
            raise WrongLoop(f"{type(self).__name__} belongs to another event loop")
        return running

    def _check_loop_if_bound(self) -> None:
        """The same for what may also come before a loop runs: it binds nothing.

        :raises WrongLoop: this object has a loop, and that does not run here
        """
        if self._loop is not None:
            self._check_loop()


class ThreadBound:
    """Mixed into what must not be shared between threads, and has plain functions."""

    _thread_id: int | None = None

    def _check_thread(self) -> None:
        """The first call binds this object to its thread. Never waits.

        :raises WrongLoop: this is another thread
        """
        here = threading.get_ident()
        if self._thread_id is None:
            self._thread_id = here
        elif self._thread_id != here:
            raise WrongLoop(f"{type(self).__name__} belongs to another thread")


class ProcessBound:
    """Mixed into what owns sockets and threads.

    A forked child has copies of both: the sockets are shared with the parent,
    down to what ``shutdown()`` and an event loop's registrations do to them, and
    no thread has come along to let go of a lock. So nothing is to be done with
    them in a child, not even closing. Public coroutines raise ``WrongLoop`` there.
    """

    _pid = 0

    def _own(self) -> None:
        """Remember this process as the owner. To be called once, when made."""
        self._pid = os.getpid()

    @property
    def _is_copy(self) -> bool:
        """Whether this is what a fork left in a child."""
        return self._pid != os.getpid()


class KeepsForChild(Protocol):
    """What hands out views of shared memory."""

    def keep_for_child(self) -> None:
        """This process is about to be copied, views and all. Called in any thread."""


def watch_forks(owner: KeepsForChild) -> None:
    """Tell ``owner``, as long as it lives, before this process is forked."""
    _owners()[id(owner)] = owner


@functools.cache
def _owners() -> weakref.WeakValueDictionary[int, KeepsForChild]:
    owners: weakref.WeakValueDictionary[int, KeepsForChild] = (
        weakref.WeakValueDictionary()
    )
    # Once, as it cannot be undone.
    os.register_at_fork(before=lambda: _notify(owners))
    return owners


def _notify(owners: weakref.WeakValueDictionary[int, KeepsForChild]) -> None:
    for ref in owners.valuerefs():  # a list: other threads may add to them
        owner = ref()
        if owner is not None:
            owner.keep_for_child()
