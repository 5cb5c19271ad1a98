from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from asynckv.cli.bench.baselines import RawServer, RawStreams

TOKEN = bytes(range(32))


@pytest.fixture
def server() -> Iterator[RawServer]:
    server = RawServer("127.0.0.1", TOKEN)
    yield server
    server.close()


@pytest.fixture
def streams(server: RawServer) -> Iterator[RawStreams]:
    streams = RawStreams("127.0.0.1", server.port, TOKEN, 3)
    yield streams
    streams.close()
    for thread in threading.enumerate():
        if thread.name.startswith("raw stream"):
            thread.join()


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("parts", [3, 7])
def test_the_streams_share_out_all_parts(
    streams: RawStreams, count: int, parts: int
) -> None:
    targets = [memoryview(bytearray(70_000)) for _ in range(parts)]
    assert len(streams) == 3
    assert streams.pull(targets, count) > 0
    assert all(set(target) == {1} for target in targets)


def test_a_stream_that_is_hung_up_on_is_an_error(
    server: RawServer, streams: RawStreams
) -> None:
    streams.first.ping(1)
    server.close()
    with pytest.raises(OSError):
        streams.pull([memoryview(bytearray(10)) for _ in range(3)], 3)


def test_nobody_there_is_an_error(server: RawServer) -> None:
    server.close()
    with pytest.raises(OSError):
        RawStreams("127.0.0.1", server.port, TOKEN, 2).first.ping(1)
