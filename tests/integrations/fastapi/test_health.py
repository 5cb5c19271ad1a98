from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import httpx
import torch
from fastapi import FastAPI
from starlette.applications import Starlette

import asynckv
from asynckv.integrations.fastapi import health_router, health_routes, lifespan


def client_of(app: Starlette) -> httpx.AsyncClient:
    """Ask the app without a server: it need not be started."""
    transport = httpx.ASGITransport(app)
    return httpx.AsyncClient(transport=transport, base_url="http://test")


async def test_the_probes_say_one_word_and_no_more() -> None:
    app = Starlette(routes=health_routes(), lifespan=lifespan(serve="mem://"))
    async with app.router.lifespan_context(app), client_of(app) as client:
        for path, status in (("/healthz", "ok"), ("/readyz", "ready")):
            answer = await client.get(path)
            assert (answer.status_code, answer.json()) == (200, {"status": status})


async def test_an_app_without_a_lifespan_is_alive_and_not_ready() -> None:
    app = FastAPI()
    app.include_router(health_router())
    async with client_of(app) as client:
        assert (await client.get("/healthz")).status_code == 200
        answer = await client.get("/readyz")
    assert (answer.status_code, answer.json()) == (503, {"status": "not started"})


async def test_the_router_takes_a_prefix_and_stays_out_of_the_documentation() -> None:
    app = FastAPI()
    app.include_router(health_router(), prefix="/kv")
    async with client_of(app) as client:
        assert (await client.get("/kv/healthz")).status_code == 200
    assert app.openapi()["paths"] == {}


async def test_the_probes_cannot_be_posted_to() -> None:
    app = Starlette(routes=health_routes())
    async with client_of(app) as client:
        for path in ("/healthz", "/readyz"):
            assert (await client.post(path)).status_code == 405


async def test_health_is_answered_while_big_entries_move(
    run_app: Callable[[Starlette], AbstractAsyncContextManager[int]],
) -> None:
    key = torch.zeros(2**25, dtype=torch.uint8)
    app = Starlette(routes=health_routes(), lifespan=lifespan(serve="mem://"))
    async with (
        run_app(app) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client,
        asynckv.LookupBuffer("64MiB") as local,
        asynckv.serve("tcp://127.0.0.1:0", lookup=local) as server,
        asynckv.connect(server.url) as peer,
    ):
        enough = asyncio.Event()
        moving = asyncio.create_task(move_until(enough, peer.lookup, key))
        waits_s = []
        for _ in range(20):
            began = time.perf_counter()
            assert (await client.get("/healthz")).status_code == 200
            waits_s.append(time.perf_counter() - began)
        enough.set()
        assert await moving >= 1
    assert sorted(waits_s)[10] < 0.25 and max(waits_s) < 2


async def move_until(
    enough: asyncio.Event, lookup: asynckv.KVLookupBuffer, key: torch.Tensor
) -> int:
    into, count = torch.empty_like(key), 0
    while not enough.is_set():
        await lookup.insert([1], None, key, None, None)
        await lookup.drop_select([1], into={"key": into})
        count += 1
    return count
