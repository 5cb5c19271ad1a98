"""What everybody who opens links lets users choose, and the keys of one side."""

from __future__ import annotations

import functools
import os
import secrets
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal, TypeAlias

from asynckv.errors import ConfigError
from asynckv.links.sockets import in_thread
from asynckv.protocol.values import PeerIdentity
from asynckv.security.keyring import Keyring, Keys
from asynckv.security.shared_secret import Secret, secret_file_from, secrets_from
from asynckv.security.tls import TLS

__all__ = (
    "Digest",
    "Role",
    "device_digest",
    "keys_of",
    "make_keyring",
    "map_digest",
    "new_identity",
    "payload_digest",
)


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


def map_digest(digest: Digest) -> Literal["full", "edges", "off"]:
    """Return what is compared where no byte moves: ``edges`` unless told otherwise."""
    return "edges" if digest == "auto" else digest


def device_digest(digest: Digest) -> Literal["full", "edges", "off"]:
    """Return what is compared of what goes from one GPU to another, by NCCL.

    All of it unless told otherwise: bytes move, over whatever NCCL finds.
    """
    return "full" if digest == "auto" else digest


def make_keyring(
    secret_file: str | os.PathLike[str] | None,
    tls: TLS | None,
    allow_plaintext: bool,
    environ: Mapping[str, str] | None = None,
) -> Keyring:
    """Return what the options of ``serve``, ``connect`` and the pipes mean.

    Without ``secret_file`` the environment is asked: ``ASYNCKV_SECRET_FILE`` is
    a path, ``ASYNCKV_SECRET`` the secret itself. No file is read yet.

    :raises ConfigError: both of them are set, or the secret is too short
    """
    if tls is not None and not isinstance(tls, TLS):
        raise ConfigError(
            f"tls is a {type(tls).__name__}",
            hint="pass asynckv.TLS(certificate=..., key=..., ca=...)",
        )
    secrets: tuple[Secret, ...] = ()
    if secret_file is None:
        # Not kept in a variable: a traceback could show it.
        secret_file = secret_file_from(os.environ if environ is None else environ)
        secrets = secrets_from(os.environ if environ is None else environ)
    return Keyring(
        secret_file=None if secret_file is None else os.fspath(secret_file),
        secrets=secrets,
        tls=tls,
        allow_plaintext=allow_plaintext,
    )


async def keys_of(keyring: Keyring) -> Keys:
    """Return what ``keyring`` holds now; files are read in a thread.

    :raises ConfigError: they cannot be read, and never could
    """
    keys = keyring.fresh()
    return await in_thread(keyring.current) if keys is None else keys
