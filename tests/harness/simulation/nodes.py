"""A node: one process on a machine of its own, as the package's code sees it.

It has an event loop, threads and sockets; it can be frozen, killed, lose its
power and come back as another process at the same address.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import random
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Final

from harness.simulation.loop import VirtualLoop, VirtualSelector
from harness.simulation.network import Network
from harness.simulation.sockets import SimulatedSocket
from harness.simulation.threads import RESOLUTION_S, Killed, Thread
from harness.simulation.world import World

__all__ = ("Node", "Process")

_FIRST_DESCRIPTOR: Final = 10
_DELAY_SHARE: Final = 0.02
_MAX_TURNS_AFTER_END: Final = 5000
_FOREVER: Final = float("inf")


class Process:
    """What a node is between a start and its end. Hosts threads and sockets."""

    def __init__(self, node: Node, number: int) -> None:
        self.node = node
        self.number = number
        self.pid = 1000 * node.number + number
        self.host = node.host
        self.files: dict[int, SimulatedSocket] = {}
        self.threads: list[Thread] = []
        self.running: Thread | None = None
        self.main: asyncio.Task[None] | None = None
        self.faults: list[str] = []
        """What went wrong where nobody saw it."""
        self.is_gone = False
        self.is_server = False
        self._chance = node.world.chance(f"process {number} of {node.name}")
        self._sockets: list[SimulatedSocket] = []
        self._free: list[int] = []
        self._descriptors = itertools.count(_FIRST_DESCRIPTOR)
        self._after_end_s = 0.0
        self._sleeps_until = -_FOREVER
        self.loop = VirtualLoop(self.time, VirtualSelector(self.files, self._chance))
        self.loop.set_exception_handler(self._on_fault)
        node.processes.append(self)

    def time(self) -> float:
        """Its machine's monotonic clock, which is nobody else's."""
        return self.node.world.now + self.node.clock_s + self._after_end_s

    def random_bytes(self, nbytes: int) -> bytes:
        """Stands for ``os.urandom``."""
        return self._chance.randbytes(nbytes)

    # What its threads ask.

    def adopt(self, thread: Thread) -> None:
        self.threads.append(thread)

    def spawn(self, run: Callable[[], None], name: str) -> threading.Thread:
        world = self.node.world

        def run_as_member() -> None:
            world.members.add(threading.get_ident())
            run()

        before, world.current = world.current, None
        try:
            thread = threading.Thread(target=run_as_member, name=f"simulated {name}")
            thread.start()
        finally:
            world.current = before
        return thread

    def enter(self, thread: Thread) -> None:
        before, self.running = self.running, thread
        try:
            thread.run_on()
        finally:
            self.running = before
        if not thread.is_alive():
            self.threads.remove(thread)
            if thread.error is not None:
                self.faults.append(f"thread {thread.name}: {thread.error!r}")

    def delay_s(self) -> float:
        if self._chance.random() >= _DELAY_SHARE:
            return 0.0
        return self._chance.choice((0.0001, 0.002, 0.05, 0.4)) * self._chance.random()

    # What its sockets ask.

    def open_file(self, sock: SimulatedSocket) -> int:
        fd = heapq.heappop(self._free) if self._free else next(self._descriptors)
        self.files[fd] = sock
        self._sockets.append(sock)
        return fd

    def close_file(self, fd: int) -> None:
        if self.files.pop(fd, None) is not None:
            heapq.heappush(self._free, fd)

    def bind(self, sock: SimulatedSocket, address: tuple[str, int]) -> tuple[str, int]:
        return self.node.network.bind(sock, address)

    def unbind(self, sock: SimulatedSocket) -> None:
        self.node.network.unbind(sock)

    def dial(self, sock: SimulatedSocket, address: tuple[str, int]) -> None:
        self.node.network.dial(sock, address)

    # Its turns.

    def poke(self) -> None:
        """Something of its surroundings has changed: look again."""
        self._sleeps_until = -_FOREVER

    @property
    def is_runnable(self) -> bool:
        if self.time() + RESOLUTION_S < self._sleeps_until:
            return False
        if self.loop.has_work or any(t.is_runnable for t in self.threads):
            return True
        # Nothing changes before that, unless somebody pokes.
        at = self.wakes_at
        self._sleeps_until = _FOREVER if at is None else at
        return False

    @property
    def wakes_at(self) -> float | None:
        """When it can run at the latest, in its own time."""
        times = [thread.wakes_at for thread in self.threads]
        if (timer := self.loop.next_timer) is not None:
            times.append(timer)
        return min(times, default=None)

    def turn(self) -> None:
        """Let the loop take a step, or a thread run until it waits."""
        self.poke()
        able: list[Thread | None] = [t for t in self.threads if t.is_runnable]
        if self.loop.has_work:
            able.append(None)
        chosen = able[0] if len(able) == 1 else self._chance.choice(able)
        if chosen is None:
            self.loop.step()
        else:
            self.enter(chosen)

    # Its end.

    def end(self, *, silently: bool) -> None:
        """Stop between two steps, for ever. Its kernel hangs up, or cannot."""
        self.is_gone = True
        for sock in self._sockets:
            if sock.is_in_use:
                sock.vanish(silently=silently)
        self.files.clear()

    def regain_power(self) -> None:
        """Its machine is back and knows nothing of its connections."""
        for sock in self._sockets:
            sock.is_vanished = False

    def bury(self) -> None:
        """Let go of everything, after the run. Nothing of it is heard any more.

        Tasks are cancelled and run on in a time of their own, cut off from the
        world; threads that still wait then are killed.
        """
        if not self.is_gone:
            self.end(silently=True)
        before, self.node.world.current = self.node.world.current, self
        try:
            self._run_out()
        finally:
            self.node.world.current = before
        self.loop.close()

    def _run_out(self) -> None:
        for _ in range(_MAX_TURNS_AFTER_END):
            if not (tasks := asyncio.all_tasks(self.loop)):
                break
            if self.is_runnable:
                self.turn()
            elif (at := self.wakes_at) is not None and at < _FOREVER:
                self._after_end_s += max(0.0, at - self.time())
                for task in tasks:
                    task.cancel()
            else:
                break
        for thread in list(self.threads):
            thread.kill()

    def ended(self, main: asyncio.Task[None]) -> None:
        """Its main function has returned."""
        error = None if main.cancelled() else main.exception()
        if error is not None:
            self.faults.append(f"main ended: {error!r}")

    def _on_fault(
        self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]
    ) -> None:
        error = context.get("exception")
        if not self.is_gone and not isinstance(error, Killed):
            self.faults.append(f"{context.get('message')}: {error!r}")


class Node:
    """One machine: its address, its clock, and the process that runs on it."""

    def __init__(self, world: World, network: Network, name: str, number: int) -> None:
        self.world = world
        self.network = network
        self.name = name
        self.number = number
        self.host = f"127.0.1.{number}"
        self.chance: random.Random = world.chance(f"node {name}")
        self.clock_s = float(self.chance.randrange(1_000_000))
        self.processes: list[Process] = []
        self.process: Process | None = None
        self._frozen_until = 0.0
        network.name(self.host, name)
        world.runnables.append(self)

    @property
    def is_frozen(self) -> bool:
        """Whether its process does not get to run now."""
        return self.world.now < self._frozen_until

    @property
    def is_runnable(self) -> bool:
        process = self.process
        return process is not None and not self.is_frozen and process.is_runnable

    @property
    def wakes_at(self) -> float | None:
        if self.process is None:
            return None
        if self.is_frozen:
            return self._frozen_until
        at = self.process.wakes_at
        return None if at is None else at - self.clock_s

    def turn(self) -> None:
        world, process = self.world, self.process
        if process is not None:
            world.current = process
            process.turn()
            world.current = None

    @contextlib.contextmanager
    def inside(self) -> Iterator[Process]:
        """Let what is called act as this node's process."""
        if self.process is None:
            raise RuntimeError(f"{self.name} has no process now")
        before, self.world.current = self.world.current, self.process
        try:
            yield self.process
        finally:
            self.world.current = before
            self.process.poke()

    def start(self, main: Callable[[Process], Coroutine[Any, Any, None]]) -> None:
        """Start a process that runs ``main``."""
        self.network.hosts_without_power.pop(self.host, None)
        for older in self.processes:
            older.regain_power()
        process = Process(self, len(self.processes) + 1)
        self.process = process
        with self.inside():
            task = process.loop.create_task(main(process), name=f"main of {self.name}")
        task.add_done_callback(process.ended)
        process.main = task

    def crash(self, *, power: bool = False) -> None:
        """Kill the process; with ``power`` its machine goes silent too."""
        process, self.process = self.process, None
        if process is not None:
            process.end(silently=power)
        if power:
            self.network.hosts_without_power[self.host] = None

    def freeze(self, seconds: float) -> None:
        """Let the process stand still, as under SIGSTOP. Its kernel goes on."""
        self._frozen_until = max(self._frozen_until, self.world.now + seconds)
