"""One process's part in a transfer, opened from its configuration."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
)
from typing import Final

from asynckv.abc import KVLookupBuffer
from asynckv.abc.closing import async_with_only
from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.remote.peer import Peer, connect
from asynckv.buffers.roles import LookupByRole
from asynckv.buffers.serve import Server, serve
from asynckv.config import KVRole, KVTransferConfig, check_config
from asynckv.devices.names import Device, DeviceName, device_named
from asynckv.errors import ConfigError, PeerLost
from asynckv.links.options import Role
from asynckv.observability.waits import LoggedWait
from asynckv.types import as_timeout

__all__ = ("Node", "open")

_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 1.0
_ROLES: Final[dict[KVRole, Role]] = {
    "kv_producer": "producer",
    "kv_consumer": "consumer",
    "kv_both": "both",
}


@dataclasses.dataclass(frozen=True, eq=False)
class Node:
    """An open node. ``lookup`` has the verbs of its role; others raise ``WrongRole``.

    ``server`` serves what this node inserts, ``peer`` is asked for what it
    selects; a role that does not do that has ``None`` there.
    """

    config: KVTransferConfig
    lookup: KVLookupBuffer
    server: Server | None
    peer: Peer | None

    @property
    def url(self) -> str:
        """Where this node serves, with the real port; else where its peer does."""
        return self.config.url if self.server is None else self.server.url


def open(
    config: KVTransferConfig,
    *,
    drain_s: float = 30.0,
    device: DeviceName | None = None,
) -> AbstractAsyncContextManager[Node]:
    """Open this process's node: ``async with asynckv.open(config) as node``.

    A ``kv_producer`` serves its own buffer at ``kv_ip:kv_port``; a
    ``kv_consumer`` connects there; a ``kv_both`` serves its own buffer, which
    ``insert`` fills, and ``drop_select`` asks
    ``kv_connector_extra_config.peer_url``. Entering waits at most
    ``store_timeout`` seconds for that peer to be there; a cancelled entering
    leaves nothing behind. Leaving lets consumers take what is left, then says goodbye
    to everybody.

    :param config: who this node is, and where: a :class:`~asynckv.KVTransferConfig`
    :param drain_s: for so long leaving waits for consumers; not at all after an error
    :param device: where the buffer's memory is, instead of ``kv_buffer_device``;
        ``"cuda"`` means the GPU of ``kv_connector_extra_config.local_rank``, or of
        ``LOCAL_RANK`` of the environment
    :raises ConfigError: a configuration that cannot be opened, or an address that
        cannot be listened on
    :raises PeerLost: the peer was not there in time
    :raises TypeError: ``config`` is no :class:`~asynckv.KVTransferConfig`
    """
    check_config(config)
    drain_s = as_timeout(drain_s, "drain_s")
    return _opened(config, drain_s, _device_of(config, device))


@async_with_only("open(...) as node")
async def _opened(
    config: KVTransferConfig, drain_s: float, device: Device | None
) -> AsyncIterator[Node]:
    role = _role_of(config)
    async with AsyncExitStack() as stack:
        own = server = peer = None
        if config.is_kv_producer:
            own = LookupBuffer(
                config.max_bytes,
                fingerprint=config.fingerprint,
                drain_s=drain_s,
                device=device,
            )
            # Entered before the buffer: what is left in it is served while it drains.
            server = await stack.enter_async_context(
                serve(
                    config.url,
                    lookup=own,
                    max_waiting_bytes=config.max_waiting_bytes,
                    identity=config.engine_id,
                    role=role,
                    secret_file=config.secret_file,
                    tls=config.tls,
                    allow_plaintext=config.allow_plaintext,
                )
            )
            await stack.enter_async_context(own)
        if config.peer_url is not None:
            url = config.peer_url
            peer = await _connected(config, url, role, device, stack)
        lookup = LookupByRole(own, None if peer is None else peer.lookup)
        yield Node(config, lookup, server, peer)


def _role_of(config: KVTransferConfig) -> Role:
    if config.kv_role is None:
        raise ConfigError(
            "kv_role is not set",
            hint='set it to "kv_producer", "kv_consumer" or "kv_both"',
        )
    if config.is_kv_consumer and config.peer_url is None:
        raise ConfigError(
            "a kv_both also selects, and has nobody to ask",
            hint='set kv_connector_extra_config.peer_url to "tcp://HOST:PORT"',
        )
    return _ROLES[config.kv_role]


def _device_of(config: KVTransferConfig, asked: DeviceName | None) -> Device | None:
    """Return where memory is to be; ``"cuda"`` is the GPU of this process's rank."""
    name = config.kv_buffer_device if asked is None else asked
    return device_named(name, local_rank=config.local_rank)


async def _connected(
    config: KVTransferConfig,
    url: str,
    role: Role,
    device: Device | None,
    stack: AsyncExitStack,
) -> Peer:
    """Connect to the peer, again and again until it is there."""
    timeout_s = config.store_timeout_s
    lost: list[PeerLost] = []
    try:
        async with asyncio.timeout(timeout_s):
            with LoggedWait("a node", f"its peer at {url}", "store_timeout, or serve"):
                return await _first_answer(
                    lambda: stack.enter_async_context(
                        connect(
                            url,
                            fingerprint=config.fingerprint,
                            max_bytes=config.max_bytes,
                            identity=config.engine_id,
                            role=role,
                            secret_file=config.secret_file,
                            tls=config.tls,
                            allow_plaintext=config.allow_plaintext,
                            device=device,
                        )
                    ),
                    lost,
                )
    except TimeoutError:
        raise PeerLost(
            f"nobody served at {url} within {timeout_s:g} s",
            hint="start the peer, or raise kv_connector_extra_config.store_timeout",
        ) from (lost[-1] if lost else None)


async def _first_answer(
    dial: Callable[[], Awaitable[Peer]], lost: list[PeerLost]
) -> Peer:
    """Dial until somebody answers; note the last failure in ``lost``."""
    pause_s = _FIRST_PAUSE_S
    while True:
        try:
            return await dial()
        except PeerLost as exc:
            lost[:] = [exc.with_traceback(None)]
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
