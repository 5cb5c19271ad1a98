from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Annotated, TypeAlias

import httpx
import pytest
import torch
from fastapi import Depends, FastAPI, HTTPException
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.responses import Response

import asynckv
from asynckv.integrations.fastapi import lifespan, lookup, stream_response
from asynckv.testing import until

TOKENS = [1, 2, 3]
KEY = torch.arange(2**17, dtype=torch.uint8)
SPECS = {
    name: asynckv.TensorSpec(tuple(KEY.shape), "uint8") for name in "key value".split()
}

RunApp: TypeAlias = Callable[[Starlette], AbstractAsyncContextManager[int]]
Lookup: TypeAlias = Annotated[asynckv.KVLookupBuffer, Depends(lookup)]


async def names_of(stream: asynckv.SelectStream) -> AsyncIterator[str]:
    async for name, _ in stream:
        yield f"{name}\n"


async def fails(stream: asynckv.SelectStream) -> AsyncIterator[bytes]:
    yield b"begun"
    raise LookupError(stream.entry_id)


def make_app(url: str) -> FastAPI:
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
async def port(local: asynckv.LookupBuffer, run_app: RunApp) -> AsyncIterator[int]:
    async with asynckv.serve("tcp://127.0.0.1:0", lookup=local) as server:
        async with run_app(make_app(server.url)) as port:
            yield port


def client_of(port: int) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}")


async def insert_slowly(buffer: asynckv.LookupBuffer, seen: asyncio.Event) -> None:
    async with buffer.open_insert(TOKENS, None, SPECS) as writer:
        await writer.put("key", KEY)
        await seen.wait()
        await writer.put("value", KEY)


async def test_layers_are_answered_while_they_come_and_the_entry_is_taken(
    local: asynckv.LookupBuffer, port: int
) -> None:
    seen = asyncio.Event()
    async with asyncio.TaskGroup() as group, client_of(port) as client:
        group.create_task(insert_slowly(local, seen))
        async with client.stream("GET", "/layers") as answer:
            chunks = answer.aiter_text()
            assert await anext(chunks) == "key\n"
            seen.set()
            assert "".join([chunk async for chunk in chunks]) == "value\n"
    await until(lambda: local.statistics().acknowledged == 1)


async def test_a_client_that_goes_away_in_mid_stream_gives_the_entry_back(
    local: asynckv.LookupBuffer, port: int
) -> None:
    async with local.open_insert(TOKENS, None, SPECS) as writer:
        await writer.put("key", KEY)
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(b"GET /layers HTTP/1.1\r\nHost: test\r\n\r\n")
            await until(lambda: b"key\n" in received(client))
        await until(lambda: local.statistics().given_back == 1, timeout_s=1)
        await writer.put("value", KEY)
    assert local.statistics().acknowledged == 0
    assert torch.equal((await local.drop_select(TOKENS)).key_tensor, KEY)


def received(client: socket.socket) -> bytes:
    client.setblocking(False)
    try:
        return client.recv(2**16, socket.MSG_PEEK)
    except BlockingIOError:
        return b""


async def test_what_fails_while_it_streams_gives_the_entry_back(
    local: asynckv.LookupBuffer, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("CRITICAL", "uvicorn.error")  # a record would keep the tensors
    await local.insert(TOKENS, None, KEY, None, None)
    async with client_of(port) as client:
        with pytest.raises(httpx.RemoteProtocolError):
            await client.get("/layers", params={"fail": True})
    await until(lambda: local.statistics().given_back == 1)
    assert await local.peek(TOKENS) == 3


async def test_what_fails_before_the_first_byte_gives_the_entry_back(
    local: asynckv.LookupBuffer,
) -> None:
    def broken(stream: asynckv.SelectStream) -> AsyncIterator[bytes]:
        raise LookupError(stream.entry_id)

    await local.insert(TOKENS, None, KEY, None, None)
    with pytest.raises(LookupError):
        await stream_response(local.open_drop_select(TOKENS), broken)
    assert local.statistics().given_back == 1


async def test_a_deadline_before_the_first_byte_is_still_a_status(
    local: asynckv.LookupBuffer, port: int
) -> None:
    async with client_of(port) as client:
        answer = await client.get("/layers", params={"fail": True})
    assert answer.status_code == 504
    await until(lambda: local.statistics().waiting_selects == 0)


async def test_a_server_whose_sending_fails_ends_it_too(
    local: asynckv.LookupBuffer,
) -> None:
    async def send(message: object) -> None:
        raise OSError("the client has gone")

    async def receive() -> dict[str, object]:
        raise AssertionError("such a server is not asked")

    await local.insert(TOKENS, None, KEY, None, None)
    response = await stream_response(local.open_drop_select(TOKENS), names_of)
    scope = {"type": "http", "asgi": {"spec_version": "2.4"}}
    with pytest.raises(ClientDisconnect):
        await response(scope, receive, send)
    assert local.statistics().given_back == 1
