"""What everybody who opens links lets users choose, and what is not possible yet."""

from __future__ import annotations

import functools
import os
import secrets
import socket
from pathlib import Path
from typing import Final, Literal, TypeAlias

from asynckv.errors import ConfigError
from asynckv.protocol.frames import PeerIdentity

__all__ = ("Digest", "Role", "new_identity", "payload_digest", "refuse_security")

Digest: TypeAlias = Literal["auto", "full", "edges", "off"]
Role: TypeAlias = Literal["producer", "consumer", "both"]

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


def new_identity(identity: str | None = None, role: Role = "both") -> PeerIdentity:
    """Return who this process is to its peers; the incarnation is new each time."""
    name = identity or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
    return PeerIdentity(
        id=name,
        incarnation=secrets.token_hex(8),
        role=role,
        host_id=socket.gethostname(),
        boot_id=_boot_id(),
        pid=os.getpid(),
    )


@functools.cache
def _boot_id() -> str:
    """Return what changes when this machine starts anew; empty where unknown."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def payload_digest(digest: Digest) -> Literal["full", "off"]:
    """Return what crosses a socket under that option: ``full`` unless ``off``."""
    return "off" if digest == "off" else "full"


def refuse_security(
    secret_file: str | None, tls: object, allow_plaintext: bool
) -> None:
    """Refuse options whose promise this version cannot keep.

    :raises ConfigError: if authentication or TLS was asked for
    """
    if secret_file is not None or tls is not None:
        raise ConfigError(
            "this version has neither authentication nor TLS",
            hint="use it on loopback or a unix socket, without secret_file and tls",
        )
