"""Lanes are used again, made anew when they are worn, and asked many at a time."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from asynckv.stores.redis.lane import Lane, Reply, ServerError, command
from asynckv.stores.redis.lanes import Lanes


class Peer:
    """Answers each read with the next of ``says``, and ends where there is none."""

    def __init__(self) -> None:
        self.made = 0
        self.says: dict[str, list[list[bytes]]] = {}
        self._threads: list[threading.Thread] = []
        self._socks: list[socket.socket] = []

    def connect(self, address: object) -> Lane:
        self.made += 1
        says = self.says[str(address)].pop(0)
        here, there = socket.socketpair()
        self._socks.append(there)
        self._threads.append(threading.Thread(target=self._run, args=(there, says)))
        self._threads[-1].start()
        return Lane(here, lambda: False, 2.0)

    def _run(self, sock: socket.socket, says: list[bytes]) -> None:
        for answer in says:
            if not sock.recv(2**16):
                break
            sock.sendall(answer)
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(2**16):
            pass

    def close(self) -> None:
        for thread in self._threads:
            thread.join()
        for sock in self._socks:
            sock.close()


@pytest.fixture
def peer() -> Iterator[Peer]:
    peer = Peer()
    yield peer
    peer.close()


@pytest.fixture
def lanes(peer: Peer) -> Iterator[Lanes]:
    lanes = Lanes(peer.connect)
    yield lanes
    lanes.close()


def ping(lane: Lane) -> Reply:
    lane.send([command(b"PING")])
    answer = lane.read_reply()
    if isinstance(answer, ServerError):
        raise answer
    return answer


def test_a_lane_is_used_again(lanes: Lanes, peer: Peer) -> None:
    peer.says = {"a": [[b"+one\r\n", b"+two\r\n"]]}
    assert [lanes.use("a", ping) for _ in range(2)] == [b"one", b"two"]
    assert (peer.made, len(lanes)) == (1, 1)


def test_a_lane_that_has_ended_is_made_anew_once(lanes: Lanes, peer: Peer) -> None:
    peer.says = {"a": [[b"+one\r\n"], [b"+two\r\n"], []]}
    assert [lanes.use("a", ping) for _ in range(2)] == [b"one", b"two"]
    with pytest.raises(ConnectionError):
        lanes.use("a", ping)
    assert peer.made == 3


@pytest.mark.parametrize("code", [b"NOAUTH", b"WRONGPASS", b"NOPERM"])
def test_a_lane_that_is_not_ours_any_more_is_made_anew(
    code: bytes, lanes: Lanes, peer: Peer
) -> None:
    peer.says = {"a": [[b"+one\r\n", b"-%b no\r\n" % code], [b"+two\r\n"]]}
    assert [lanes.use("a", ping) for _ in range(2)] == [b"one", b"two"]


def test_any_other_error_is_an_answer(lanes: Lanes, peer: Peer) -> None:
    peer.says = {"a": [[b"-OOM no\r\n", b"+one\r\n"]]}
    with pytest.raises(ServerError):
        lanes.use("a", ping)
    assert lanes.use("a", ping) == b"one"
    assert peer.made == 1


def test_many_are_asked_at_once_and_one_that_fails_harms_no_other(
    lanes: Lanes, peer: Peer
) -> None:
    peer.says = {"a": [[b":1\r\n:2\r\n", b":3\r\n"]], "b": [[b":4\r\n"], [b":5\r\n"]]}
    asked = command(b"PING")
    assert lanes.ask({"a": [asked, asked], "b": [asked]}) == {"a": [1, 2], "b": [4]}
    peer.says["c"] = [[]]
    answers = lanes.ask({"a": [asked], "b": [asked], "c": [asked]})
    assert isinstance(answers.pop("c"), ConnectionError)
    assert answers == {"a": [3], "b": [5]}


def test_what_is_given_back_after_the_end_is_ended(lanes: Lanes, peer: Peer) -> None:
    peer.says = {"a": [[b"+one\r\n"]]}
    lane = lanes.take("a")
    lanes.close()
    lanes.give_back("a", lane)
    assert len(lanes) == 0
    with pytest.raises(OSError):
        ping(lane)
