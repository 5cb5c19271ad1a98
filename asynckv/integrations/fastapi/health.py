"""Two probes for whoever runs the app. They show one word, and change nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import BaseRoute, Route

from asynckv.integrations.fastapi.lifecycle import status_of

if TYPE_CHECKING:
    from fastapi import APIRouter

__all__ = ("health_router", "health_routes")


def health_routes() -> list[BaseRoute]:
    """Return ``/healthz`` and ``/readyz``, for ``Starlette(routes=[...])``.

    ``/healthz`` is 200 whenever the event loop answers. ``/readyz`` is 200 while
    a buffer can be used, and 503 before, after, and while the peer is lost.
    """
    return [
        Route("/healthz", _healthz, methods=["GET"], include_in_schema=False),
        Route("/readyz", _readyz, methods=["GET"], include_in_schema=False),
    ]


def health_router() -> APIRouter:
    """Return :func:`health_routes` for ``app.include_router(...)`` of FastAPI."""
    from fastapi import APIRouter

    return APIRouter(routes=health_routes())


async def _healthz(request: Request) -> JSONResponse:
    return JSONResponse({"status": "ok"})


async def _readyz(request: Request) -> JSONResponse:
    status = status_of(request.app)
    return JSONResponse({"status": status}, 200 if status == "ready" else 503)
