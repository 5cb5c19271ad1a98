"""The other side of a bench: a lookup buffer, and the baselines' raw sockets."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncIterator
from typing import Final

from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.serve import serve
from asynckv.buffers.store import StoreBuffer
from asynckv.cli.bench.echo import EchoServer
from asynckv.cli.bench.meeting import (
    MEETING_KEY,
    TOKEN_NBYTES,
    Meeting,
    meeting_as_tensor,
)
from asynckv.cli.bench.raw_server import RawServer
from asynckv.cli.bench.settings import Settings
from asynckv.cli.bench.streams import StreamsServer
from asynckv.links.address import LOOPBACK, parse_url

__all__ = ("serving",)

_MAX_BYTES: Final = "3GiB"
# Large entries are given back and selected again, instead of being sent anew.
_MAX_DELIVER: Final = 10**9


@contextlib.asynccontextmanager
async def serving(url: str, settings: Settings) -> AsyncIterator[str]:
    """Serve a bench at ``url`` while the body runs; yield the URL with the port.

    The raw sockets listen on ports of their own at the same host, without TLS.

    :raises ConfigError: as :func:`asynckv.serve` does
    """
    host = parse_url(url).host or LOOPBACK
    token = secrets.token_bytes(TOKEN_NBYTES)
    async with contextlib.AsyncExitStack() as stack:
        lookup = LookupBuffer(_MAX_BYTES, max_deliver=_MAX_DELIVER, drain_s=0)
        stack.callback(lookup.abort)
        store = StoreBuffer(2**20)
        stack.callback(store.abort)
        server = await stack.enter_async_context(
            serve(
                url,
                lookup=lookup,
                store=store,
                digest=settings.digest,
                lanes=settings.lanes,
                secret_file=settings.secret_file,
                tls=settings.tls,
                allow_plaintext=settings.allow_plaintext,
            )
        )
        raw = RawServer(host, token)
        stack.callback(raw.close)
        streams_port = await stack.enter_async_context(StreamsServer(host, token))
        echo_port = await stack.enter_async_context(EchoServer(host, token))
        meeting = Meeting(raw.port, streams_port, echo_port, token)
        await store.put(MEETING_KEY, meeting_as_tensor(meeting))
        yield server.url
