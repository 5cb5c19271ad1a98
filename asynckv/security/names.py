"""What a peer is called: the name that its certificate proves, and its own word.

A peer that calls itself ``engine-7`` and whose certificate is for ``worker-1``
is ``engine-7@worker-1`` here. It may say all of that itself, or just its
certificate's name; it may not say another one's. What the connection below a greeting
has proved already is its assurance.
"""

from __future__ import annotations

import codecs
import dataclasses
import ipaddress
from collections.abc import Collection, Iterable, Mapping
from typing import Final, TypeGuard

from asynckv.errors import AuthError

__all__ = (
    "NO_ASSURANCE",
    "Assurance",
    "CertifiedNames",
    "canonical",
    "is_host",
    "names_in",
)


_AT: Final = "@"
_WILDCARD: Final = "*"
_INVALID: Final = "<invalid>"  # what ssl says of an IP address that is none
_IDNA: Final = codecs.lookup("idna")  # its tables are read now, on no event loop


def names_in(certificate: Mapping[str, object]) -> tuple[str, ...]:
    """Return the names in a certificate, as :mod:`ssl` describes one.

    Not patterns, nor what holds an ``@`` or cannot be shown: none tells who it is.
    """
    found = certificate.get("subjectAltName", ())
    pairs = found if isinstance(found, Iterable) else ()
    names = [_written(kind, name) for kind, name in pairs]
    return tuple(name for name in names if name)


def _written(kind: str, name: str) -> str:
    if kind not in ("DNS", "URI", "IP Address") or _AT in name or _WILDCARD in name:
        return ""
    written = canonical(name)
    return "" if name == _INVALID or not written.isprintable() else written


def canonical(name: str) -> str:
    """Return the one way to write ``name``, of a host or an address."""
    try:
        return str(ipaddress.ip_address(name.strip()))
    except ValueError:
        return name if "://" in name else name.lower()


def is_host(name: object) -> TypeGuard[str]:
    """Whether ``name`` can be of a host: be looked up, or proved by a certificate."""
    if not isinstance(name, str) or "\0" in name:
        return False
    try:
        return bool(_IDNA.encode(name)[0])
    except UnicodeError:
        return False


@dataclasses.dataclass(frozen=True)
class CertifiedNames:
    """The names that a peer has proved to have; the first is what it is called."""

    names: tuple[str, ...]

    def check_allowed(self, allowed: Collection[str]) -> None:
        """Refuse a peer that is not among the ``allowed``, if there are any.

        :raises AuthError: none of its names is allowed, or it has none
        """
        if not self.names:
            raise AuthError(
                "the certificate names nobody",
                hint="it needs a subject alternative name: DNS, URI or IP",
            )
        if allowed and not set(self.names) & set(map(canonical, allowed)):
            raise AuthError(
                "the certificate is not that of an allowed peer",
                hint="TLS(allowed_peers=...) lists their names",
            )

    def full_name(self, claimed: str) -> str:
        """Return what a peer that calls itself ``claimed`` is called here.

        :raises AuthError: it claims a name that its certificate does not prove
        """
        _, at, certified = claimed.rpartition(_AT)
        if not at:
            is_bare = claimed in self.names
            return claimed if is_bare else f"{claimed}{_AT}{self.names[0]}"
        if certified not in self.names:
            raise AuthError(
                "the peer claims a name that is not in its certificate",
                hint="leave the part behind the @ out: the certificate says it",
            )
        return claimed


@dataclasses.dataclass(frozen=True)
class Assurance:
    """``names`` are the peer's, by its certificate; ``binding`` is of both sides'.

    Whoever hands words on from one connection to another has other certificates,
    and so another ``binding``.
    """

    names: CertifiedNames | None = None
    binding: bytes = b""


NO_ASSURANCE: Final = Assurance()
"""A connection that anybody may have opened, or may be in the middle of."""
