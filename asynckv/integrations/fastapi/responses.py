"""Routes whose client may go away: their work is ended, and whose the entry is decided.

No framework does so by itself. The route stays in its own task: nothing but this call
is cancelled, and only once.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any, Final, ParamSpec, TypeAlias, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

__all__ = (
    "cancel_on_disconnect",
    "stream_response",
)


P = ParamSpec("P")
T = TypeVar("T")

_ADDED: Final = "request_of_cancel_on_disconnect"
_CLIENT_CLOSED_REQUEST: Final = 499


def cancel_on_disconnect(
    route: Callable[P, Coroutine[Any, Any, T]],
) -> Callable[P, Coroutine[Any, Any, T]]:
    """Cancel what the decorated HTTP route awaits when its client disconnects.

    Below ``@app.get(...)``, or on a dependency that awaits. What the route had
    selected goes back to its buffer, and the route ends with status 499, which
    nobody receives. The request's body is read before the route starts. A response
    that streams is sent after the route has returned:
    :func:`~asynckv.integrations.fastapi.stream_response` watches that.

    The route needs no ``Request`` parameter of its own; called by hand, it does.
    """
    signature = _signature_of(route)
    takes_request = any(
        inspect.isclass(parameter.annotation)
        and issubclass(parameter.annotation, Request)
        for parameter in signature.parameters.values()
    )

    @functools.wraps(route)
    async def watched(*args: P.args, **kwargs: P.kwargs) -> T:
        request = _request_among(*args, *kwargs.values())
        kwargs.pop(_ADDED, None)
        with contextlib.suppress(RuntimeError):  # it was consumed: a form, a stream
            try:
                await request.body()  # it is kept: the next message is the end
            except ClientDisconnect:
                raise _gone() from None
        ending = asyncio.timeout(None)
        try:
            async with ending, _watching(request.receive, ending):
                return await route(*args, **kwargs)
        except TimeoutError:
            if not ending.expired():
                raise
        raise _gone()

    if not takes_request:
        signature = _with_request(signature)
    watched.__signature__ = signature  # type: ignore[attr-defined]
    return watched


@contextlib.asynccontextmanager
async def _watching(receive: Receive, ending: asyncio.Timeout) -> AsyncIterator[None]:
    """Let ``ending`` expire when the client disconnects."""
    watcher = asyncio.create_task(
        _disconnect(receive), name="asynckv: wait for a disconnect"
    )

    def end(watcher: asyncio.Task[None]) -> None:
        if not watcher.cancelled():
            watcher.exception()  # a server that fails here has lost its client, too
            ending.reschedule(watcher.get_loop().time())

    watcher.add_done_callback(end)
    try:
        yield
    finally:
        watcher.remove_done_callback(end)
        watcher.cancel()


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _gone() -> HTTPException:
    return HTTPException(_CLIENT_CLOSED_REQUEST, "the client closed the request")


def _request_among(*values: object) -> Request:
    for value in values:
        if isinstance(value, Request):
            return value
    raise TypeError("cancel_on_disconnect is for HTTP routes: there is no Request")


def _signature_of(route: Callable[..., object]) -> inspect.Signature:
    try:
        # Texts are resolved here, where the route's own module is known.
        return inspect.signature(route, eval_str=True)
    except NameError:
        return inspect.signature(route)


def _with_request(signature: inspect.Signature) -> inspect.Signature:
    """Ask the framework for the request, by a parameter that the route never sees."""
    asked = inspect.Parameter(
        _ADDED, inspect.Parameter.KEYWORD_ONLY, annotation=Request
    )
    own = list(signature.parameters.values())
    ends_open = bool(own) and own[-1].kind is inspect.Parameter.VAR_KEYWORD
    own.insert(len(own) - ends_open, asked)
    return signature.replace(parameters=own)


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
        background, self.background = self.background, None
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
        if background is not None:  # whatever it does, the entry was decided before
            await background()
