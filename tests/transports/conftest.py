"""One lane beside a bare socket, and what its threads say."""

from __future__ import annotations

import queue
import socket
from collections.abc import Iterator

import pytest

from asynckv.transports.lane_sockets import LaneOwner, LaneSocket
from asynckv.transports.parts import Part


class Owner:
    """Passes on what the threads say, in order."""

    def __init__(self, said: queue.Queue[object]) -> None:
        self._said = said

    def part_moved(self, part: Part) -> None:
        self._said.put(part)

    def part_left(self) -> None:
        self._said.put("left")

    def sender_ended(self, error: BaseException | None) -> None:
        self._said.put(error or "ended")

    def receiver_ended(self, error: BaseException | None) -> None:
        self._said.put(error or "ended")


@pytest.fixture
def said() -> queue.Queue[object]:
    return queue.Queue()


@pytest.fixture
def owner(said: queue.Queue[object]) -> LaneOwner:
    return Owner(said)


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = socket.socketpair()
    far.settimeout(5)
    with near, far:
        yield near, far


@pytest.fixture
def lane(sockets: tuple[socket.socket, socket.socket]) -> Iterator[LaneSocket]:
    lane = LaneSocket(sockets[0])
    yield lane
    lane.shut_down()


@pytest.fixture
def far(sockets: tuple[socket.socket, socket.socket]) -> socket.socket:
    """The other end of ``lane``."""
    return sockets[1]
