from __future__ import annotations

import pytest

from asynckv.testing.faults.raw import RawConnection, RawListener


async def test_bytes_pass_and_the_end_is_an_end() -> None:
    with RawListener() as listener, await RawConnection.dial(listener.url) as near:
        far = await listener.accept()
        await near.send(b"12345")
        assert await far.receive(2) == b"12"
        assert await far.receive_some() == b"345"
        near.finish()
        assert await far.receive(1) == b""


async def test_a_connection_can_be_broken_off() -> None:
    with RawListener() as listener, await RawConnection.dial(listener.url) as near:
        far = await listener.accept()
        near.close(resets=True)
        with pytest.raises(ConnectionResetError):
            await far.receive(1)


async def test_a_full_connection_takes_nothing_more_at_once() -> None:
    with RawListener() as listener, await RawConnection.dial(listener.url) as near:
        while near.send_nowait(bytes(2**20)):
            pass


async def test_nobody_there_is_an_error_of_the_system() -> None:
    with RawListener() as listener:
        url = listener.url
    with pytest.raises(ConnectionRefusedError):
        await RawConnection.dial(url)
