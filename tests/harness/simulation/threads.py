"""Threads in lock-step: they are real, but run one at a time, when told to.

A thread of a node runs until it would wait: for a lock, a condition, or a
blocking socket. Then the world goes on, and lets it run again when what it
waits for has come. So a run with threads replays as exactly as one without,
and the package's own threads need not be replaced.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

__all__ = (
    "RESOLUTION_S",
    "Condition",
    "Killed",
    "Lock",
    "Thread",
    "ThreadHost",
    "park_until",
)

_RealLock: Final = threading.Lock

_FOREVER: Final = float("inf")
RESOLUTION_S: Final = 1e-9
"""Clocks of machines differ, and sums of floats are not exact."""


class Killed(BaseException):
    """Thrown into a thread whose process is gone."""


class ThreadHost(Protocol):
    """The node whose threads they are."""

    @property
    def running(self) -> Thread | None:
        """The thread that runs now; ``None`` in the event loop and the world."""

    def adopt(self, thread: Thread) -> None:
        """A thread was started."""

    def spawn(self, run: Callable[[], None], name: str) -> threading.Thread:
        """Start a real thread."""

    def enter(self, thread: Thread) -> None:
        """Let ``thread`` run until it parks or ends."""

    def delay_s(self) -> float:
        """How long a thread is held up before it takes a lock; mostly 0."""

    def time(self) -> float:
        """The node's time."""


class Thread:
    """Stands for :class:`threading.Thread` in a simulated node."""

    def __init__(
        self,
        host: ThreadHost,
        target: Callable[..., object] | None,
        name: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.name = name
        self.daemon = False
        self.error: BaseException | None = None
        self.held_locks = 0
        self._host = host
        self._target = target
        self._args = args
        self._kwargs = kwargs or {}
        self._go, self._back = _RealLock(), _RealLock()
        self._go.acquire()
        self._back.acquire()
        self._ready: Callable[[], bool] | None = None
        self._until = _FOREVER
        self.is_killed = False
        self._is_over = False
        self._real: threading.Thread | None = None

    def start(self) -> None:
        """Let it run at one of the next turns."""
        self._host.adopt(self)
        self._real = self._host.spawn(self._run, self.name)

    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return not self._is_over

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end, in a thread or in the world."""
        park_until(self._host, lambda: self._is_over, timeout)

    @property
    def is_runnable(self) -> bool:
        """Whether what it waits for has come."""
        if self._is_over:
            return False
        if self._ready is None or self._ready():
            return True
        return self._until <= self._host.time() + RESOLUTION_S

    @property
    def wakes_at(self) -> float:
        """When it stops waiting in any case, in its node's time."""
        return _FOREVER if self._is_over else self._until

    def run_on(self) -> None:
        """Run until it parks or ends. Called by the world."""
        self._go.release()
        self._back.acquire()
        if self._is_over and self._real is not None:
            self._real.join()

    def park(self, ready: Callable[[], bool], timeout_s: float | None) -> None:
        """Let the world go on until ``ready()``, or for ``timeout_s``."""
        self._ready = ready
        self._until = _FOREVER if timeout_s is None else self._host.time() + timeout_s
        self._back.release()
        self._go.acquire()
        self._ready, self._until = None, _FOREVER
        if self.is_killed:
            raise Killed

    def kill(self) -> None:
        """End it: whatever it waits for raises :exc:`Killed`. Called by the world."""
        self.is_killed = True
        while not self._is_over:
            self.run_on()

    def _run(self) -> None:
        self._go.acquire()
        try:
            if self._target is not None and not self.is_killed:
                self._target(*self._args, **self._kwargs)
        except Killed:
            pass
        except BaseException as exc:  # noqa: BLE001 - the node is told
            self.error = exc
        finally:
            self._is_over = True
            self._back.release()


def park_until(
    host: ThreadHost, ready: Callable[[], bool], timeout_s: float | None = None
) -> None:
    """Wait where a real call would block: in a thread for ever, elsewhere briefly.

    :raises RuntimeError: the event loop would be blocked
    """
    thread = host.running
    if thread is not None:
        if not ready():
            thread.park(ready, timeout_s)
        return
    if not ready():
        raise RuntimeError("something would block the event loop")


class _Gone:
    """A node that is no more: nothing runs on it but finalizers."""

    running = None

    def adopt(self, thread: Thread) -> None:
        raise RuntimeError("the machine of this thread is gone")

    def spawn(self, run: Callable[[], None], name: str) -> threading.Thread:
        raise RuntimeError("the machine of this thread is gone")

    def enter(self, thread: Thread) -> None:
        raise RuntimeError("the machine of this thread is gone")

    def delay_s(self) -> float:
        return 0.0

    def time(self) -> float:
        return 0.0


_GONE: Final = _Gone()


class Lock:
    """Stands for :class:`threading.Lock`, and with ``reentrant`` for an RLock.

    It keeps no machine alive: what is locked may outlive its machine, and tensors
    over memory hide what they refer to from the garbage collector.
    """

    def __init__(self, host: ThreadHost, *, reentrant: bool = False) -> None:
        self._host_ref = weakref.ref(host)
        self._reentrant = reentrant
        self._owner: Thread | str | None = None
        self._count = 0

    @property
    def _host(self) -> ThreadHost:
        return self._host_ref() or _GONE

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take it; a thread may be held up before, the event loop never is."""
        thread, me = self._host.running, self._me()
        if self._owner is me and self._reentrant:
            self._count += 1
            return True
        if thread is not None and thread.is_killed:
            raise Killed
        if thread is not None and not thread.held_locks:
            delay_s = self._host.delay_s()
            if delay_s:
                thread.park(lambda: False, delay_s)
        if self._owner is not None:
            if not blocking:
                return False
            self._wait_for_owner(thread)
        self._owner, self._count = me, 1
        if thread is not None:
            thread.held_locks += 1
        return True

    def release(self) -> None:
        """Give it back."""
        if self._owner is not self._me():
            return  # it is being killed, and never got it back
        self._count -= 1
        if self._count == 0:
            if isinstance(self._owner, Thread):
                self._owner.held_locks -= 1
            self._owner = None

    def locked(self) -> bool:
        """Whether somebody has it."""
        return self._owner is not None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *exc_info: object) -> None:
        self.release()

    def _me(self) -> Thread | str:
        return self._host.running or "the loop"

    def _wait_for_owner(self, thread: Thread | None) -> None:
        if thread is not None:
            thread.park(lambda: self._owner is None, None)
            return
        while isinstance(self._owner, Thread):  # a real loop would wait here too
            self._host.enter(self._owner)
        if self._owner is not None:
            raise RuntimeError("the event loop waits for a lock that it holds")


class _Told:
    """Whether one who waits was notified."""

    is_told = False


class Condition:
    """Stands for :class:`threading.Condition`."""

    def __init__(self, host: ThreadHost, lock: Lock | None = None) -> None:
        self._host = host
        self._lock = Lock(host, reentrant=True) if lock is None else lock
        self._waiting: list[_Told] = []
        self.acquire = self._lock.acquire
        self.release = self._lock.release

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *exc_info: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait to be notified; ``False`` if the time was over before."""
        thread = self._host.running
        if thread is None:
            raise RuntimeError("something would block the event loop")
        told = _Told()
        self._waiting.append(told)
        self._lock.release()
        try:
            thread.park(lambda: told.is_told, timeout)
        finally:
            if not told.is_told:
                self._waiting.remove(told)
            self._lock.acquire()
        return told.is_told

    def wait_for(
        self, predicate: Callable[[], bool], timeout: float | None = None
    ) -> bool:
        """Wait until ``predicate()``, looking whenever notified."""
        end = None if timeout is None else self._host.time() + timeout
        while not predicate():
            left = None if end is None else end - self._host.time()
            if left is not None and left <= 0:
                return False
            self.wait(left)
        return True

    def notify(self, n: int = 1) -> None:
        """Wake who has waited longest."""
        for told in self._waiting[:n]:
            told.is_told = True
        del self._waiting[:n]

    def notify_all(self) -> None:
        """Wake everybody who waits."""
        self.notify(len(self._waiting))
