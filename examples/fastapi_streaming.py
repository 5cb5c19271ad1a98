"""A decode service that answers with each layer as it comes, and loses no entry.

    python examples/fastapi_streaming.py tcp://127.0.0.1:14579

takes KV from there. Without a URL it prefills layer by layer itself, and asks twice:
the first client goes away in mid-stream, the second one gets all layers nevertheless.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator
from typing import Annotated

import httpx
import torch
import uvicorn
from fastapi import Depends, FastAPI, HTTPException, Response

import asynckv
from asynckv.integrations import fastapi as kv

SPECS = {f"{n}.key": asynckv.TensorSpec((8, 128), "float32") for n in range(12)}


async def decode(stream: asynckv.SelectStream) -> AsyncIterator[str]:
    async for name, tensor in stream:  # an engine would begin with this layer
        yield f"{name} {tuple(tensor.shape)}\n"


def make_app(url: str) -> FastAPI:
    app = FastAPI(lifespan=kv.lifespan(connect=url))

    @app.get("/decode")
    @kv.cancel_on_disconnect  # while it waits for the entry
    async def answer(
        prompt: str, buffer: Annotated[asynckv.KVLookupBuffer, Depends(kv.lookup)]
    ) -> Response:
        selecting = buffer.open_drop_select(list(prompt.encode()))
        try:
            async with asyncio.timeout(5):
                return await kv.stream_response(selecting, decode)
        except TimeoutError:
            raise HTTPException(504, "no KV: recompute the prompt") from None

    return app


async def prefill(buffer: asynckv.LookupBuffer, tokens: list[int]) -> None:
    async with buffer.open_insert(tokens, None, SPECS) as writer:
        for name, spec in SPECS.items():
            await asyncio.sleep(0.05)  # computing the layer
            await writer.put(name, torch.ones(spec.shape))


async def main() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    http = "http://{}:{}".format(*listener.getsockname())
    async with (
        asynckv.LookupBuffer("64MiB") as buffer,
        asynckv.serve("tcp://127.0.0.1:0", lookup=buffer) as server,
        httpx.AsyncClient(base_url=http, params={"prompt": "why?"}) as client,
    ):
        app = uvicorn.Server(uvicorn.Config(make_app(server.url), log_level="warning"))
        serving = asyncio.create_task(app.serve(sockets=[listener]))
        prefilling = asyncio.create_task(prefill(buffer, list(b"why?")))
        async with client.stream("GET", "/decode") as answer:
            print("first client:", await anext(answer.aiter_lines()), "... and is gone")
        text = (await client.get("/decode")).text
        print(f"second client: all {text.count('key')} layers")
        app.should_exit = True
        await asyncio.gather(serving, prefilling)
        print(f"given back: {buffer.statistics().given_back}")


if __name__ == "__main__":
    uvicorn.run(make_app(sys.argv[1])) if sys.argv[1:] else asyncio.run(main())
