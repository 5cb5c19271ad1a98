"""Which payload transport a link uses, by the names that peers agree on."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Callable, Mapping
from typing import Final

from asynckv.abc import PayloadTransport
from asynckv.errors import ConfigError
from asynckv.links.address import Address, Scheme
from asynckv.links.fd_socket import has_fd_sockets
from asynckv.protocol.handshake import Agreement
from asynckv.transports.inline import InlineTransport
from asynckv.transports.mem import MemTransport

__all__ = (
    "TRANSPORTS",
    "make_payload",
    "payload_paths",
)


TRANSPORTS: Final[Mapping[str, type[PayloadTransport]]] = types.MappingProxyType(
    {transport.name: transport for transport in (InlineTransport, MemTransport)}
)
"""Each is made with ``(lanes, digest, loop, on_lost, max_chunk_bytes)``."""


_OVER_SOCKETS: Final = ("map", "inline") if has_fd_sockets() else ("inline",)
_PATHS: Final[dict[Scheme, tuple[str, ...]]] = {
    "tcp": _OVER_SOCKETS,
    "tls": _OVER_SOCKETS,
    "unix": _OVER_SOCKETS,
    "mem": ("mem", "inline"),
}


def payload_paths(address: Address) -> tuple[str, ...]:
    """Return the payload paths that this side offers there, best first.

    :raises ConfigError: the URL asks for one that there is not
    """
    paths = _PATHS[address.scheme]
    if not address.payload:
        return paths
    if address.payload not in paths:
        raise ConfigError(
            f"payload={address.payload} is not possible at {address}",
            hint=f"possible: {', '.join(paths)}",
        )
    return (address.payload,)


def make_payload(
    agreement: Agreement,
    loop: asyncio.AbstractEventLoop,
    on_lost: Callable[[Exception], None],
) -> PayloadTransport:
    """Return the payload transport that was agreed on, not open yet.

    Where memory may be mapped there are lanes too, for all that is not in it.
    """
    path = "inline" if agreement.payload_path == "map" else agreement.payload_path
    make: Callable[..., PayloadTransport] = TRANSPORTS[path]
    return make(
        agreement.lanes,
        agreement.digest != "off",
        loop,
        on_lost,
        agreement.limits.max_chunk_bytes,
    )
