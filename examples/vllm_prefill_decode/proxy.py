"""Sends each request to the engine that prefills, then to the one that decodes.

``python proxy.py [PREFILL_URL [DECODE_URL [PORT]]]``
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
from starlette.background import BackgroundTask

_GIVEN = dict(enumerate(sys.argv))
PREFILL = _GIVEN.get(1, "http://127.0.0.1:8100")
DECODE = _GIVEN.get(2, "http://127.0.0.1:8200")


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with httpx.AsyncClient(timeout=None) as app.state.client:
        yield


app = FastAPI(lifespan=lifespan)


async def prefill(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
    """Have the prompt computed; return what the other engine is to be told of it."""
    one: dict[str, Any] = {"max_tokens": 1, "max_completion_tokens": None}
    one |= {"stream": False, "stream_options": None}
    params = {"kv_transfer_params": {"do_remote_decode": True}}
    try:
        answer = await client.post(PREFILL + path, json=body | one | params)
    except httpx.TransportError:
        return None  # it is not there: the other engine computes the prompt itself
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
    kind, end = answer.headers.get("content-type"), BackgroundTask(answer.aclose)
    return StreamingResponse(answer.aiter_raw(), answer.status_code, None, kind, end)


if __name__ == "__main__":
    uvicorn.run(app, port=int(_GIVEN.get(3, "8000")))
