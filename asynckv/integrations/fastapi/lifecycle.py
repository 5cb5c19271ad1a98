"""An app's part in transfers, from its start to its end, and two probes that show it.

One task opens it, keeps it, and closes it; the app starts and stops beside it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
)
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse
from starlette.routing import BaseRoute, Route

from asynckv.abc import KVLookupBuffer, KVStoreBuffer
from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.remote.peer import Peer, connect as connect_to
from asynckv.buffers.serve import Server, serve as serve_at
from asynckv.buffers.store import StoreBuffer
from asynckv.config import KVTransferConfig, check_config
from asynckv.errors import AsyncKVError, PeerLost
from asynckv.node import open as open_node
from asynckv.security.tls import TLS
from asynckv.types import KVFingerprint, as_timeout
from asynckv.waits.waiting import wait_shielded

if TYPE_CHECKING:
    from fastapi import APIRouter

__all__ = (
    "AppLifespan",
    "Status",
    "health_router",
    "health_routes",
    "lifespan",
    "lookup",
    "status_of",
    "store",
)


logger = logging.getLogger(__name__)

AppLifespan: TypeAlias = Callable[[Starlette], AbstractAsyncContextManager[None]]
"""What ``FastAPI(lifespan=...)`` and ``Starlette(lifespan=...)`` take."""

Status: TypeAlias = Literal[
    "not started", "connecting", "ready", "lost", "failed", "draining"
]

_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 1.0
_ONE: Final = "pass one of these: a config, connect=, serve="


def lifespan(
    config: KVTransferConfig | None = None,
    *,
    connect: str | None = None,
    serve: str | None = None,
    lookup: LookupBuffer | None = None,
    store: StoreBuffer | None = None,
    max_bytes: int | float | str = "1GiB",
    fingerprint: KVFingerprint | Mapping[str, str] | str | None = None,
    secret_file: str | os.PathLike[str] | None = None,
    tls: TLS | None = None,
    allow_plaintext: bool = False,
    drain_s: float = 30.0,
    wait_s: float = 5.0,
) -> AppLifespan:
    """Make the app take part in transfers while it runs.

    ``FastAPI(lifespan=lifespan(...))``, or ``async with lifespan(...)(app):`` in
    a lifespan of your own. It does one of three: what ``config`` says
    (:func:`asynckv.open`); ``connect`` to a server's URL; or ``serve`` at a URL
    the buffers ``lookup`` and ``store``, if one is given (they stay yours to close),
    else a new lookup buffer.
    ``max_bytes`` and ``fingerprint`` are the new buffer's or the connection's;
    ``secret_file``, ``tls`` and ``allow_plaintext`` protect what ``connect`` and
    ``serve`` open (a config has its own).

    A peer that is not there is waited for, in starting at most ``wait_s``
    seconds; then the app starts and ``/readyz`` says that it is not ready. One
    that said goodbye, was not reached again, or now refuses this app or is refused
    by it, is waited for anew, except by an app that serves a buffer itself: that
    stays, and stays ``lost``.

    Stopping lets consumers take what this app serves for at most ``drain_s``.
    A cancelled start leaves nothing behind.

    :raises ValueError: not exactly one of ``config``, ``connect`` and ``serve``, or a
        time that is negative or NaN
    :raises AsyncKVError: (on starting) a configuration or peer that cannot work,
        or an address that cannot be listened on
    """
    if sum(given is not None for given in (config, connect, serve)) > 1:
        raise ValueError(_ONE)
    given = (lookup, store)
    if given != (None, None) and serve is None:
        raise ValueError("lookup= and store= are what serve= serves")
    drain_s, wait_s = as_timeout(drain_s, "drain_s"), as_timeout(wait_s, "wait_s")
    protection: dict[str, Any] = {
        "secret_file": secret_file,
        "tls": tls,
        "allow_plaintext": allow_plaintext,
    }
    known: dict[str, Any] = {"max_bytes": max_bytes, "fingerprint": fingerprint}
    if config is not None:
        check_config(config)
        opens = functools.partial(_configured, config, drain_s)
    elif connect is not None:
        connects = functools.partial(connect_to, connect, **known, **protection)
        opens = functools.partial(_connected, connects)
    elif serve is not None:
        make = functools.partial(LookupBuffer, drain_s=drain_s, **known)
        serves = functools.partial(serve_at, serve, **protection)
        opens = functools.partial(_served, serves, given, make)
    else:
        raise ValueError(_ONE)

    @asynccontextmanager
    async def run(app: Starlette) -> AsyncIterator[None]:
        part = app.state.asynckv = _Part(opens)
        try:
            await part.start(wait_s)
            yield
        finally:
            await part.aclose()

    return run


async def lookup(connection: HTTPConnection) -> KVLookupBuffer:
    """Hand the app's buffer to a route: ``Annotated[KVLookupBuffer, Depends(lookup)]``.

    Under bare Starlette: ``await lookup(request)``. Never waits: while the app
    is not connected yet, or is stopping, the request ends with status 503.

    :raises RuntimeError: the app has no :func:`lifespan`
    """
    buffer = _opened_of(connection.app).lookup
    if buffer is None:
        raise RuntimeError("this app serves a store alone: pass lookup= to lifespan()")
    return buffer


async def store(connection: HTTPConnection) -> KVStoreBuffer:
    """As :func:`lookup`, the store: ``Annotated[KVStoreBuffer, Depends(store)]``.

    :raises RuntimeError: the app has no :func:`lifespan`, or that opens no store
    """
    buffer = _opened_of(connection.app).store
    if buffer is None:
        raise RuntimeError(
            "this app has no store: pass store= or connect= to lifespan()"
        )
    return buffer


def status_of(app: Starlette) -> Status:
    """Tell in a word how the app's part in transfers is."""
    part = _part_of(app)
    return "not started" if part is None else part.status


def _opened_of(app: Starlette) -> _Opened:
    part = _part_of(app)
    if part is None:
        raise RuntimeError("no buffer here: the app's lifespan is not asynckv's")
    if part.opened is None or part.is_draining:
        raise HTTPException(503, f"KV is {part.status}", {"Retry-After": "1"})
    return part.opened


def _part_of(app: Starlette) -> _Part | None:
    found = getattr(app.state, "asynckv", None)
    return found if isinstance(found, _Part) else None


@dataclasses.dataclass(frozen=True, eq=False)
class _Opened:
    """Buffers to use, the peer they depend on, and where this app serves."""

    lookup: KVLookupBuffer | None
    store: KVStoreBuffer | None
    peer: Peer | None = None
    url: str | None = None


_Opens: TypeAlias = Callable[[], AbstractAsyncContextManager[_Opened]]


class _Part:
    """Opens, keeps and closes, in a task of its own that begins at once."""

    def __init__(self, opens: _Opens) -> None:
        self.opened: _Opened | None = None
        self.is_draining = False
        self._opens = opens
        self._is_open: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._keep(), name="asynckv: an app's part")

    @property
    def status(self) -> Status:
        """How it is now."""
        if self.is_draining:
            return "draining"
        if self.opened is None:
            return "failed" if self._task.done() else "connecting"
        peer = self.opened.peer
        return "ready" if peer is None or peer.is_connected else "lost"

    async def start(self, wait_s: float) -> None:
        """Wait for it to be open, ``wait_s`` at most.

        :raises AsyncKVError: it cannot be opened
        """
        await asyncio.wait(
            {self._task, self._is_open},
            timeout=wait_s,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if self._task.done():
            self._task.result()
        if self.opened is None:
            logger.warning("the app starts without its peer, which is not there yet")
        self._task.add_done_callback(_log_failure)

    async def aclose(self) -> None:
        """Close what is open, or stop opening it. Shielded."""
        self.is_draining = True
        self._task.cancel()
        await wait_shielded(self._task)

    async def _keep(self) -> None:
        pause_s, refusal, was_open = _FIRST_PAUSE_S, "", False
        while True:
            try:
                async with self._opens() as opened:
                    pause_s, refusal, was_open = _FIRST_PAUSE_S, "", True
                    await self._use(opened)
                if self.is_draining:
                    return
                logger.warning("the peer of this app has gone; waiting for another")
            except PeerLost as exc:
                logger.debug("the peer of this app is not there: %s", exc)
            except AsyncKVError as exc:
                # Once it has worked, keys or the peer may be in exchange for others.
                if not was_open:
                    raise
                if str(exc) != refusal:
                    logger.warning("the peer of this app cannot be used now: %s", exc)
                refusal = str(exc)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _use(self, opened: _Opened) -> None:
        """Return when the app is stopped, or when its peer has gone for good."""
        self.opened = opened
        if not self._is_open.done():
            self._is_open.set_result(None)
        if opened.url is not None:
            logger.info("serving KV at %s", opened.url)
        try:
            await (asyncio.Future() if opened.peer is None else _gone(opened))
        except asyncio.CancelledError:
            if not self.is_draining:
                raise
            # Only this wait is cancelled, so that what is open is left cleanly.
            self._task.uncancel()
        finally:
            if not self.is_draining:
                self.opened = None


async def _gone(opened: _Opened) -> None:
    """Wait until the peer is not called again and nobody needs what is served."""
    peer = opened.peer
    try:
        while peer is not None:
            link = await peer.link()
            await link.wait_closed()
    except PeerLost:
        if opened.url is not None:
            logger.warning("the peer of this app has gone; still serving")
            await asyncio.Future()


@asynccontextmanager
async def _configured(
    config: KVTransferConfig, drain_s: float
) -> AsyncIterator[_Opened]:
    async with open_node(config, drain_s=drain_s) as node:
        url = node.url if node.server else None
        yield _Opened(node.lookup, None, node.peer, url)


@asynccontextmanager
async def _connected(connects: Callable[[], Peer]) -> AsyncIterator[_Opened]:
    async with connects() as peer:
        yield _Opened(peer.lookup, peer.store, peer)


@asynccontextmanager
async def _served(
    serves: Callable[..., Server],
    given: tuple[LookupBuffer | None, StoreBuffer | None],
    make: Callable[[], LookupBuffer],
) -> AsyncIterator[_Opened]:
    async with AsyncExitStack() as stack:
        lookup, store = given
        made = make() if given == (None, None) else None
        lookup = made if lookup is None else lookup
        server = await stack.enter_async_context(serves(lookup=lookup, store=store))
        if made is not None:
            # Entered after the server: what is left in it is served while it drains.
            await stack.enter_async_context(made)
        yield _Opened(lookup, store, url=server.url)


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (exc := task.exception()) is not None:
        logger.error("this app can take no part in transfers: %s", exc)


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
