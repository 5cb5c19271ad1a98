"""Who a command is to its peers, and how it proves that: options of several commands.

What needs torch is imported when it is used, so that ``--help`` is quick.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, TypeAlias

import msgspec
from cyclopts import Parameter

from asynckv.cli.sources import converter
from asynckv.errors import ConfigError
from asynckv.security.tls import TLS
from asynckv.types import KVFingerprint

if TYPE_CHECKING:
    from asynckv import Peer

__all__ = ("NO_KEY_OPTIONS", "Fingerprint", "KeyOptions", "tls_of")


def _fingerprint(text: str) -> KVFingerprint:
    if not text.startswith("{"):
        return KVFingerprint(model=text)
    try:
        return msgspec.json.decode(text, type=KVFingerprint)
    except msgspec.MsgspecError as exc:
        raise ValueError(f"not a fingerprint: {exc}") from exc


Fingerprint: TypeAlias = Annotated[
    KVFingerprint | None,
    Parameter(converter=converter(_fingerprint), accepts_keys=False, n_tokens=1),
]
"""A model's name, or JSON of a fingerprint's fields."""


@Parameter(name="*")
@dataclasses.dataclass(frozen=True, kw_only=True)
class KeyOptions:
    """As ``serve`` and ``connect`` take them."""

    secret_file: Path | None = None
    """The secret that all peers share."""

    certificate: Path | None = None
    """This side's certificate for ``tls://``, with --key and --ca."""

    key: Path | None = None
    """The key of the certificate."""

    ca: Path | None = None
    """The authorities that certify peers."""

    allow_plaintext: Annotated[bool, Parameter(negative=())] = False
    """Allow ``tcp://`` beyond this host."""

    @property
    def tls(self) -> TLS | None:
        """The certificates that are named; ``None`` if there are none.

        :raises ConfigError: only some of them are given
        """
        return tls_of(self.certificate, self.key, self.ca)

    def connect(self, url: str, fingerprint: KVFingerprint | None) -> Peer:
        """Return a connection to enter, which is not made again when it is cut.

        :raises ConfigError: these options do not go together
        """
        from asynckv import connect

        return connect(
            url,
            fingerprint=fingerprint,
            reconnect_s=0,
            secret_file=self.secret_file,
            tls=self.tls,
            allow_plaintext=self.allow_plaintext,
        )


NO_KEY_OPTIONS: Final = KeyOptions()


def tls_of(certificate: Path | None, key: Path | None, ca: Path | None) -> TLS | None:
    """Return the certificates that three options name; ``None`` if none of them does.

    :raises ConfigError: only some of them are given
    """
    if certificate is None and key is None and ca is None:
        return None
    if certificate is None or key is None or ca is None:
        raise ConfigError("--certificate, --key and --ca belong together")
    return TLS(certificate=certificate, key=key, ca=ca)
