from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Annotated, TypeAlias

import httpx
import pytest
import torch
from fastapi import Body, Depends, FastAPI, HTTPException
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import asynckv
from asynckv.integrations.fastapi import (
    cancel_on_disconnect,
    lifespan,
    lookup,
    stream_response,
)
from asynckv.testing import until

TOKENS = [1, 2, 3]
LAYER = torch.arange(2**17, dtype=torch.uint8)

SPECS = {
    name: asynckv.TensorSpec(tuple(LAYER.shape), "uint8")
    for name in "key value".split()
}

RunApp: TypeAlias = Callable[[Starlette], AbstractAsyncContextManager[int]]
Lookup: TypeAlias = Annotated[asynckv.KVLookupBuffer, Depends(lookup)]


async def names_of(stream: asynckv.SelectStream) -> AsyncIterator[str]:
    async for name, _ in stream:
        yield f"{name}\n"


async def fails(stream: asynckv.SelectStream) -> AsyncIterator[bytes]:
    yield b"begun"
    raise LookupError(stream.entry_id)


def streaming_app(url: str) -> FastAPI:
    app = FastAPI(lifespan=lifespan(connect=url))

    @app.get("/layers")
    async def layers(buffer: Lookup, fail: bool = False) -> Response:
        selecting = buffer.open_drop_select(TOKENS)
        try:
            async with asyncio.timeout(0.5 if fail else 30):
                return await stream_response(selecting, fails if fail else names_of)
        except TimeoutError:
            raise HTTPException(504) from None

    return app


@pytest.fixture
async def local() -> AsyncIterator[asynckv.LookupBuffer]:
    async with asynckv.LookupBuffer("16MiB", drain_s=0) as buffer:
        yield buffer


@pytest.fixture
async def streaming_port(
    local: asynckv.LookupBuffer, run_app: RunApp
) -> AsyncIterator[int]:
    async with asynckv.serve("tcp://127.0.0.1:0", lookup=local) as server:
        async with run_app(streaming_app(server.url)) as port:
            yield port


def client_of(port: int) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}")


async def insert_slowly(buffer: asynckv.LookupBuffer, seen: asyncio.Event) -> None:
    async with buffer.open_insert(TOKENS, None, SPECS) as writer:
        await writer.put("key", LAYER)
        await seen.wait()
        await writer.put("value", LAYER)


async def test_layers_are_answered_while_they_come_and_the_entry_is_taken(
    local: asynckv.LookupBuffer, streaming_port: int
) -> None:
    seen = asyncio.Event()
    async with asyncio.TaskGroup() as group, client_of(streaming_port) as client:
        group.create_task(insert_slowly(local, seen))
        async with client.stream("GET", "/layers") as answer:
            chunks = answer.aiter_text()
            assert await anext(chunks) == "key\n"
            seen.set()
            assert "".join([chunk async for chunk in chunks]) == "value\n"
    await until(lambda: local.statistics().acknowledged == 1)


async def test_a_client_that_goes_away_in_mid_stream_gives_the_entry_back(
    local: asynckv.LookupBuffer, streaming_port: int
) -> None:
    async with local.open_insert(TOKENS, None, SPECS) as writer:
        await writer.put("key", LAYER)
        with socket.create_connection(("127.0.0.1", streaming_port)) as client:
            client.sendall(b"GET /layers HTTP/1.1\r\nHost: test\r\n\r\n")
            await until(lambda: b"key\n" in received(client))
        await until(lambda: local.statistics().given_back == 1, timeout_s=1)
        await writer.put("value", LAYER)
    assert local.statistics().acknowledged == 0
    assert torch.equal((await local.drop_select(TOKENS)).key_tensor, LAYER)


def received(client: socket.socket) -> bytes:
    client.setblocking(False)
    try:
        return client.recv(2**16, socket.MSG_PEEK)
    except BlockingIOError:
        return b""


async def test_what_fails_while_it_streams_gives_the_entry_back(
    local: asynckv.LookupBuffer, streaming_port: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("CRITICAL", "uvicorn.error")  # a record would keep the tensors
    await local.insert(TOKENS, None, LAYER, None, None)
    async with client_of(streaming_port) as client:
        with pytest.raises(httpx.RemoteProtocolError):
            await client.get("/layers", params={"fail": True})
    await until(lambda: local.statistics().given_back == 1)
    assert await local.peek(TOKENS) == 3


async def test_what_fails_before_the_first_byte_gives_the_entry_back(
    local: asynckv.LookupBuffer,
) -> None:
    def broken(stream: asynckv.SelectStream) -> AsyncIterator[bytes]:
        raise LookupError(stream.entry_id)

    await local.insert(TOKENS, None, LAYER, None, None)
    with pytest.raises(LookupError):
        await stream_response(local.open_drop_select(TOKENS), broken)
    assert local.statistics().given_back == 1


async def test_a_deadline_before_the_first_byte_is_still_a_status(
    local: asynckv.LookupBuffer, streaming_port: int
) -> None:
    async with client_of(streaming_port) as client:
        answer = await client.get("/layers", params={"fail": True})
    assert answer.status_code == 504
    await until(lambda: local.statistics().waiting_selects == 0)


async def test_the_entry_is_taken_before_a_background_task_that_fails(
    local: asynckv.LookupBuffer,
) -> None:
    async def fail() -> None:
        assert local.statistics().acknowledged == 1
        raise LookupError

    async def send(message: object) -> None:
        pass

    async def receive() -> dict[str, object]:
        raise AssertionError("such a server is not asked")

    await local.insert(TOKENS, None, LAYER, None, None)
    response = await stream_response(local.open_drop_select(TOKENS), names_of)
    response.background = BackgroundTask(fail)
    with pytest.raises(LookupError):
        await response({"type": "http", "asgi": {"spec_version": "2.4"}}, receive, send)
    assert local.statistics().given_back == 0


async def test_a_server_whose_sending_fails_ends_it_too(
    local: asynckv.LookupBuffer,
) -> None:
    async def send(message: object) -> None:
        raise OSError("the client has gone")

    async def receive() -> dict[str, object]:
        raise AssertionError("such a server is not asked")

    await local.insert(TOKENS, None, LAYER, None, None)
    response = await stream_response(local.open_drop_select(TOKENS), names_of)
    scope = {"type": "http", "asgi": {"spec_version": "2.4"}}
    with pytest.raises(ClientDisconnect):
        await response(scope, receive, send)
    assert local.statistics().given_back == 1


KEY = torch.arange(2**20, dtype=torch.uint8)
SPEC = asynckv.TensorSpec(tuple(KEY.shape), "uint8")


class Seen:
    """What the routes of :func:`make_app` came to."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.ended: list[str] = []

    async def stay(self) -> None:
        self.reached.set()
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            self.ended.append("cancelled")
            raise


def make_app(url: str, seen: Seen) -> FastAPI:
    app = FastAPI(lifespan=lifespan(connect=url))

    @app.get("/await")
    @cancel_on_disconnect
    async def await_entry(buffer: Lookup) -> int:
        seen.reached.set()
        return (await buffer.drop_select(TOKENS)).matched_tokens

    @app.get("/hold")
    @cancel_on_disconnect
    async def hold_entry(buffer: Lookup) -> None:
        async with buffer.drop_select(TOKENS):
            await seen.stay()

    @app.get("/stream")
    @cancel_on_disconnect
    async def stream_entry(buffer: Lookup) -> None:
        async with buffer.open_drop_select(TOKENS) as stream:
            await stream.wait_for("key")
            await seen.stay()

    @app.post("/body")
    @cancel_on_disconnect
    async def read_body(number: Annotated[int, Body()]) -> int:
        await seen.stay()
        return number

    return app


@pytest.fixture
def seen() -> Seen:
    return Seen()


@pytest.fixture
async def port(
    local: asynckv.LookupBuffer, seen: Seen, run_app: RunApp
) -> AsyncIterator[int]:
    async with asynckv.serve("tcp://127.0.0.1:0", lookup=local) as server:
        async with run_app(make_app(server.url, seen)) as port:
            yield port


def request(port: int, line: str, body: str = "") -> socket.socket:
    """Ask as a client that says nothing when it goes."""
    client = socket.create_connection(("127.0.0.1", port))
    head = f"{line} HTTP/1.1\r\nHost: test\r\nContent-Length: {len(body)}\r\n"
    client.sendall(f"{head}Content-Type: application/json\r\n\r\n{body}".encode())
    return client


async def test_an_entry_that_a_gone_client_held_is_back_within_a_second(
    local: asynckv.LookupBuffer, port: int, seen: Seen
) -> None:
    await local.insert(TOKENS, None, KEY, None, None)
    with request(port, "GET /hold"):
        await seen.reached.wait()
        assert await local.peek(TOKENS) == 0
    async with asyncio.timeout(1):
        entry = await local.drop_select(TOKENS)
    assert isinstance(entry.key, torch.Tensor)
    assert torch.equal(entry.key, KEY)
    assert seen.ended == ["cancelled"]


@pytest.mark.parametrize("path", ["/await", "/stream"])
async def test_an_entry_still_in_transfer_is_back_within_a_second(
    local: asynckv.LookupBuffer, port: int, seen: Seen, path: str
) -> None:
    specs = {"key": SPEC, "value": SPEC}
    async with local.open_insert(TOKENS, None, specs) as writer:
        await writer.put("key", KEY)
        with request(port, f"GET {path}"):
            await seen.reached.wait()
            await until(lambda: local.statistics().leased == 1)
        await until(lambda: local.statistics().leased == 0, timeout_s=1)
        await writer.put("value", KEY)
    assert (await local.drop_select(TOKENS)).matched_tokens == 3


async def test_a_wait_of_a_gone_client_takes_no_entry(
    local: asynckv.LookupBuffer, port: int
) -> None:
    with request(port, "GET /await"):
        await until(lambda: local.statistics().waiting_selects == 1)
    await until(lambda: local.statistics().waiting_selects == 0, timeout_s=1)
    await local.insert(TOKENS, None, KEY, None, None)
    assert await local.peek(TOKENS) == 3


async def test_a_route_that_reads_a_body_is_cancelled_too(
    port: int, seen: Seen
) -> None:
    with request(port, "POST /body", "7"):
        await seen.reached.wait()
    await until(lambda: seen.ended == ["cancelled"], timeout_s=1)


async def test_a_client_that_stays_gets_its_answer(
    local: asynckv.LookupBuffer, port: int
) -> None:
    async with client_of(port) as client:
        answer = asyncio.create_task(client.get("/await"))
        await until(lambda: local.statistics().waiting_selects == 1)
        await local.insert(TOKENS, None, KEY, None, None)
        assert (await answer).json() == 3


async def test_under_bare_starlette_the_route_still_reads_its_body(
    run_app: RunApp,
) -> None:
    @cancel_on_disconnect
    async def double(request: Request) -> Response:
        return JSONResponse(2 * await request.json())

    app = Starlette(routes=[Route("/", double, methods=["POST"])])
    async with (
        run_app(app) as port,
        client_of(port) as client,
    ):
        assert (await client.post("/", json=21)).json() == 42


async def test_a_dependency_that_waits_is_cancelled_too(
    run_app: RunApp, seen: Seen
) -> None:
    app = FastAPI()

    @cancel_on_disconnect
    async def wait(delay: int = 0) -> None:
        await seen.stay()

    @app.get("/", dependencies=[Depends(wait)])
    async def route() -> None:
        seen.ended.append("went on")

    async with run_app(app) as port:
        with request(port, "GET /"):
            await seen.reached.wait()
        await until(lambda: seen.ended == ["cancelled"], timeout_s=1)


async def test_a_time_out_of_the_route_stays_its_own() -> None:
    @cancel_on_disconnect
    async def impatient(request: Request) -> None:
        async with asyncio.timeout(0):
            await asyncio.get_running_loop().create_future()

    with pytest.raises(TimeoutError):
        await impatient(request_without_end())


async def test_a_cancellation_from_elsewhere_stays_one() -> None:
    seen = Seen()

    @cancel_on_disconnect
    async def wait(request: Request) -> None:
        await seen.stay()

    task = asyncio.create_task(wait(request_without_end()))
    await seen.reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()


def request_without_end() -> Request:
    messages = iter([{"type": "http.request", "body": b""}])

    async def receive() -> dict[str, object]:
        for message in messages:
            return dict(message)
        await asyncio.get_running_loop().create_future()
        raise AssertionError

    return Request({"type": "http", "method": "GET", "headers": []}, receive)


def test_what_fastapi_documents_shows_nothing_of_it() -> None:
    app = make_app("mem://", Seen())
    assert "cancel_on_disconnect" not in str(app.openapi())


async def test_a_route_without_a_request_is_refused() -> None:
    @cancel_on_disconnect
    async def route() -> None: ...

    with pytest.raises(TypeError, match="HTTP routes"):
        await route()
