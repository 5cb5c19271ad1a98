from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest
import uvicorn
from starlette.applications import Starlette


@pytest.fixture
def run_app() -> Callable[[Starlette], AbstractAsyncContextManager[int]]:
    """Run an app by a real uvicorn on the test's loop; the value is its port."""
    return _run_app


@asynccontextmanager
async def _run_app(app: Starlette) -> AsyncIterator[int]:
    # It listens at once: a client that comes before uvicorn waits in line.
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    port: int = listener.getsockname()[1]
    config = uvicorn.Config(
        app, lifespan="on", http="h11", ws="none", log_config=None, access_log=False
    )
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield port
    finally:
        server.should_exit = True
        await serving
