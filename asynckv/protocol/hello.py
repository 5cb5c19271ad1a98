"""The greeting of two sides, frame by frame: bytes in, bytes out. No I/O.

Without a shared secret: Hello, Welcome. With one: Hello, Challenge, the dialling
side's Proof, Welcome, the listening side's Proof. Each proof covers the exact
bytes of all that was said before it, so nothing of it can be changed, sent
again or sent back. A side that has a secret never goes on without a proof.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeAlias

import msgspec

from asynckv.errors import AsyncKVError, AuthError, RemoteProtocolError
from asynckv.protocol.codec import Buffer, FrameDecoder, encode_frame
from asynckv.protocol.frames import (
    Attach,
    Attached,
    Challenge,
    Frame,
    Hello,
    Proof,
    Refuse,
    Welcome,
)
from asynckv.protocol.handshake import (
    GREETING_LIMITS,
    WELCOME_LIMITS,
    Agreement,
    Terms,
    accept_welcome,
    agree,
    check_version,
    encode_hello,
    hello_from,
    refusal,
    welcome_to,
)
from asynckv.protocol.values import Limits
from asynckv.security.names import NO_ASSURANCE, Assurance, CertifiedNames
from asynckv.security.shared_secret import (
    NONCE_BYTES,
    LaneProofs,
    Secret,
    Transcript,
    who_proved,
)

__all__ = ("DialSide", "GreetingSide", "ListenSide", "Outcome")

_PROOF_LIMITS: Final = Limits(max_control_bytes=128, max_body_bytes=0)
_NO_PROOF: Final = "there is no proof of a shared secret"

_OnFrame: TypeAlias = Callable[[Frame, bytes], bytes]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What the dialling side comes to: a link, to which it attaches its lanes."""

    agreement: Agreement
    link_token: bytes
    lane_proofs: LaneProofs

    def attach(self, lane: int) -> bytes:
        """Return the first bytes on the connection of a payload lane."""
        proof = self.lane_proofs.prove("dialling", lane)
        return encode_frame(0, Attach(self.link_token, lane, proof))[0]

    def check_attached(self, lane: int, answer: Frame) -> None:
        """Read the answer to :meth:`attach`.

        :raises AuthError: the lane is refused, or reached somebody else
        :raises RemoteProtocolError: it is no answer to that
        """
        if isinstance(answer, Refuse):
            raise refusal(answer)
        if not isinstance(answer, Attached):
            raise RemoteProtocolError(f"{type(answer).__name__} in answer to an Attach")
        if not self.lane_proofs.is_proved("listening", lane, answer.proof):
            raise _no_proof()


class GreetingSide:
    """One side of a greeting: what it wants to read, and what it answers.

    ``assurance`` is what the connection below has proved already, ``limits`` how long
    the first frame may be. All frames are of the link itself, without a body.
    """

    def __init__(self, terms: Terms, assurance: Assurance, limits: Limits) -> None:
        self._terms = terms
        self._names = assurance.names
        self._transcript = Transcript(assurance.binding)
        self._on_next: _OnFrame = _too_much
        self._decoder = FrameDecoder(limits)
        # Of the next frame, as they came: a proof covers the exact bytes.
        self._raw = bytearray()

    @property
    def is_over(self) -> bool:
        """Whether the peer has said all that it has to say."""
        return self._on_next is _too_much

    @property
    def missing_bytes(self) -> int:
        """How many bytes to read next, so as not to read beyond the greeting."""
        return 0 if self.is_over else self._decoder.missing_bytes

    def receive(self, data: Buffer) -> bytes:
        """Accept ``data`` and return what to send.

        :raises AuthError: the peer does not let us in, or did not prove that it shares
            a secret with us; a listener says the same, whatever it is that it lacks
        :raises IncompatiblePeer: they cannot exchange KV; ``field`` says over what
        :raises AsyncKVError: the peer refuses us, for another reason
        :raises RemoteProtocolError: it is no greeting, or no answer to a Hello
        """
        return b"".join([self._on_next(*frame) for frame in self._frames(data)])

    def _frames(self, data: Buffer) -> Iterator[tuple[Frame, bytes]]:
        rest = memoryview(data)
        while rest:
            piece = rest[: self._decoder.missing_bytes]
            rest = rest[len(piece) :]
            self._raw += piece
            for stream, frame, _ in self._decoder.feed(piece):
                if stream:
                    raise RemoteProtocolError(f"a greeting on stream {stream}")
                raw = bytes(self._raw)
                self._raw.clear()
                yield frame, raw


class DialSide(GreetingSide):
    """The dialling side of a greeting. Send :attr:`hello` first."""

    def __init__(
        self,
        terms: Terms,
        secret: Secret | None = None,
        *,
        nonce: bytes,
        assurance: Assurance = NO_ASSURANCE,
    ) -> None:
        super().__init__(terms, assurance, WELCOME_LIMITS)
        self._outcome: Outcome | None = None
        self._secret = secret
        self._on_next = self._on_answer
        self.hello = encode_hello(hello_from(terms, nonce if secret else b""))
        self._transcript.add(self.hello)

    def outcome(self) -> Outcome:
        """Return what the greeting came to, once no bytes are missing."""
        if self._outcome is None:
            raise RuntimeError("the greeting is not over")
        return self._outcome

    def _on_answer(self, frame: Frame, raw: bytes) -> bytes:
        if self._secret is None:
            if isinstance(frame, Challenge):
                raise _no_proof()
            return self._end(frame, LaneProofs())
        if not isinstance(frame, Challenge):
            raise _instead_of_proof(frame)
        if len(frame.nonce) != NONCE_BYTES:
            raise RemoteProtocolError(f"a nonce of {len(frame.nonce)} bytes")
        self._transcript.add(raw)
        proof = Proof(self._transcript.prove(self._secret, "dialling"))
        said = encode_frame(0, proof)[0]
        self._transcript.add(said)
        self._on_next = self._on_welcome
        return said

    def _on_welcome(self, frame: Frame, raw: bytes) -> bytes:
        if not isinstance(frame, Welcome):
            raise _instead_of_proof(frame)
        self._transcript.add(raw)
        self._on_next = lambda proof, _: self._on_proof(frame, proof)
        return b""

    def _on_proof(self, welcome: Welcome, frame: Frame) -> bytes:
        secret, transcript = self._secret, self._transcript
        if secret is None or not isinstance(frame, Proof):
            raise _instead_of_proof(frame)
        if not transcript.is_proved(secret, "listening", frame.mac):
            raise _no_proof()
        return self._end(welcome, LaneProofs(transcript.lane_key(secret)))

    def _end(self, answer: Frame, lane_proofs: LaneProofs) -> bytes:
        agreement, welcome = accept_welcome(self._terms, answer)
        agreement = _named(agreement, self._names)
        self._outcome = Outcome(agreement, welcome.link_token, lane_proofs)
        self._on_next = _too_much
        return b""


class ListenSide(GreetingSide):
    """The listening side of a greeting, or of a payload lane's first frame.

    At the end of what a stranger says either ``attach`` or ``agreement`` is set;
    an agreement is answered by :meth:`welcome`.
    """

    def __init__(
        self,
        terms: Terms,
        secrets: Sequence[Secret] = (),
        *,
        nonce: bytes,
        assurance: Assurance = NO_ASSURANCE,
    ) -> None:
        super().__init__(terms, assurance, GREETING_LIMITS)
        self.attach: Attach | None = None
        self.agreement: Agreement | None = None
        self._secrets = secrets
        self._nonce = nonce
        self._secret: Secret | None = None
        self._on_next = self._on_first

    def welcome(self, link_token: bytes, payload_description: bytes) -> bytes:
        """Return the answer to a Hello that was agreed to."""
        if self.agreement is None:
            raise RuntimeError("a Welcome before an agreement")
        welcome = welcome_to(
            self._terms,
            self.agreement,
            link_token=link_token,
            payload_description=payload_description,
        )
        said = encode_frame(0, welcome)[0]
        if self._secret is None:
            return said
        self._transcript.add(said)
        proof = Proof(self._transcript.prove(self._secret, "listening"))
        return said + encode_frame(0, proof)[0]

    def lane_proofs(self) -> LaneProofs:
        """Return what attaches lanes to the link. After :meth:`welcome`."""
        if self._secret is None:
            return LaneProofs()
        return LaneProofs(self._transcript.lane_key(self._secret))

    def _on_first(self, frame: Frame, raw: bytes) -> bytes:
        if isinstance(frame, Attach):
            self.attach = frame
            self._on_next = _too_much
            return b""
        if not isinstance(frame, Hello):
            raise RemoteProtocolError(f"{type(frame).__name__} is no greeting")
        check_version(frame)
        if len(frame.nonce) != (NONCE_BYTES if self._secrets else 0):
            raise _no_proof()
        if not self._secrets:
            return self._agree(frame)
        said = encode_frame(0, Challenge(self._nonce))[0]
        self._transcript.add(raw)
        self._transcript.add(said)
        self._on_next = lambda proof, raw: self._on_proof(frame, proof, raw)
        self._decoder.limit(_PROOF_LIMITS)
        return said

    def _on_proof(self, hello: Hello, frame: Frame, raw: bytes) -> bytes:
        mac = frame.mac if isinstance(frame, Proof) else b""
        self._secret = who_proved(self._secrets, self._transcript, "dialling", mac)
        if self._secret is None:
            raise _no_proof()
        self._transcript.add(raw)
        return self._agree(hello)

    def _agree(self, hello: Hello) -> bytes:
        self.agreement = _named(agree(self._terms, hello), self._names)
        self._on_next = _too_much
        return b""


def _named(agreement: Agreement, names: CertifiedNames | None) -> Agreement:
    """Call the peer what its certificate proves, if it has one."""
    if names is None:
        return agreement
    full_name = names.full_name(agreement.peer.id)
    peer = msgspec.structs.replace(agreement.peer, id=full_name)
    return dataclasses.replace(agreement, peer=peer, certified_names=names.names)


def _too_much(frame: Frame, raw: bytes) -> bytes:
    raise RemoteProtocolError(f"{type(frame).__name__} after the greeting")


def _instead_of_proof(frame: Frame) -> AsyncKVError:
    """Return what it means if ``frame`` comes where a proof has to."""
    if isinstance(frame, Refuse):
        return refusal(frame)
    if isinstance(frame, Welcome | Challenge):
        return _no_proof()  # it goes on as if there were no secret
    return RemoteProtocolError(f"{type(frame).__name__} in answer to a Hello")


def _no_proof() -> AuthError:
    return AuthError(
        _NO_PROOF, hint="give both sides the same secret_file, or neither of them one"
    )
