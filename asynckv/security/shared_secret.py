"""Secrets that two sides share: read from a file or the environment, never shown.

No function that raises holds the text of a secret, so that a traceback that
shows variables does not show it either.

Both prove that they share one without saying it: a proof is a MAC over everything that
was said before it, and over who says it. Sent back, sent again or sent after anything
was changed, it proves nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping, Sequence
from typing import Final, Literal, NoReturn, TypeAlias

from asynckv.errors import ConfigError
from asynckv.security.private_files import read_private

__all__ = (
    "MAX_SECRETS",
    "MIN_SECRET_BYTES",
    "NONCE_BYTES",
    "SECRET_FILE_VARIABLE",
    "SECRET_VARIABLE",
    "LaneProofs",
    "Role",
    "Secret",
    "Transcript",
    "new_nonce",
    "read_secrets",
    "secret_file_from",
    "secrets_from",
    "who_proved",
)


MIN_SECRET_BYTES: Final = 32
MAX_SECRETS: Final = 2
"""The one in use, and another one while they are being exchanged."""
SECRET_FILE_VARIABLE: Final = "ASYNCKV_SECRET_FILE"
SECRET_VARIABLE: Final = "ASYNCKV_SECRET"

_MIN_DIFFERENT_BYTES: Final = 8
_HOW_TO_MAKE_ONE: Final = "openssl rand -base64 48"


class Secret:
    """The key of a MAC. Its text is not shown, compared, copied out or pickled."""

    __slots__ = ("_key",)

    def __init__(self, key: bytes) -> None:
        self._key = key

    def __repr__(self) -> str:
        return "<Secret>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a secret is not pickled")

    def sign(self, message: bytes) -> bytes:
        """Return the HMAC-SHA-256 of ``message``."""
        return hmac.digest(self._key, message, hashlib.sha256)

    def has_signed(self, message: bytes, mac: bytes) -> bool:
        """Whether ``mac`` is what :meth:`sign` returns, in constant time."""
        return hmac.compare_digest(self.sign(message), mac)

    def derive(self, purpose: bytes) -> Secret:
        """Return another secret, from which this one cannot be found."""
        return Secret(self.sign(purpose))


def read_secrets(path: str) -> tuple[Secret, ...]:
    """Return the secrets in a file, the one that a dialling side uses first. Blocks.

    They are separated by white space: one, or two while they are exchanged.

    :raises ConfigError: the file cannot be read, others can read it, or it holds
        no secret that is long enough
    """
    return _checked(_parse(read_private(path)), path)


def secrets_from(environ: Mapping[str, str]) -> tuple[Secret, ...]:
    """Return what ``ASYNCKV_SECRET`` holds; nothing if it is not set.

    :raises ConfigError: it holds no secret that is long enough
    """
    # What is no UTF-8 is in it as surrogates, and an error of encode() holds the text.
    found: tuple[Secret, ...] | str = ()
    if SECRET_VARIABLE in environ:
        found = _parse(environ[SECRET_VARIABLE].encode(errors="surrogatepass"))
    del environ  # a traceback that shows variables would show it
    return _checked(found, SECRET_VARIABLE)


def secret_file_from(environ: Mapping[str, str]) -> str | None:
    """Return the path that ``ASYNCKV_SECRET_FILE`` holds, if it is set.

    :raises ConfigError: ``ASYNCKV_SECRET`` is set too
    """
    path, is_double = environ.get(SECRET_FILE_VARIABLE), SECRET_VARIABLE in environ
    del environ
    if path is not None and is_double:
        raise ConfigError(
            f"both {SECRET_FILE_VARIABLE} and {SECRET_VARIABLE} are set",
            hint="unset one of them",
        )
    return path


def _parse(text: bytes) -> tuple[Secret, ...] | str:
    """Return the secrets in ``text``, or what is wrong with it."""
    if not text.isascii():
        return "is not ASCII text"
    found = text.split()
    if not found or len(found) > MAX_SECRETS:
        return f"holds {len(found)} secrets, not 1 or {MAX_SECRETS}"
    if any(len(secret) < MIN_SECRET_BYTES for secret in found):
        return f"holds a secret of less than {MIN_SECRET_BYTES} bytes"
    if any(len(set(secret)) < _MIN_DIFFERENT_BYTES for secret in found):
        return "holds a secret that anybody could guess"
    return tuple(map(Secret, found))


def _checked(found: tuple[Secret, ...] | str, where: str) -> tuple[Secret, ...]:
    if isinstance(found, str):
        raise ConfigError(f"{where} {found}", hint=f"make one: {_HOW_TO_MAKE_ONE}")
    return found


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
