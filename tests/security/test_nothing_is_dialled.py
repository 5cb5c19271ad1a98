"""An address that comes in a request is never dialled by whoever serves it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any, Final, get_args

import msgspec
import pytest

import asynckv
from asynckv.links.dial import dial
from asynckv.protocol.frames import OpeningFrame, Peek
from asynckv.types import TensorSpec
from harness.link_pairs import Hearer, name_of

pytestmark = pytest.mark.both_loops

ELSEWHERE: Final = "tcp://192.0.2.7:7"
_EVENTS: Final = {"socket.connect", "socket.getaddrinfo", "socket.sendto"}
_watched: Final[list[list[tuple[str, Any]]]] = []


def _receive(event: str, arguments: tuple[Any, ...]) -> None:
    if event in _EVENTS:
        for heard in _watched:
            heard.append((event, arguments))


@pytest.fixture(scope="module", autouse=True)
def audited() -> None:
    sys.addaudithook(_receive)  # it stays, and hears nothing unless it is told to


@contextlib.contextmanager
def watching() -> Iterator[list[tuple[str, Any]]]:
    """Whatever this process looks up or connects to."""
    heard: list[tuple[str, Any]] = []
    _watched.append(heard)
    try:
        yield heard
    finally:
        _watched.remove(heard)


def urls_in_it(kind: type[msgspec.Struct]) -> OpeningFrame:
    """A request with an address wherever there is room for one."""
    values: dict[str, Any] = {}
    for field in msgspec.structs.fields(kind):
        text = str(field.type)
        if "tuple" in text:
            values[field.name] = (ELSEWHERE,)
        elif "TensorSpec" in text:
            values[field.name] = TensorSpec((1,), "uint8")
        elif "Literal" in text:
            values[field.name] = get_args(field.type)[0]
        elif "str" in text:
            values[field.name] = ELSEWHERE
        elif "bytes" in text:
            values[field.name] = b""
        elif field.required:
            values[field.name] = field.type is bool or 1
    return msgspec.convert(values, kind)  # type: ignore[return-value]


async def ask_everything(url: str) -> None:
    """Make every request, each on a link of its own."""
    for kind in get_args(OpeningFrame):
        link = await dial(url, identity=name_of("near"), lanes=1)
        with contextlib.suppress(asynckv.PeerLost):
            link.open_stream(Hearer(), urls_in_it(kind), ELSEWHERE.encode())
            last = Hearer()
            link.open_stream(last, Peek(has_key=False))
            await last.next()  # it is answered behind what was asked before
        await link.aclose()


def test_every_request_can_be_made() -> None:
    named = [kind for kind in get_args(OpeningFrame) if kind.__name__ == "OpenPipe"]
    assert urls_in_it(named[0]).name == ELSEWHERE  # type: ignore[union-attr]


@pytest.mark.refusal
def test_no_request_has_a_place_for_an_address() -> None:
    for kind in get_args(OpeningFrame):
        names = {field.name for field in msgspec.structs.fields(kind)}
        assert not names & {"url", "urls", "host", "address", "path"}, kind


@pytest.mark.refusal
async def test_no_request_makes_a_server_dial() -> None:
    async with (
        asynckv.LookupBuffer("1MiB", drain_s=0) as lookup,
        asynckv.StoreBuffer("1MiB") as store,
        asynckv.serve("tcp://:0", lookup=lookup, store=store) as server,
    ):
        with watching() as heard:
            await ask_everything(server.url)
    port = int(server.url.rpartition(":")[2])
    assert heard
    assert {arguments[1] for _, arguments in heard} == {("127.0.0.1", port)}


@pytest.mark.refusal
async def test_no_request_makes_a_listener_for_pipes_dial() -> None:
    async with asynckv.listen_pipe("tcp://:0") as listener:
        with watching() as heard:
            await ask_everything(listener.url)
        port = int(listener.url.rpartition(":")[2])
    assert {arguments[1] for _, arguments in heard} == {("127.0.0.1", port)}


async def test_the_watch_would_see_it() -> None:
    with watching() as heard, contextlib.suppress(asynckv.AsyncKVError):
        await dial("tcp://127.0.0.1:1", identity=name_of("near"))
    assert [arguments[1] for _, arguments in heard] == [("127.0.0.1", 1)]
