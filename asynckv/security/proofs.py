"""How two sides prove that they share a secret, without saying it. No I/O.

A proof is a MAC over everything that was said before it, and over who says it:
sent back, sent again or sent after anything was changed, it proves nothing.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from typing import Final, Literal, TypeAlias

from asynckv.security.shared_secret import Secret

__all__ = ("NONCE_BYTES", "LaneProofs", "Role", "Transcript", "new_nonce", "who_proved")

Role: TypeAlias = Literal["dialling", "listening"]

NONCE_BYTES: Final = 32

_CONTEXT: Final = b"asynckv handshake 1"


def new_nonce() -> bytes:
    """Return what no handshake has had before."""
    return secrets.token_bytes(NONCE_BYTES)


class Transcript:
    """What was said in a handshake, in order and without ambiguity.

    ``binding`` is what both know of the connection below, if anything: said
    over another one, the same words make another transcript.
    """

    def __init__(self, binding: bytes = b"") -> None:
        self._hash = hashlib.sha256()
        self.add(_CONTEXT)
        self.add(binding)

    def add(self, said: bytes) -> None:
        """Note the exact bytes of the next frame, whoever said it."""
        self._hash.update(len(said).to_bytes(8, "big"))
        self._hash.update(said)

    def prove(self, secret: Secret, role: Role) -> bytes:
        """Return the proof of the side of that ``role``, at this point."""
        return secret.sign(self._claim(b"proof of the " + role.encode() + b" side"))

    def is_proved(self, secret: Secret, role: Role, proof: bytes) -> bool:
        """Whether ``proof`` is the other side's, of that ``role``, at this point."""
        claim = self._claim(b"proof of the " + role.encode() + b" side")
        return secret.has_signed(claim, proof)

    def lane_key(self, secret: Secret) -> Secret:
        """Return what only these two know, and only of this link."""
        return secret.derive(self._claim(b"lanes of the link"))

    def _claim(self, what: bytes) -> bytes:
        return what + b"\0" + self._hash.digest()


def who_proved(
    candidates: Sequence[Secret], transcript: Transcript, role: Role, proof: bytes
) -> Secret | None:
    """Return the one of ``candidates`` that ``proof`` was made with.

    All of them are tried, so that the time says nothing.
    """
    found = None
    for secret in candidates:
        if transcript.is_proved(secret, role, proof):
            found = secret
    return found


class LaneProofs:
    """Proves that a lane's connection belongs to the link that was agreed on.

    Without a key, which is without a shared secret, the proofs are empty.
    """

    def __init__(self, key: Secret | None = None) -> None:
        self._key = key

    def prove(self, role: Role, lane: int) -> bytes:
        """Return what the side of that ``role`` says of this lane."""
        return b"" if self._key is None else self._key.sign(_lane_claim(role, lane))

    def is_proved(self, role: Role, lane: int, proof: bytes) -> bool:
        """Whether ``proof`` is what the other side, of that ``role``, has to say."""
        if self._key is None:
            return not proof
        return self._key.has_signed(_lane_claim(role, lane), proof)


def _lane_claim(role: Role, lane: int) -> bytes:
    return b"lane at the " + role.encode() + b" side\0" + lane.to_bytes(8, "big")
