"""TLS 1.3 with certificates on both sides: what is asked for, and what it means.

Only the given authority counts, not those of the system. No session is resumed,
so that every connection shows its certificate anew.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import ssl
from collections.abc import Collection
from typing import Final, TypeAlias

from asynckv.errors import AsyncKVError, AuthError, ConfigError, PeerLost
from asynckv.security.names import is_host
from asynckv.security.private_files import check_private

__all__ = ("ALPN", "TLS", "TlsKeys", "digest_of_certificate", "read_tls", "tls_failure")

ALPN: Final = "asynckv/1"

_Path: TypeAlias = "str | os.PathLike[str]"

_END_OF_CERTIFICATE: Final = "-----END CERTIFICATE-----"
_NOT_TLS: Final = frozenset(
    {"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNEXPECTED_MESSAGE"}
)
_OLD_TLS: Final = frozenset({"UNSUPPORTED_PROTOCOL", "TLSV1_ALERT_PROTOCOL_VERSION"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class TLS:
    """The files of one side of ``tls://`` links, in PEM; both sides need all three.

    ``certificate`` is this side's, followed by those between it and the
    authority; ``key`` belongs to it, and nobody else may read that file; ``ca``
    holds the authorities that peers must be certified by. Files that change
    are read again for the next connection.

    Peers are called by the names in their certificates (SAN: DNS, URI, IP).
    ``allowed_peers`` are the names of those that are let in, or dialled; without
    it, everyone whom ``ca`` has certified. A server is also checked for the
    host that was dialled, or for ``server_name``.

    :raises ConfigError: a file is no path, ``allowed_peers`` no tuple of names, or
        ``server_name`` no name
    """

    certificate: _Path
    key: _Path
    ca: _Path
    allowed_peers: tuple[str, ...] = ()
    server_name: str | None = None

    def __post_init__(self) -> None:
        for name in ("certificate", "key", "ca"):
            path = getattr(self, name)
            if not isinstance(path, str | os.PathLike) or "\0" in os.fsdecode(path):
                raise ConfigError(f"{name} is {path!r:.40}", hint="it is a path")
        allowed: object = self.allowed_peers
        if isinstance(allowed, str):
            raise ConfigError(
                "allowed_peers is a single text", hint=f"write ({allowed!r},)"
            )
        # Not an iterator: that would be used up by the first peer.
        if not isinstance(allowed, Collection) or not all(
            isinstance(name, str) for name in allowed
        ):
            raise ConfigError(
                f"allowed_peers is {allowed!r:.40}", hint="it is a tuple of names"
            )
        if self.server_name and not is_host(self.server_name):
            raise ConfigError(
                f"server_name is {self.server_name!r:.40}, no name of a host",
                hint="write one that is in the server's certificate",
            )

    @property
    def paths(self) -> tuple[str, str, str]:
        """All the files."""
        return os.fspath(self.certificate), os.fspath(self.key), os.fspath(self.ca)


@dataclasses.dataclass(frozen=True, repr=False)
class TlsKeys:
    """What was read of a :class:`TLS`."""

    listening: ssl.SSLContext
    dialling: ssl.SSLContext
    certificate_digest: bytes
    allowed_peers: tuple[str, ...] = ()
    server_name: str | None = None


def read_tls(tls: TLS) -> TlsKeys:
    """Read all the files. Blocks.

    :raises ConfigError: one cannot be read or is not what it should be, or
        others than its owner can read the key
    """
    check_private(os.fspath(tls.key))
    return TlsKeys(
        _context(ssl.PROTOCOL_TLS_SERVER, tls),
        _context(ssl.PROTOCOL_TLS_CLIENT, tls),
        digest_of_certificate(_first_certificate(os.fspath(tls.certificate))),
        tls.allowed_peers,
        tls.server_name,
    )


def digest_of_certificate(der: bytes) -> bytes:
    """Return what tells certificates apart."""
    return hashlib.sha256(der).digest()


def tls_failure(exc: ssl.SSLError) -> AsyncKVError:
    """Return what a failure of a TLS handshake, or just after it, means."""
    if isinstance(exc, ssl.SSLCertVerificationError):
        return AuthError(
            f"the peer's certificate is refused: {exc.verify_message}",
            hint="is it certified by the authority in tls.ca, for that very name, "
            "and not out of date?",
        )
    reason = exc.reason or type(exc).__name__
    if isinstance(exc, ssl.SSLEOFError | ssl.SSLZeroReturnError):
        return PeerLost(
            "the peer hung up in the TLS handshake",
            hint="its log may say why; does it speak tls:// at all?",
        )
    if reason in _NOT_TLS:
        return AuthError(
            "the peer does not speak TLS", hint="both sides need tls:// and tls="
        )
    if reason in _OLD_TLS:
        return AuthError(
            "the two sides have no version of TLS in common",
            hint="here only TLS 1.3 is spoken",
        )
    if "ALERT" in reason:
        return AuthError(
            f"the peer refuses our certificate: {reason}",
            hint="is it certified by the authority in the peer's tls.ca, and not "
            "out of date?",
        )
    return AuthError(f"TLS failed: {reason}")


def _context(protocol: int, tls: TLS) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.hostname_checks_common_name = False
    context.set_alpn_protocols([ALPN])
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0
    certificate, key, ca = tls.paths
    try:
        # Without a password OpenSSL would ask for one on the terminal.
        context.load_cert_chain(certificate, key, password="")
    except (OSError, ValueError) as exc:
        raise _unusable(f"{certificate} and {key}", exc) from exc
    try:
        context.load_verify_locations(cafile=ca)
    except (OSError, ValueError) as exc:
        raise _unusable(ca, exc) from exc
    return context


def _first_certificate(path: str) -> bytes:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            text = file.read()
        begin = text.index("-----BEGIN CERTIFICATE-----")
        end = text.index(_END_OF_CERTIFICATE, begin) + len(_END_OF_CERTIFICATE)
        return ssl.PEM_cert_to_DER_cert(text[begin:end])
    except (OSError, ValueError) as exc:
        raise _unusable(path, exc) from exc


def _unusable(what: str, exc: Exception) -> ConfigError:
    why = getattr(exc, "reason", None) or getattr(exc, "strerror", None) or exc
    return ConfigError(
        f"{what} cannot be used for TLS: {why}",
        hint="they are PEM files, and the key has no password",
    )
