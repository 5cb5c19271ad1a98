"""What every store buffer keeps, local or remote: small checks to run on yours.

Each check gets a fresh pair: the buffer as its client sees it, and the local
buffer behind it (the same object for a local one).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Final, TypeAlias

from asynckv.abc import KVStoreBuffer
from asynckv.buffers.store import StoreBuffer
from asynckv.testing.store_checks.cancelling import CANCELLING_CHECKS
from asynckv.testing.store_checks.room import ROOM_CHECKS
from asynckv.testing.store_checks.storing import STORING_CHECKS
from asynckv.testing.store_checks.values import StoreCheck

__all__ = ("STORE_CHECKS", "MakeStorePair", "check_store_buffer")

MakeStorePair: TypeAlias = Callable[
    [], AbstractAsyncContextManager[tuple[KVStoreBuffer, StoreBuffer]]
]
"""Opens a pair; the local buffer is empty and has a ``max_bytes`` of about 16 MiB."""

STORE_CHECKS: Final[tuple[StoreCheck, ...]] = (
    *STORING_CHECKS,
    *ROOM_CHECKS,
    *CANCELLING_CHECKS,
)


async def check_store_buffer(make_pair: MakeStorePair) -> None:
    """Run every check of :data:`STORE_CHECKS`, each on a pair of its own.

    :raises AssertionError: the buffer breaks the contract; a note names the check
    """
    for check in STORE_CHECKS:
        try:
            async with make_pair() as (client, local):
                await check(client, local)
        except Exception as exc:
            exc.add_note(f"in {getattr(check, '__name__', check)}")
            raise
