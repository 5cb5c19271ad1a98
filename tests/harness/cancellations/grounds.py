"""Where calls are cancelled: buffers, peers and a pipe, opened once for many."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final, Literal, TypeAlias

import torch

from asynckv.abc import KVLookupBuffer, KVStoreBuffer
from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.store import StoreBuffer
from asynckv.links.dial import dial
from asynckv.links.link import Link
from asynckv.links.options import make_keyring, new_identity
from asynckv.pipes.pipe import Pipe
from asynckv.testing.pairs import Scheme, open_peers, open_pipe_pair
from harness.cancellations.quiet import Watched, everything_is_quiet, tasks_now

__all__ = (
    "BUFFER_BYTES",
    "GROUNDS",
    "OVER_LINKS",
    "PIPE_BYTES",
    "Ground",
    "Kind",
    "one_thread_of_torch",
    "open_ground",
)

Kind: TypeAlias = Literal["local", "mem", "tcp", "unix", "tls", "map"]

OVER_LINKS: Final[tuple[Kind, ...]] = ("mem", "tcp", "unix", "tls")
"""Every way to reach the buffers; ``map`` is tcp, but for what is selected."""

GROUNDS: Final[tuple[Kind, ...]] = ("local", *OVER_LINKS)
"""The buffers themselves, too."""

_Sides: TypeAlias = tuple[KVLookupBuffer, KVLookupBuffer, KVStoreBuffer]

BUFFER_BYTES: Final = 512 * 1024
PIPE_BYTES: Final = 256 * 1024


@dataclasses.dataclass(frozen=True)
class Ground:
    """``producer`` and ``consumer`` are two ways to ``local``, ``client`` to ``store``.

    ``near`` and ``far`` are the ends of a pipe. ``options`` protect a link.
    """

    kind: Kind
    producer: KVLookupBuffer
    consumer: KVLookupBuffer
    local: LookupBuffer
    client: KVStoreBuffer
    store: StoreBuffer
    pipe: tuple[Pipe, Pipe] | None
    options: Mapping[str, Any]
    watched: Watched

    @property
    def is_local(self) -> bool:
        """Whether no link lies between."""
        return self.kind == "local"

    @property
    def scheme(self) -> Scheme:
        """By what others are reached here; in memory where all is local."""
        return "mem" if self.kind == "local" else self.kind

    @property
    def url(self) -> str:
        """Where ``local`` and ``store`` are served.

        :raises RuntimeError: they are not
        """
        if self.watched.server is None:
            raise RuntimeError("nothing is served here")
        return self.watched.server.url

    async def link_to(self, url: str) -> Link:
        """Return a link that asks for nothing; whoever listens there closes it."""
        keyring = make_keyring(None, self.options.get("tls"), False)
        return await dial(url, identity=new_identity(), lanes=1, keyring=keyring)

    async def check_quiet(self) -> None:
        """Wait until nothing is under way.

        :raises AssertionError: something is left, and what
        """
        await everything_is_quiet(self.watched)


@contextlib.asynccontextmanager
async def open_ground(
    kind: Kind, *, max_bytes: int = BUFFER_BYTES, **options: Any
) -> AsyncIterator[Ground]:
    """Open what the scenarios use; ``options`` protect the links (``tls=``).

    ``max_bytes`` is that of the lookup buffer.
    """
    async with (
        one_thread_of_torch(),
        LookupBuffer(max_bytes, drain_s=0, max_deliver=1000) as local,
        StoreBuffer(BUFFER_BYTES) as store,
        contextlib.AsyncExitStack() as stack,
    ):
        watched, pipe = Watched(local, store), None
        sides: _Sides = local, local, store
        if kind != "local":
            opened = open_peers(kind, local, store, lanes=2, **options)
            server, near, far = await stack.enter_async_context(opened)
            sides = near.lookup, far.lookup, far.store
            pipe = await stack.enter_async_context(
                open_pipe_pair(kind, max_bytes=PIPE_BYTES, **options)
            )
            watched = Watched(local, store, server, (near, far), pipe)
        for _ in range(2):  # the first call of all may make tasks that stay
            await everything_is_quiet(watched)
            watched = dataclasses.replace(watched, tasks=tasks_now())
        yield Ground(
            kind, sides[0], sides[1], local, sides[2], store, pipe, options, watched
        )


@contextlib.asynccontextmanager
async def one_thread_of_torch() -> AsyncIterator[None]:
    """Its others spin while they wait for more: on few cores, against this one."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(count)
