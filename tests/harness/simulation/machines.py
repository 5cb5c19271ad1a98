"""A world with a network and nodes, for as long as it is entered."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

from harness.simulation.network import Network
from harness.simulation.nodes import Node
from harness.simulation.surroundings import surround
from harness.simulation.world import World

__all__ = ("Machines", "open_machines")


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
