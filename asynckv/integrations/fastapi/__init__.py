"""asynckv in a FastAPI or Starlette app.

Only :func:`health_router` needs FastAPI; the rest is the same under both.
"""

from __future__ import annotations

from asynckv.integrations.fastapi.disconnect import cancel_on_disconnect
from asynckv.integrations.fastapi.health import health_router, health_routes
from asynckv.integrations.fastapi.lifecycle import lifespan, lookup, store
from asynckv.integrations.fastapi.streaming import stream_response

__all__ = (
    "cancel_on_disconnect",
    "health_router",
    "health_routes",
    "lifespan",
    "lookup",
    "store",
    "stream_response",
)
