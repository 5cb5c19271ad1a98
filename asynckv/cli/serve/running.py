"""What ``asynckv serve`` runs: it opens what is served, and ends it in bounded time.

From the first signal on it takes ``drain_s``, and two seconds more at most, whatever a
tier, a peer or a thread does: what has not ended by then ends with the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import threading
import time
from typing import Any, Final, Literal

from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.serve import Server, serve
from asynckv.buffers.store import StoreBuffer
from asynckv.cli.options import KeyOptions, ServeOptions
from asynckv.cli.process import stop_signal
from asynckv.cli.serve.http import Page, Pages, serve_http
from asynckv.errors import ConfigError
from asynckv.observability.lines import redacted
from asynckv.stores.tiered import TieredStore

__all__ = ("EndDeadline", "Serving", "run_until_stopped")

logger = logging.getLogger(__name__)

_GOODBYE_S: Final = 0.3
_CLOSE_S: Final = 1.0
_MORE_S: Final = 1.5
"""So long the end takes beside the drain: two seconds, less those of a busy machine."""
_LOOP_S: Final = 1.0
"""So long the loop may take to end, when all that was open is closed."""


async def run_until_stopped(
    options: ServeOptions, keys: KeyOptions, deadline: EndDeadline
) -> None:
    """Serve until a signal comes, then drain.

    :raises ConfigError: something cannot be served as it was asked for
    """
    serving = Serving(options, keys)
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(serving.abort)
        stopped = stack.enter_context(stop_signal())
        if options.http is not None:
            pages = _http_pages(serving)
            url = await stack.enter_async_context(serve_http(options.http, pages))
            logger.info("health and metrics are at %s", url)
        opening = asyncio.create_task(serving.open(), name="asynckv serve: opening")
        first: set[asyncio.Future[Any]] = {opening, stopped}
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        if not opening.done():
            deadline.set(_MORE_S)
            opening.cancel()
            await asyncio.wait({opening}, timeout=_CLOSE_S)
            return
        await opening
        signal_name = await stopped
        deadline.set(options.drain_s + _MORE_S)
        await serving.drain(signal_name)
        deadline.set(_LOOP_S)


class EndDeadline:
    """Ends the process if what it is used for takes longer than it may, once it is set.

    Tasks may refuse to end, and threads hang: nobody waits for those then. ``log`` is
    closed before.
    """

    def __init__(self, log: logging.Handler) -> None:
        self._log = log
        self._timer: threading.Timer | None = None
        self._end_s = math.inf

    def __enter__(self) -> EndDeadline:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def set(self, in_s: float) -> None:
        """From now on it may take so long, and no longer than it might before."""
        now_s = time.monotonic()
        self._end_s = min(self._end_s, now_s + in_s)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = threading.Timer(self._end_s - now_s, self._end)
        self._timer.daemon = True
        self._timer.start()

    def _end(self) -> None:
        logger.warning("something does not end; the process ends without it")
        self._log.close()
        os._exit(0)


class Serving:
    """The buffers and the server of one process."""

    def __init__(self, options: ServeOptions, keys: KeyOptions) -> None:
        self.lookup: LookupBuffer | None = None
        self.store: StoreBuffer | None = None
        self.server: Server | None = None
        self.state: Literal["starting", "serving", "draining"] = "starting"
        self._options = options
        self._keys = keys

    async def open(self) -> None:
        """Open all of it, and print where. A cancelled call leaves it to be aborted.

        :raises ConfigError: something cannot be served as it was asked for
        """
        options, keys = self._options, self._keys
        if options.lookup is not None:
            self.lookup = LookupBuffer(
                options.lookup,
                fingerprint=options.fingerprint,
                drain_s=options.drain_s,
            )
        if options.store is not None:
            self.store = _store_of(options.store, options)
            await self.store.open()
        self.server = serve(
            options.listen,
            lookup=self.lookup,
            store=self.store,
            secret_file=keys.secret_file,
            tls=keys.tls,
            allow_plaintext=keys.allow_plaintext,
            tenants=dict(options.tenant),
        )
        await self.server.__aenter__()
        self.state = "serving"
        tiers = ", ".join(map(redacted, options.tier)) or "no tiers"
        logger.info("serving at %s, with %s", self.server.url, tiers)
        print(self.server.url, flush=True)

    async def drain(self, why: str) -> None:
        """End all of it: in the time that there is for that, and 1.3 s more.

        Consumers take what is left, requests that are under way end, and tiers take
        what waits for them. Nobody connects any more.
        """
        server, now = self.server, asyncio.get_running_loop().time
        if server is None:
            raise RuntimeError("nothing was opened")
        self.state = "draining"
        end_s = now() + self._options.drain_s
        logger.info("draining on %s, for %g s at most", why, self._options.drain_s)
        server.stop_accepting()
        try:
            async with asyncio.timeout_at(end_s + _GOODBYE_S):
                await asyncio.gather(self._leave(server, end_s), self._flush(end_s))
        except TimeoutError:
            logger.warning("what was still under way is cut off")
            server.abort()
        await self._flush(end_s)
        if self.store is not None:
            _log_tiers(self.store)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_S):
                    await self.store.aclose()
        logger.info("ended")

    def abort(self) -> None:
        """End all of it now. Never waits; again is nothing."""
        for one in (self.server, self.lookup, self.store):
            if one is not None:
                one.abort()

    async def _leave(self, server: Server, end_s: float) -> None:
        if self.lookup is not None:
            await self.lookup.aclose()
        left_s = end_s - asyncio.get_running_loop().time()
        await server.aclose(drain_s=max(left_s, 0.0))

    async def _flush(self, end_s: float) -> None:
        if isinstance(self.store, TieredStore):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(end_s):
                    await self.store.flush()


def _http_pages(serving: Serving) -> Pages:
    """Return what is answered over HTTP: is it alive, is it ready, what it counts.

    :raises ConfigError: the package for the latter is not installed
    """
    try:
        from asynckv.cli.serve.metrics import CONTENT_TYPE, metrics_text
    except ModuleNotFoundError as exc:
        raise ConfigError(
            f"--http needs {exc.name}, which is not installed",
            hint='in a checkout of asynckv: python -m pip install ".[metrics]"',
        ) from exc

    async def alive() -> Page:
        return Page(b"alive\n")

    async def ready() -> Page:
        is_ready = serving.state == "serving"
        return Page(f"{serving.state}\n".encode(), 200 if is_ready else 503)

    async def metrics() -> Page:
        text = await metrics_text(
            is_ready=serving.state == "serving",
            server=serving.server,
            lookup=serving.lookup,
            store=serving.store,
        )
        return Page(text, content_type=CONTENT_TYPE)

    return {"/healthz": alive, "/readyz": ready, "/metrics": metrics}


def _store_of(max_bytes: int, options: ServeOptions) -> StoreBuffer:
    if not options.tier:
        return StoreBuffer(max_bytes, fingerprint=options.fingerprint)
    return TieredStore(
        max_bytes,
        options.tier,
        admit=options.admit,
        fingerprint=options.fingerprint,
        namespace=options.namespace,
        drain_s=0.0,  # it was flushed before, for as long as there was
    )


def _log_tiers(store: StoreBuffer) -> None:
    if isinstance(store, TieredStore):
        for name, tier in store.statistics().tiers.items():
            logger.info(
                "%s: %d puts accepted, %d dropped, %d failed, %d not written",
                *(name, tier.accepted, tier.dropped, tier.unwritten, tier.waiting),
            )
