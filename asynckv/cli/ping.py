"""``asynckv ping``: who answers at an URL, and how fast.

What needs torch is imported when it is used, so that ``--help`` is quick.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter, validators

from asynckv import __version__
from asynckv.cli.bench.report import percentile
from asynckv.cli.options import NO_KEY_OPTIONS, Fingerprint, KeyOptions, in_flags
from asynckv.cli.process import INTERRUPTED
from asynckv.errors import AsyncKVError, NotServed
from asynckv.observability.lines import without_passwords
from asynckv.types import KVFingerprint

if TYPE_CHECKING:
    from asynckv import Peer

__all__ = ("ping",)

_Count = Annotated[int, Parameter(validator=validators.Number(gte=1))]
_Seconds = Annotated[float, Parameter(validator=validators.Number(gt=0))]


def ping(
    url: str,
    /,
    *,
    count: _Count = 100,
    timeout_s: _Seconds = 10.0,
    fingerprint: Fingerprint = None,
    keys: KeyOptions = NO_KEY_OPTIONS,
) -> int:
    """Connect to a server of buffers, and time small requests, one after the other.

    The exit status is 1 if nobody is there, this side is refused, or an answer does not
    come in time.

    Parameters
    ----------
    url
        Where `asynckv serve` serves.
    count
        How many requests.
    timeout_s
        So long all of it may take.
    fingerprint
        The model that the server is for: its name, or JSON of a fingerprint's fields.
    """
    try:
        asyncio.run(_ping(url, count, timeout_s, fingerprint, keys))
    except KeyboardInterrupt:
        return INTERRUPTED
    except TimeoutError:
        print(f"asynckv ping: no answer within {timeout_s:g} s", file=sys.stderr)
        return 1
    except (AsyncKVError, ValueError, OSError) as exc:
        print(f"asynckv ping: {without_passwords(in_flags(exc))}", file=sys.stderr)
        return 1
    return 0


async def _ping(
    url: str,
    count: int,
    timeout_s: float,
    fingerprint: KVFingerprint | None,
    keys: KeyOptions,
) -> None:
    from asynckv.protocol.frames import PROTOCOL_MAJOR

    async with asyncio.timeout(timeout_s):
        async with keys.connect(url, fingerprint) as peer:
            request, what = await _request_of(peer)
            took_s = [await _timed(request) for _ in range(count)]
            print(f"{url} is {peer.identity}, which serves {what}")
            print(f"payload goes by {peer.transport}, in protocol {PROTOCOL_MAJOR}")
            print(
                f"{count} requests: p50 {percentile(took_s, 0.5) * 1e3:.3f} ms, "
                f"p99 {percentile(took_s, 0.99) * 1e3:.3f} ms"
            )
            print(f"this side is asynckv {__version__}")


async def _request_of(peer: Peer) -> tuple[Callable[[], Awaitable[object]], str]:
    """Return a small request that is answered there, and by what; it was made once."""

    async def ask_store() -> object:
        return await peer.store.contains(["ping"])

    async def ask_lookup() -> object:
        return await peer.lookup.peek([0])

    try:
        await ask_lookup()
    except NotServed:
        await ask_store()
        return ask_store, "a store"
    try:
        await ask_store()
    except NotServed:
        return ask_lookup, "a lookup buffer"
    return ask_store, "a lookup buffer and a store"


async def _timed(request: Callable[[], Awaitable[object]]) -> float:
    began_s = time.perf_counter()
    await request()
    return time.perf_counter() - began_s
