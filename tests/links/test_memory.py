from __future__ import annotations

import asyncio

from asynckv.links.streams import MemoryStream


class Reader:
    """Pauses after each piece."""

    def __init__(self, stream: MemoryStream) -> None:
        self.pieces: list[bytes] = []
        self._stream = stream
        stream.start(self)

    def on_bytes(self, data: bytes) -> None:
        self.pieces.append(bytes(data))
        self._stream.pause_reading()

    def on_writable(self) -> None: ...

    def on_end(self, error: OSError | None) -> None: ...


async def test_a_reader_that_pauses_within_a_call_gets_no_more() -> None:
    near, far = MemoryStream.pair(asyncio.get_running_loop())
    reader = Reader(far)
    near.write(b"one")
    near.write(b"two")
    for _ in range(5):
        await asyncio.sleep(0)
    assert reader.pieces == [b"one"]
    assert near.unsent_bytes == 3
    far.resume_reading()
    for _ in range(5):
        await asyncio.sleep(0)
    assert reader.pieces == [b"one", b"two"]


async def test_nothing_is_delivered_within_the_call_that_writes() -> None:
    near, far = MemoryStream.pair(asyncio.get_running_loop())
    reader = Reader(far)
    near.write(b"one")
    assert reader.pieces == []
    near.abort()
    far.abort()
