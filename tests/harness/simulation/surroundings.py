"""What a process takes from its surroundings: chance, identity, sockets, threads.

While a world runs, the standard library's own names give simulated ones to
code that runs in a node. Everybody else in this process, other threads and the
world itself, gets the real ones as before.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from harness.simulation.nodes import Process
from harness.simulation.sockets import SimulatedSocket
from harness.simulation.threads import Condition, Lock, Thread
from harness.simulation.world import World

__all__ = ("surround",)

_Maker = Callable[..., Any]


@contextlib.contextmanager
def surround(world: World) -> Iterator[None]:
    """Let code in ``world``'s nodes see only that world."""
    replaced: list[tuple[Any, str, _Maker]] = [
        (os, "urandom", lambda process, n: process.random_bytes(n)),
        (random, "_urandom", lambda process, n: process.random_bytes(n)),
        (os, "getpid", lambda process: process.pid),
        (os, "nice", lambda process, by: 0),
        (time, "monotonic", lambda process: process.time()),
        (socket, "gethostname", lambda process: process.node.name),
        (socket, "socket", _make_socket),
        (threading, "Thread", _make_thread),
        (threading, "Lock", lambda process: Lock(process)),
        (threading, "RLock", lambda process: Lock(process, reentrant=True)),
        (threading, "Condition", lambda process, lock=None: Condition(process, lock)),
    ]
    state = random.getstate()
    random.seed(f"surroundings of {world.seed}")
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    try:
        for (owner, name, make), (_, _, real) in zip(replaced, before, strict=True):
            setattr(owner, name, _Choice(world, make, real))
        yield
    finally:
        for owner, name, real in before:
            setattr(owner, name, real)
        random.setstate(state)


class _Choice:
    """Calls the simulated one in a node, the real one elsewhere."""

    def __init__(self, world: World, make: _Maker, real: _Maker) -> None:
        self._world = world
        self._make = make
        self._real = real

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        process = self._world.current
        if process is None or threading.get_ident() not in self._world.members:
            return self._real(*args, **kwargs)
        return self._make(process, *args, **kwargs)


def _make_socket(process: Process, *args: Any, **kwargs: Any) -> SimulatedSocket:
    return SimulatedSocket(process, *args, **kwargs)


def _make_thread(
    process: Process,
    group: None = None,
    target: Callable[..., object] | None = None,
    name: str | None = None,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    daemon: bool | None = None,
) -> Thread:
    return Thread(process, target, name or "thread", args, kwargs)
