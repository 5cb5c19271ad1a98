"""asynckv in a FastAPI or Starlette app.

Only :func:`health_router` needs FastAPI; the rest is the same under both.
"""

from __future__ import annotations

from asynckv.integrations.fastapi.lifecycle import (
    health_router,
    health_routes,
    lifespan,
    lookup,
    store,
)
from asynckv.integrations.fastapi.responses import cancel_on_disconnect, stream_response

__all__ = (
    "cancel_on_disconnect",
    "health_router",
    "health_routes",
    "lifespan",
    "lookup",
    "store",
    "stream_response",
)
