"""Sends each request to an engine that prefills, then to one that decodes, in turns.

``python proxy.py [PREFILL_URL,... [DECODE_URL,... [PORT]]]``
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import Response, StreamingResponse
from starlette.background import BackgroundTask

_GIVEN = dict(enumerate(sys.argv))


class Turns:
    """Engines of one kind: each request begins with the next one."""

    def __init__(self, urls: str) -> None:
        self._urls = urls.split(",")
        self._numbers = itertools.count()

    def next(self) -> Iterable[str]:
        """Return whom to ask; those behind the first one if that is not there."""
        first = next(self._numbers) % len(self._urls)
        return self._urls[first:] + self._urls[:first]


PREFILL = Turns(_GIVEN.get(1, "http://127.0.0.1:8100"))
DECODE = Turns(_GIVEN.get(2, "http://127.0.0.1:8200"))


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with httpx.AsyncClient(timeout=None) as app.state.client:
        yield


app = FastAPI(lifespan=lifespan)


def prefill_body(body: dict[str, Any]) -> dict[str, Any]:
    """Return what computes the (first) prompt of a request, once, and no more."""
    one: dict[str, Any] = {"n": 1, "min_tokens": 0, "max_tokens": 1}
    one |= {"max_completion_tokens": None, "stream": False, "stream_options": None}
    one |= {"kv_transfer_params": {"do_remote_decode": True}}
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        one["prompt"] = prompt[0]
    return body | one


async def prefill(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
    """Have the prompt computed; return what the other engine is to be told of it."""
    for url in PREFILL.next():
        try:
            answer = await client.post(url + path, json=prefill_body(body))
        except httpx.TransportError:
            continue
        if answer.is_error:
            raise HTTPException(answer.status_code, answer.text)
        return answer.json().get("kv_transfer_params")
    return None  # nobody is there: the other engine computes the prompt itself


@app.post("/v1/completions")
@app.post("/v1/chat/completions")
async def complete(request: Request) -> Response:
    body, path = await request.json(), request.url.path
    client: httpx.AsyncClient = request.app.state.client
    carried = body | {"kv_transfer_params": await prefill(client, path, body)}
    for url in DECODE.next():
        sending = client.build_request("POST", url + path, json=carried)
        try:
            answer = await client.send(sending, stream=True)
        except httpx.ConnectError:
            continue
        kind, end = answer.headers.get("content-type"), BackgroundTask(answer.aclose)
        body_of = answer.aiter_raw()
        return StreamingResponse(body_of, answer.status_code, None, kind, end)
    raise HTTPException(503, "no engine that decodes is there")


if __name__ == "__main__":
    uvicorn.run(app, port=int(_GIVEN.get(3, "8000")))
