from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import httpx
import pytest
import torch
from fastapi import Depends, FastAPI
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import asynckv
from asynckv.abc import KVLookupBuffer
from asynckv.integrations.fastapi import (
    health_router,
    health_routes,
    lifespan,
    lookup,
    store,
)
from asynckv.integrations.fastapi.lifecycle import AppLifespan, status_of
from asynckv.testing import Authority, until, use_across_tasks

TOKENS = [1, 2, 3]
Lookup: TypeAlias = Annotated[KVLookupBuffer, Depends(lookup)]
Store: TypeAlias = Annotated[asynckv.KVStoreBuffer, Depends(store)]
MakeApp: TypeAlias = Callable[[AppLifespan], Starlette]


def fastapi_app(life: AppLifespan) -> FastAPI:
    app = FastAPI(lifespan=life)

    @app.get("/peek")
    async def peek(buffer: Lookup) -> int:
        return await buffer.peek(TOKENS)

    @app.get("/stored")
    async def stored(buffer: Store) -> int:
        return await buffer.match_prefix(["key"])

    return app


def starlette_app(life: AppLifespan) -> Starlette:
    async def peek(request: Request) -> Response:
        buffer = await lookup(request)
        return JSONResponse(await buffer.peek(TOKENS))

    return Starlette(routes=[Route("/peek", peek)], lifespan=life)


BOTH = pytest.mark.parametrize("make_app", [fastapi_app, starlette_app])


def started(app: Starlette) -> AbstractAsyncContextManager[object]:
    return app.router.lifespan_context(app)


async def peek(app: Starlette, path: str = "/peek") -> httpx.Response:
    async with client_of(app) as client:
        return await client.get(path)


@asynccontextmanager
async def served(
    url: str = "tcp://127.0.0.1:0", secret_file: Path | None = None
) -> AsyncIterator[tuple[asynckv.LookupBuffer, str]]:
    async with (
        asynckv.LookupBuffer("1MiB", drain_s=0) as buffer,
        asynckv.serve(url, lookup=buffer, secret_file=secret_file) as server,
    ):
        yield buffer, server.url


def free_url() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"tcp://127.0.0.1:{listener.getsockname()[1]}"


def secret_in(path: Path) -> Path:
    path.touch(0o600)
    path.write_text(f"correct-horse-battery-staple-{path.name * 10}")
    return path


@pytest.mark.parametrize("kind", ["secret", "tls"])
async def test_what_an_app_opens_can_be_protected(
    kind: str, tmp_path: Path, authority: Authority
) -> None:
    options: dict[str, Any] = {"tls": authority.issue()}
    if kind == "secret":
        options = {"secret_file": secret_in(tmp_path / "secret")}
    url = "tls://127.0.0.1:0" if kind == "tls" else "tcp://127.0.0.1:0"
    serving = fastapi_app(lifespan(serve=url, **options))
    async with started(serving):
        where = serving.state.asynckv.opened.url
        async with started(app := fastapi_app(lifespan(connect=where, **options))):
            assert (await peek(app)).json() == 0


@BOTH
async def test_an_app_that_connects_hands_the_peers_buffer_to_its_routes(
    make_app: MakeApp,
) -> None:
    async with served() as (buffer, url):
        app = make_app(lifespan(connect=url))
        await buffer.insert(TOKENS, None, None, None, None)
        async with started(app):
            assert (await peek(app)).json() == 3
            assert status_of(app) == "ready"


@BOTH
async def test_an_app_that_serves_a_given_buffer_leaves_it_open(
    make_app: MakeApp,
) -> None:
    url = free_url()
    async with asynckv.LookupBuffer("1MiB", drain_s=0) as buffer:
        app = make_app(lifespan(serve=url, lookup=buffer))
        async with started(app), asynckv.connect(url) as peer:
            await peer.lookup.insert(TOKENS, None, None, None, None)
            assert (await peek(app)).json() == 3
        assert await buffer.peek(TOKENS) == 3


async def test_an_app_has_the_store_that_it_serves_or_that_its_peer_does() -> None:
    url = free_url()
    async with asynckv.StoreBuffer("1MiB") as given:
        await given.put("key", torch.ones(1))
        serving = fastapi_app(lifespan(serve=url, store=given))
        async with started(serving), started(app := fastapi_app(lifespan(connect=url))):
            assert (await peek(serving, "/stored")).json() == 1
            assert (await peek(app, "/stored")).json() == 1
            with pytest.raises(RuntimeError, match="a store alone"):
                await peek(serving)
        assert await given.contains(["key"]) == (True,)


async def test_an_app_that_serves_no_store_has_none() -> None:
    async with started(app := fastapi_app(lifespan(serve="mem://", drain_s=0))):
        with pytest.raises(RuntimeError, match="this app has no store"):
            await peek(app, "/stored")


async def test_an_app_that_serves_its_own_buffer_can_start_again() -> None:
    app = fastapi_app(lifespan(serve="tcp://127.0.0.1:0", drain_s=0))
    for _ in range(2):
        async with started(app):
            assert (await peek(app)).json() == 0
        assert status_of(app) == "draining"


async def test_what_is_left_is_served_while_the_app_stops() -> None:
    url = free_url()
    app = fastapi_app(lifespan(serve=url))
    running = started(app)
    await running.__aenter__()
    async with asynckv.connect(url) as peer:
        await peer.lookup.insert(TOKENS, None, None, None, None)
        stopping = asyncio.create_task(stop(running))
        await until(lambda: status_of(app) == "draining")
        assert (await peek(app)).status_code == 503
        assert (await peer.lookup.drop_select(TOKENS)).matched_tokens == 3
        await stopping


async def stop(running: AbstractAsyncContextManager[object]) -> None:
    await running.__aexit__(None, None, None)


async def test_a_config_opens_a_node() -> None:
    async with served() as (buffer, url):
        config = asynckv.KVTransferConfig(
            kv_role="kv_consumer", kv_port=int(url.rpartition(":")[2])
        )
        app = fastapi_app(lifespan(config))
        await buffer.insert(TOKENS, None, None, None, None)
        async with started(app):
            assert (await peek(app)).json() == 3


async def test_an_app_starts_before_its_peer_and_is_ready_after_it() -> None:
    url = free_url()
    app = fastapi_app(lifespan(connect=url, wait_s=0))
    async with started(app):
        assert status_of(app) == "connecting"
        answer = await peek(app)
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
        async with served(url):
            await until(lambda: status_of(app) == "ready")
            assert (await peek(app)).status_code == 200


async def test_a_peer_that_says_goodbye_is_waited_for_anew() -> None:
    url = free_url()
    app = fastapi_app(lifespan(connect=url))
    async with asynckv.LookupBuffer("1MiB", drain_s=0) as buffer:
        first = asynckv.serve(url, lookup=buffer)
        await first.__aenter__()
        async with started(app):
            await first.aclose()
            await until(lambda: status_of(app) == "connecting")
            async with served(url):
                await until(lambda: status_of(app) == "ready")


async def test_a_peer_that_has_another_secret_for_a_while_is_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url, ours, other = free_url(), secret_in(tmp_path / "a"), secret_in(tmp_path / "b")
    app = fastapi_app(lifespan(connect=url, secret_file=ours))
    async with contextlib.AsyncExitStack() as stack:
        async with served(url, ours):
            await stack.enter_async_context(started(app))
            assert status_of(app) == "ready"
        async with served(url, other):
            await until(lambda: "cannot be used now" in caplog.text)
            assert status_of(app) == "connecting"
        async with served(url, ours):
            await until(lambda: status_of(app) == "ready")


async def test_a_connection_that_was_cut_is_lost_until_it_is_back() -> None:
    async with served() as (_, url):
        app = fastapi_app(lifespan(connect=url))
        async with started(app):
            link = await app.state.asynckv.opened.peer.link()
            link.abort()
            await until(lambda: status_of(app) == "lost")
            await until(lambda: status_of(app) == "ready")


async def test_an_app_that_serves_keeps_its_buffer_when_its_peer_has_gone() -> None:
    async with asynckv.LookupBuffer("1MiB", drain_s=0) as other:
        server = asynckv.serve("tcp://127.0.0.1:0", lookup=other)
        await server.__aenter__()
        config = asynckv.KVTransferConfig(
            kv_role="kv_both",
            kv_port=0,
            kv_connector_extra_config={"peer_url": server.url},
        )
        app = fastapi_app(lifespan(config, drain_s=0))
        async with started(app):
            await server.aclose()
            await until(lambda: status_of(app) == "lost")
            inserts = app.state.asynckv.opened.lookup
            await inserts.insert(TOKENS, None, None, None, None)
            assert status_of(app) == "lost"


async def test_what_cannot_be_opened_fails_the_start() -> None:
    app = fastapi_app(lifespan(asynckv.KVTransferConfig()))
    with pytest.raises(asynckv.ConfigError, match="kv_role is not set"):
        async with started(app):
            pass


async def test_a_peer_of_another_model_ends_it_with_a_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    url = free_url()
    app = fastapi_app(lifespan(connect=url, fingerprint="a", wait_s=0))
    async with (
        started(app),
        asynckv.LookupBuffer("1MiB", fingerprint="b", drain_s=0) as buffer,
        asynckv.serve(url, lookup=buffer),
    ):
        await until(lambda: "can take no part in transfers" in caplog.text)
        assert status_of(app) == "failed"


async def test_it_goes_inside_a_lifespan_of_the_users_own() -> None:
    order: list[str] = []
    kv = lifespan(serve="tcp://127.0.0.1:0", drain_s=0)

    @asynccontextmanager
    async def mine(app: FastAPI) -> AsyncIterator[None]:
        async with kv(app):
            order.append(status_of(app))
            yield
        order.append(status_of(app))

    app = FastAPI(lifespan=mine)
    async with started(app):
        pass
    assert order == ["ready", "draining"]


async def test_one_task_may_start_it_and_another_stop_it() -> None:
    life = lifespan(serve="tcp://127.0.0.1:0", drain_s=0)
    await use_across_tasks(life(Starlette()))


async def test_a_cancelled_start_leaves_nothing_behind() -> None:
    app = fastapi_app(lifespan(connect=free_url(), wait_s=60))
    starting = asyncio.create_task(started(app).__aenter__())
    await until(lambda: status_of(app) == "connecting")
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert status_of(app) == "draining"


async def test_an_app_without_the_lifespan_is_told_so() -> None:
    with pytest.raises(RuntimeError, match="lifespan"):
        await lookup(Request({"type": "http", "app": Starlette()}))


async def test_it_says_where_it_serves(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "asynckv")
    async with started(Starlette(lifespan=lifespan(serve="mem://here"))):
        assert "serving KV at mem://here" in caplog.text


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "one of these"),
        ({"connect": "mem://a", "serve": "mem://b"}, "one of these"),
        ({"connect": "mem://a", "lookup": asynckv.LookupBuffer()}, "lookup="),
        ({"store": asynckv.StoreBuffer()}, "store="),
    ],
)
def test_it_does_exactly_one_thing(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        lifespan(**given)


@pytest.mark.parametrize("option", ["drain_s", "wait_s"])
@pytest.mark.parametrize("value", [math.nan, -1])
def test_a_time_that_is_none_is_refused_at_once(option: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{option} is a number of seconds"):
        lifespan(serve="mem://a", **{option: value})  # type: ignore[arg-type]


def test_a_url_where_a_configuration_belongs_is_refused_at_once() -> None:
    with pytest.raises(TypeError, match="config is a KVTransferConfig, not a str"):
        lifespan("tcp://127.0.0.1:1")  # type: ignore[arg-type]


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
