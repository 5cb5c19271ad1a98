"""A service that takes KV from producer.py, and answers probes meanwhile.

    python examples/fastapi_service.py tcp://127.0.0.1:14579

Without a URL it starts the producer, asks itself as a client would, and ends.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from pathlib import Path
from typing import Annotated

import httpx
import uvicorn
from fastapi import Depends, FastAPI, HTTPException

from asynckv.abc import KVLookupBuffer
from asynckv.integrations import fastapi as kv

PRODUCER = Path(__file__).with_name("producer.py")


def make_app(url: str) -> FastAPI:
    app = FastAPI(lifespan=kv.lifespan(connect=url))
    app.include_router(kv.health_router())

    @app.get("/decode")
    @kv.cancel_on_disconnect  # the entry of a client that goes away goes back
    async def decode(
        prompt: str,
        buffer: Annotated[KVLookupBuffer, Depends(kv.lookup)],
        timeout_s: float = 10,
    ) -> int:
        try:
            async with asyncio.timeout(timeout_s):
                return (await buffer.drop_select(list(prompt.encode()))).nbytes
        except TimeoutError:
            raise HTTPException(504, "no KV: recompute the prompt") from None

    return app


async def drive(client: httpx.AsyncClient) -> None:
    late = await client.get("/decode", params={"prompt": "?", "timeout_s": 0.1})
    print(f"a prompt that nobody prefilled: {late.status_code} {late.text}")
    prompts = [{"prompt": f"Prompt {number}: why is the sky"} for number in range(8)]
    asked = [asyncio.create_task(client.get("/decode", params=p)) for p in prompts]
    waits_ms = []
    while not all(task.done() for task in asked):
        health = (await client.get("/healthz")).raise_for_status()
        waits_ms.append(1000 * health.elapsed.total_seconds())
    moved = sum(task.result().raise_for_status().json() for task in asked)
    median = sorted(waits_ms)[len(waits_ms) // 2]
    print(f"{moved >> 20} MiB came; meanwhile /healthz took {median:.1f} ms (median)")


async def main() -> None:
    producer = await asyncio.create_subprocess_exec(
        sys.executable, PRODUCER, "tcp://127.0.0.1:0", stdout=asyncio.subprocess.PIPE
    )
    assert producer.stdout is not None
    url = (await producer.stdout.readline()).decode().split()[-1]
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    service = uvicorn.Server(uvicorn.Config(make_app(url), log_level="warning"))
    serving = asyncio.create_task(service.serve(sockets=[listener]))
    own_url = "http://{}:{}".format(*listener.getsockname())
    async with httpx.AsyncClient(base_url=own_url, timeout=60) as client:
        await drive(client)
    service.should_exit = True
    await asyncio.gather(serving, producer.communicate())


if __name__ == "__main__":
    uvicorn.run(make_app(sys.argv[1])) if sys.argv[1:] else asyncio.run(main())
