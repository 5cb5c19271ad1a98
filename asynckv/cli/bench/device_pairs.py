"""What two processes do on one GPU: an entry handed over, and parts of it staged.

The other process is :mod:`asynckv.cli.bench.device_server`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial

import torch

import asynckv
from asynckv.cli.bench.child import own_child
from asynckv.cli.bench.device_server import TOKENS, content_of
from asynckv.cli.bench.memory import WrongBytes
from asynckv.devices.names import Device
from asynckv.links.sockets import in_thread

__all__ = ("DevicePair", "open_device_pair")


class _GiveBack(Exception):
    """Leaves ``async with drop_select()`` so that the entry stays."""


class DevicePair:
    """This process's side: a peer of the GPU's buffer, and one for each other way."""

    def __init__(
        self,
        entries: asynckv.Peer,
        parts: Mapping[str, asynckv.Peer],
        nbytes: int,
        count: int,
    ) -> None:
        self.transport = entries.transport
        """How an entry of ``nbytes`` gets here."""
        self._entries, self._parts = entries, parts
        self._nbytes, self._count = nbytes, count

    async def check(self) -> None:
        """Take one of each.

        :raises WrongBytes: some byte is not what it was
        """
        part_nbytes = self._nbytes // self._count
        for peer, nbytes in (
            (self._entries, self._nbytes),
            *((peer, part_nbytes) for peer in self._parts.values()),
        ):
            entry = await peer.lookup.drop_select(TOKENS)
            if not await in_thread(partial(_is_content, entry.key, nbytes)):
                raise WrongBytes("what came from another process of the GPU")

    async def entry_s(self) -> float:
        """Return how long a plain await of an entry takes that is there."""
        while not await self._entries.lookup.peek(TOKENS):
            pass
        began_s = time.perf_counter()
        await self._entries.lookup.drop_select(TOKENS)
        return time.perf_counter() - began_s

    async def view_s(self) -> float:
        """Return how long an entry takes to be there as views, and give it back."""
        began_s = elapsed_s = time.perf_counter()
        with contextlib.suppress(_GiveBack):
            async with self._entries.lookup.drop_select(TOKENS):
                elapsed_s = time.perf_counter() - began_s
                raise _GiveBack
        return elapsed_s

    async def parts_s(self, way: str) -> float:
        """Return how long all parts take, while the other process copies the next."""
        began_s = time.perf_counter()
        for _ in range(self._count):
            await self._parts[way].lookup.drop_select(TOKENS)
        return time.perf_counter() - began_s


@contextlib.asynccontextmanager
async def open_device_pair(
    device: Device, nbytes: int, count: int, ways: Sequence[str], *arguments: str
) -> AsyncIterator[DevicePair]:
    """Start the other process with ``arguments``, and connect to its buffers.

    ``ways`` are those of an URL's ``?payload=`` by which ``count`` parts shall move.

    :raises ServerEnded: it could not serve
    """
    async with contextlib.AsyncExitStack() as stack:
        line = await stack.enter_async_context(own_child(*arguments))
        url, parts_url = line.split()

        async def connected(url: str) -> asynckv.Peer:
            peer = asynckv.connect(url, device=device, max_bytes=2 * nbytes)
            return await stack.enter_async_context(peer)

        entries = await connected(url)
        parts = {way: await connected(f"{parts_url}?payload={way}") for way in ways}
        yield DevicePair(entries, parts, nbytes, count)


def _is_content(found: object, nbytes: int) -> bool:
    return isinstance(found, torch.Tensor) and torch.equal(
        found.cpu(), content_of(nbytes)
    )
