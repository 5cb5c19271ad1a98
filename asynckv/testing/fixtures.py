"""The fixtures of the pytest plugin. Light: each imports what it opens."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import pytest_asyncio

if TYPE_CHECKING:
    from asynckv.testing.pairs import KVFaults, KVPair

__all__ = ("kv_faults", "kv_pair", "kv_tcp_pair")


@pytest_asyncio.fixture
async def kv_pair() -> AsyncIterator[KVPair]:
    """Buffers that are served, and a peer connected to them, in memory."""
    from asynckv.testing.pairs import open_kv_pair

    async with open_kv_pair("mem") as pair:
        yield pair


@pytest_asyncio.fixture
async def kv_tcp_pair() -> AsyncIterator[KVPair]:
    """The same over a loopback port: ``tcp://127.0.0.1:0``."""
    from asynckv.testing.pairs import open_kv_pair

    async with open_kv_pair("tcp") as pair:
        yield pair


@pytest_asyncio.fixture
async def kv_faults() -> AsyncIterator[KVFaults]:
    """The same over tcp, with a proxy between: ``with kv_faults.latency(0.05):``."""
    from asynckv.testing.pairs import open_kv_faults

    async with open_kv_faults() as pair:
        yield pair
