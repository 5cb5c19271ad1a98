"""A response that streams from an entry, and decides by its end whose the entry is."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Final, TypeAlias, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

__all__ = ("stream_response",)

T = TypeVar("T")

_Chunks: TypeAlias = AsyncIterator[str] | AsyncIterator[bytes]
_DEFAULT: Final = "text/plain"


async def stream_response(
    selecting: AbstractAsyncContextManager[T],
    chunks_of: Callable[[T], _Chunks],
    *,
    status_code: int = 200,
    headers: Mapping[str, str] | None = None,
    media_type: str = _DEFAULT,
) -> StreamingResponse:
    """Select now, and return the response that streams ``chunks_of(selected)``.

    ``selecting`` is what ``open_drop_select(...)`` or ``drop_select(...)`` returns. It
    is entered before this returns, so a deadline around the call can still end in a
    504; cancelled meanwhile, nothing was selected. It is left with the response: after
    the last chunk was sent the entry is acknowledged; if the client goes away before
    that, or ``chunks_of`` fails, it is given back.
    """
    selected = await selecting.__aenter__()
    try:
        return _StreamedSelection(
            selecting,
            chunks_of(selected),
            status_code=status_code,
            headers=headers,
            media_type=media_type,
        )
    except BaseException as exc:
        await selecting.__aexit__(type(exc), exc, exc.__traceback__)
        raise


class _StreamedSelection(StreamingResponse):
    """Leaves ``selecting``, which was entered, when the response is over."""

    def __init__(
        self,
        selecting: AbstractAsyncContextManager[object],
        chunks: _Chunks,
        *,
        status_code: int,
        headers: Mapping[str, str] | None,
        media_type: str,
    ) -> None:
        super().__init__(chunks, status_code, headers, media_type)
        self._chunks = chunks
        self._selecting = selecting
        self._is_sent = False

    async def stream_response(self, send: Send) -> None:
        await super().stream_response(send)
        self._is_sent = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = ClientDisconnect()
        try:
            async with AsyncExitStack() as stack:
                stack.push_async_exit(self._selecting)  # it was entered before
                if isinstance(self._chunks, AsyncGenerator):
                    # It reads the entry, so it ends before the entry is given back.
                    stack.push_async_callback(self._chunks.aclose)
                await super().__call__(scope, receive, send)
                if not self._is_sent:
                    raise gone  # Starlette ends quietly, and the entry would be taken
        except ClientDisconnect as exc:
            if exc is not gone:
                raise
