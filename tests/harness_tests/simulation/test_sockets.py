from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from harness.simulation.machines import Machines
from harness.simulation.nodes import Process

Use = Callable[[socket.socket], Coroutine[Any, Any, None]]


def run_both(machines: Machines, serve: Use, dial: Use) -> None:
    """Let one node accept a connection of another; both use their ends."""
    listener, dialler = machines.add("listener"), machines.add("dialler")
    ended = list[str]()

    async def listening(process: Process) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
            sock.setblocking(False)
            sock.bind((process.host, 7000))
            sock.listen()
            connected, _ = await asyncio.get_running_loop().sock_accept(sock)
            await serve(connected)
            connected.close()
        ended.append("listener")

    async def dialling(process: Process) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
            sock.setblocking(False)
            await asyncio.sleep(0.1)
            await asyncio.get_running_loop().sock_connect(sock, (listener.host, 7000))
            await dial(sock)
        ended.append("dialler")

    listener.start(listening)
    dialler.start(dialling)
    assert machines.world.run(lambda: len(ended) == 2, deadline=60), machines.faults()


def test_a_megabyte_passes_through_small_buffers(machines: Machines) -> None:
    whole = bytes(range(256)) * 4096
    got = bytearray()

    async def serve(sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while data := await loop.sock_recv(sock, 70_000):
            got.extend(data)

    async def dial(sock: socket.socket) -> None:
        await asyncio.get_running_loop().sock_sendall(sock, whole)

    run_both(machines, serve, dial)
    assert bytes(got) == whole


@pytest.mark.parametrize("pieces", [1, 4])
def test_a_blocking_socket_parks_its_thread(machines: Machines, pieces: int) -> None:
    got = bytearray(5000)
    nbytes = len(got) // pieces

    async def serve(sock: socket.socket) -> None:
        sock.setblocking(True)
        done = asyncio.get_running_loop().create_future()
        loop, set_done = asyncio.get_running_loop(), done.set_result

        def receive() -> None:
            whole, count = memoryview(got), 0
            if pieces == 1:
                count = sock.recv_into(whole, 0, socket.MSG_WAITALL)
            else:
                views = [whole[n * nbytes :][:nbytes] for n in range(pieces)]
                count = sock.recvmsg_into(views, 0, socket.MSG_WAITALL)[0]
            loop.call_soon_threadsafe(set_done, count)

        threading.Thread(target=receive).start()
        assert await done == 5000

    async def dial(sock: socket.socket) -> None:
        for _ in range(5):
            await asyncio.get_running_loop().sock_sendall(sock, b"x" * 1000)
            await asyncio.sleep(1)

    run_both(machines, serve, dial)
    assert got == b"x" * 5000


def test_bytes_that_nobody_reads_turn_a_close_into_a_reset(machines: Machines) -> None:
    async def serve(sock: socket.socket) -> None:
        await asyncio.sleep(1)  # they come, and are not read

    async def dial(sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(sock, b"unread")
        with pytest.raises(ConnectionResetError):
            await loop.sock_recv(sock, 100)

    run_both(machines, serve, dial)


def test_a_half_closed_connection_still_carries_the_other_half(
    machines: Machines,
) -> None:
    async def serve(sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        assert await loop.sock_recv(sock, 100) == b""
        await loop.sock_sendall(sock, b"late")

    async def dial(sock: socket.socket) -> None:
        sock.shutdown(socket.SHUT_WR)
        with pytest.raises(BrokenPipeError):
            sock.send(b"more")
        assert await asyncio.get_running_loop().sock_recv(sock, 100) == b"late"

    run_both(machines, serve, dial)


def test_nobody_listening_refuses(machines: Machines) -> None:
    seen = list[str]()

    async def main(process: Process) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
            sock.setblocking(False)
            loop = asyncio.get_running_loop()
            try:
                await loop.sock_connect(sock, ("127.0.1.9", 7000))
            except ConnectionRefusedError:
                seen.append("refused")

    machines.add("one").start(main)
    assert machines.world.run(lambda: bool(seen), deadline=10)


def test_descriptors_are_used_again_as_a_kernel_does(machines: Machines) -> None:
    seen = list[int]()

    async def main(process: Process) -> None:
        one, two = socket.socket(), socket.socket()
        seen.extend((one.fileno(), two.fileno()))
        one.close()
        three = socket.socket()
        seen.append(three.fileno())
        two.close()
        three.close()

    machines.add("one").start(main)
    machines.world.run(lambda: False, deadline=1)
    assert seen[2] == seen[0] != seen[1]
