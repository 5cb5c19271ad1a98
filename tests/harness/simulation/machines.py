"""Machines of a world, and what a process on one takes from its surroundings.

While a world runs, the standard library's own names give simulated ones to
code that runs in a node. Everybody else in this process, other threads and the
world itself, gets the real ones as before.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from harness.simulation.network import Network
from harness.simulation.nodes import Node, Process
from harness.simulation.sockets import SimulatedSocket
from harness.simulation.threads import Condition, Lock, Thread
from harness.simulation.world import World

__all__ = (
    "Machines",
    "open_machines",
    "surround",
)


class Machines:
    """Nodes by name, each on a machine of its own."""

    def __init__(self, seed: int) -> None:
        self.world = World(seed)
        self.network = Network(self.world)
        self.nodes: dict[str, Node] = {}

    def add(self, name: str) -> Node:
        """Return a new node, on which nothing runs yet."""
        node = Node(self.world, self.network, name, len(self.nodes) + 1)
        self.nodes[name] = node
        return node

    def faults(self) -> list[str]:
        """Return what went wrong in any process where nobody saw it."""
        return [
            f"{node.name}: {fault}"
            for node in self.nodes.values()
            for process in node.processes
            for fault in process.faults
        ]

    def bury(self) -> None:
        """Let go of every process there ever was."""
        for node in self.nodes.values():
            for process in node.processes:
                process.bury()


@contextlib.contextmanager
def open_machines(seed: int) -> Iterator[Machines]:
    """Enter a world of machines. Whatever runs on them ends when it is left.

    Garbage is collected before and after, not meanwhile: when that happens
    depends on the whole process.
    """
    machines = Machines(seed)
    was_collecting = gc.isenabled()
    gc.disable()
    try:
        with surround(machines.world):
            try:
                yield machines
            finally:
                machines.bury()
    finally:
        if was_collecting:
            gc.enable()


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
