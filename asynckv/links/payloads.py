"""Which payload transport a link uses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from asynckv.abc import PayloadTransport
from asynckv.errors import ConfigError
from asynckv.links.address import Address, Scheme
from asynckv.links.fd_socket import has_fd_sockets
from asynckv.protocol.handshake import Agreement
from asynckv.transports.table import TRANSPORTS

__all__ = ("make_payload", "payload_paths")

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
