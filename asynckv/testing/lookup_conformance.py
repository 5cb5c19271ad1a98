"""What every lookup buffer keeps, local or remote: small checks to run on yours.

Each check gets a fresh trio: the buffer as its producer sees it, as its consumer
sees it, and the local buffer that holds the entries. For a local buffer all
three are one object; for a remote one the first two are two peers.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Final, TypeAlias

from asynckv.abc import KVLookupBuffer
from asynckv.buffers.lookup import LookupBuffer
from asynckv.testing.expectations import naming
from asynckv.testing.lookup_checks.cancelling import CANCELLING_CHECKS
from asynckv.testing.lookup_checks.delivering import DELIVERING_CHECKS, ROOM_CHECKS
from asynckv.testing.lookup_checks.selecting import SELECTING_CHECKS
from asynckv.testing.lookup_checks.streaming import STREAMING_CHECKS
from asynckv.testing.lookup_checks.values import LookupCheck

__all__ = ("LOOKUP_CHECKS", "MakeLookupPair", "check_lookup_buffer")

MakeLookupPair: TypeAlias = Callable[
    [],
    AbstractAsyncContextManager[tuple[KVLookupBuffer, KVLookupBuffer, LookupBuffer]],
]
"""Opens producer's side, consumer's side and the local buffer: it is empty, has
``max_bytes=4 * 2**20, drain_s=0`` and else no option."""

LOOKUP_CHECKS: Final[tuple[LookupCheck, ...]] = (
    *SELECTING_CHECKS,
    *DELIVERING_CHECKS,
    *ROOM_CHECKS,
    *STREAMING_CHECKS,
    *CANCELLING_CHECKS,
)


async def check_lookup_buffer(make_pair: MakeLookupPair) -> None:
    """Run every check of :data:`LOOKUP_CHECKS`, each on a trio of its own.

    :raises AssertionError: a buffer breaks the contract; a note names the check
    """
    for check in LOOKUP_CHECKS:
        with naming(check):
            async with make_pair() as (producer, consumer, local):
                await check(producer, consumer, local)
