"""Sends each request first to the engine that prefills, then to the one that decodes.

What the first answers as ``kv_transfer_params`` the second request carries: that is all
a proxy has to do. ``python proxy.py PREFILL_URL DECODE_URL [PORT]``.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import Response, StreamingResponse

PREFILL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8100"
DECODE = sys.argv[2] if len(sys.argv) > 2 else "http://127.0.0.1:8200"


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with httpx.AsyncClient(timeout=None) as client:
        app.state.client = client
        yield


app = FastAPI(lifespan=lifespan)


async def prefill(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
    """Have the prompt computed; return where its KV is."""
    one_token = body | {
        "max_tokens": 1,
        "stream": False,
        "kv_transfer_params": {"do_remote_decode": True},
    }
    one_token.pop("stream_options", None)
    answer = await client.post(PREFILL + path, json=one_token)
    if answer.is_error:
        raise HTTPException(answer.status_code, answer.text)
    return answer.json().get("kv_transfer_params")


@app.post("/v1/completions")
@app.post("/v1/chat/completions")
async def complete(request: Request) -> Response:
    body, path = await request.json(), request.url.path
    client: httpx.AsyncClient = request.app.state.client
    carried = body | {"kv_transfer_params": await prefill(client, path, body)}
    sending = client.build_request("POST", DECODE + path, json=carried)
    answer = await client.send(sending, stream=True)
    kind = answer.headers.get("content-type")
    return StreamingResponse(answer.aiter_raw(), answer.status_code, media_type=kind)


if __name__ == "__main__":
    uvicorn.run(app, port=int(sys.argv[3]) if len(sys.argv) > 3 else 8000)
