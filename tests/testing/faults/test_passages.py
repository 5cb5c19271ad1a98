from __future__ import annotations

import socket

from asynckv.testing.faults.passages import Passage, ProxyCounts


def passage_of(
    counts: ProxyCounts, over: list[Passage]
) -> tuple[Passage, socket.socket, socket.socket]:
    near, dialler = socket.socketpair()
    far, listener = socket.socketpair()
    for sock in (near, dialler, far, listener):
        sock.setblocking(False)
    passage = Passage(
        near, far, number=0, faults=(), counts=counts, on_over=over.append
    )
    return passage, dialler, listener


async def test_a_cut_closes_both_sides_once() -> None:
    over: list[Passage] = []
    passage, dialler, listener = passage_of(ProxyCounts(), over)
    passage.start()
    passage.cut(resets=False)
    passage.cut(resets=True)
    passage.wake()
    with dialler, listener:
        assert dialler.recv(1) == listener.recv(1) == b""
    assert over == [passage]


async def test_it_is_counted_by_its_kind(lane: bytes, control: bytes) -> None:
    counts = ProxyCounts()
    for greeting in (lane, control, lane, b"GET / HTTP/1.1" * 3):
        passage, dialler, listener = passage_of(counts, [])
        with dialler, listener:
            dialler.send(greeting)
            passage._flows[0]._read()
            passage.cut(resets=False)
    assert (counts.connections, counts.control, counts.lanes) == (4, 1, 2)
