"""What everybody who opens links lets users choose, and the keys of one side."""

from __future__ import annotations

import asyncio
import functools
import os
import secrets
import socket
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, Literal, TypeAlias, TypeVar, get_args

import msgspec

from asynckv.abc import PayloadTransport
from asynckv.errors import ConfigError
from asynckv.links.address import Address, Scheme
from asynckv.links.fd_socket import has_fd_sockets
from asynckv.links.sockets import in_thread
from asynckv.protocol.handshake import MAX_LANES, Agreement, DigestMode, Terms
from asynckv.protocol.values import Limits, PeerIdentity
from asynckv.security.keyring import Keyring, Keys
from asynckv.security.shared_secret import Secret, secret_file_from, secrets_from
from asynckv.security.tls import TLS
from asynckv.transports.inline import InlineTransport
from asynckv.transports.mem import MemTransport
from asynckv.types import KVFingerprint, as_flag

__all__ = (
    "TRANSPORTS",
    "Digest",
    "Role",
    "as_digest",
    "as_lanes",
    "cores",
    "default_lanes",
    "device_digest",
    "keys_of",
    "make_keyring",
    "make_payload",
    "make_terms",
    "map_digest",
    "new_identity",
    "payload_digest",
    "payload_paths",
)


T = TypeVar("T")

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


_MAX_DEFAULT_LANES: Final = 4


def cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def default_lanes(cores: int) -> int:
    """Return how many lanes a link has where nobody says: one for two cores, up to 4.

    The other core is for the event loop, and where both peers are on one host for the
    other end of the lane: on two cores one lane moved as much as a lone raw stream or
    more, and two and four lanes less (``benchmarks.lanes``, ``nox -s peers``).
    """
    return min(max(cores // 2, 1), _MAX_DEFAULT_LANES)


def make_terms(
    address: Address,
    *,
    identity: PeerIdentity,
    fingerprint: KVFingerprint | None,
    digest: DigestMode,
    lanes: int | None,
    limits: Limits,
) -> Terms:
    """Return what this side brings to each handshake at ``address``.

    :raises ConfigError: an impossible number of lanes, or payload path
    """
    return Terms(
        identity=identity,
        payload_paths=payload_paths(address),
        limits=limits,
        fingerprint=fingerprint,
        digest=digest,
        lanes=as_lanes(lanes) or default_lanes(cores()),
    )


def as_lanes(lanes: int | None) -> int | None:
    """Return the option ``lanes``, ``None`` for as many as the cores are for.

    :raises ConfigError: no link has as many
    """
    if lanes is not None and (type(lanes) is not int or not 1 <= lanes <= MAX_LANES):
        raise ConfigError(
            f"{lanes!r:.40} lanes", hint=f"a link has 1 to {MAX_LANES}; None chooses"
        )
    return lanes


Digest: TypeAlias = Literal["auto", "full", "edges", "off"]
Role: TypeAlias = Literal["producer", "consumer", "both"]

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


def new_identity(identity: str | None = None, role: Role = "both") -> PeerIdentity:
    """Return who this process is to its peers; the incarnation is new each time.

    :raises ConfigError: no peer could be told that name, or that role
    """
    if identity is None or identity == "":
        identity = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
    own = PeerIdentity(
        id=identity,
        incarnation=secrets.token_hex(8),
        role=_one_of("role", role, get_args(Role)),
        host_id=socket.gethostname(),
        boot_id=_boot_id(),
        pid=os.getpid(),
    )
    try:  # as a peer will read it
        said = msgspec.msgpack.encode(own)
        return msgspec.msgpack.decode(said, type=PeerIdentity)
    except (TypeError, ValueError, OverflowError) as exc:
        raise ConfigError(
            f"identity={identity!r:.40}",
            hint="it is one line of text, of at most 256 characters",
        ) from exc


@functools.cache
def _boot_id() -> str:
    """Return what changes when this machine starts anew; empty where unknown."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def as_digest(digest: Digest) -> Digest:
    """Return the option ``digest``.

    :raises ConfigError: there is none of that name
    """
    return _one_of("digest", digest, get_args(Digest))


def _one_of(name: str, value: T, known: tuple[T, ...]) -> T:
    if value not in known:
        hint = f"it is one of {', '.join(map(repr, known))}"
        raise ConfigError(f"{name}={value!r:.40}", hint=hint)
    return value


def payload_digest(digest: Digest) -> Literal["full", "off"]:
    """Return what crosses a socket under that option: ``full`` unless ``off``.

    :raises ConfigError: there is none of that name
    """
    return "off" if as_digest(digest) == "off" else "full"


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
    :raises TypeError: ``allow_plaintext`` is no ``bool``: ``"false"`` would allow it;
        or ``secret_file`` is no path
    """
    if tls is not None and not isinstance(tls, TLS):
        raise ConfigError(
            f"tls is a {type(tls).__name__}",
            hint="pass asynckv.TLS(certificate=..., key=..., ca=...)",
        )
    if not isinstance(secret_file, str | bytes | os.PathLike | None):
        raise TypeError(f"secret_file is a path, not a {type(secret_file).__name__}")
    secrets: tuple[Secret, ...] = ()
    if secret_file is None:
        # Not kept in a variable: a traceback could show it.
        secret_file = secret_file_from(os.environ if environ is None else environ)
        secrets = secrets_from(os.environ if environ is None else environ)
    return Keyring(
        secret_file=None if secret_file is None else os.fspath(secret_file),
        secrets=secrets,
        tls=tls,
        allow_plaintext=as_flag(allow_plaintext, "allow_plaintext"),
    )


async def keys_of(keyring: Keyring) -> Keys:
    """Return what ``keyring`` holds now; files are read in a thread.

    :raises ConfigError: they cannot be read, and never could
    """
    keys = keyring.fresh()
    return await in_thread(keyring.current) if keys is None else keys
