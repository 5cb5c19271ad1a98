"""What a stranger may say, and what somebody who was dialled may answer.

Both sides of a greeting, with a shared secret and without. Whatever comes: an
agreement within what was offered, or a documented error; with a secret, an
agreement only if not one bit differs from what its owner says.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

from asynckv.errors import AsyncKVError
from asynckv.protocol.codec import FrameDecoder
from asynckv.protocol.handshake import Agreement, Terms
from asynckv.protocol.hello import DialSide, ListenSide
from asynckv.protocol.values import Limits, PeerIdentity
from asynckv.security.shared_secret import NONCE_BYTES, Secret
from asynckv.types import KVFingerprint
from harness.fuzzing.corpus import Corpus, Target, expect, pieces_of
from harness.fuzzing.mutations import Item, change_bytes, change_items, join
from harness.fuzzing.wire_frames import split

__all__ = ("GREETING",)

_US: Final = PeerIdentity("us", "1")
_THEM: Final = PeerIdentity("them", "1")
_SECRET: Final = Secret(b"known to both sides, and to nobody else")
_OURS: Final = Terms(
    identity=_US,
    payload_paths=("map", "inline"),
    lanes=4,
    fingerprint=KVFingerprint("model"),
    limits=Limits(max_body_bytes=2**20, heartbeat_ms=100),
)
_THEIRS: Final = Terms(
    identity=_THEM,
    payload_paths=("inline",),
    lanes=8,
    fingerprint=KVFingerprint("model"),
)
_NONCES: Final = (b"d" * NONCE_BYTES, b"l" * NONCE_BYTES)
_MAX_WANTED: Final = 2**15


class _Side(Protocol):
    @property
    def missing_bytes(self) -> int: ...

    def receive(self, data: bytes) -> bytes: ...


class _End(NamedTuple):
    """How a side came out of a greeting."""

    error: str
    said: bytes
    agreement: Agreement | None


def _dialling(terms: Terms, has_secret: bool) -> DialSide:
    return DialSide(terms, _SECRET if has_secret else None, nonce=_NONCES[0])


def _listening(terms: Terms, has_secret: bool) -> ListenSide:
    return ListenSide(terms, (_SECRET,) if has_secret else (), nonce=_NONCES[1])


@functools.cache
def _genuine(dials: bool, has_secret: bool) -> bytes:
    """Return what an honest peer says to our side, to the end of the greeting."""
    near = _dialling(_OURS if dials else _THEIRS, has_secret)
    far = _listening(_THEIRS if dials else _OURS, has_secret)
    to_far, to_near = near.hello, b""
    answer = far.receive(near.hello)
    if has_secret:
        to_near += answer
        proof = near.receive(answer)
        to_far += proof
        far.receive(proof)
    to_near += far.welcome(b"token of the link", b"")
    return to_near if dials else to_far


def _make(rng: random.Random, corpus: Corpus) -> bytes:
    choice = rng.getrandbits(8)
    if rng.random() < 0.2:
        return bytes((choice,)) + corpus.hostile(rng, opener=1)
    said = _genuine(bool(choice & 1), bool(choice & 2))
    items = [Item(f.header.type, f.control, f.payload) for f in split(said)]
    if rng.random() < 0.1:
        items.insert(rng.randrange(len(items) + 1), rng.choice(corpus.frames)[1])
    for _ in range(rng.choice((0, 1, 1, 2, 4))):
        if items:
            change_items(items, rng)
    data = join(items)
    return bytes((choice,)) + (data if rng.random() < 0.8 else change_bytes(data, rng))


def _check(data: bytes) -> None:
    choice, said = data[0] if data else 0, data[1:]
    dials, has_secret = bool(choice & 1), bool(choice & 2)
    whole = _receive(dials, has_secret, (said,))
    cut = _receive(dials, has_secret, pieces_of(said))
    expect(cut == whole, "another split, another greeting", whole, cut)
    if whole.agreement is None:
        return
    _check_agreement(whole.agreement)
    if has_secret:
        genuine = _genuine(dials, has_secret)
        expect(_is_same(said, genuine), "a proof of what was not said", said)


def _is_same(said: bytes, genuine: bytes) -> bool:
    """All but the last proof bit by bit, and that one in any spelling."""
    *_, proof = split(genuine)
    last = FrameDecoder().feed(said[proof.start :])
    return said[: proof.start] == genuine[: proof.start] and next(last) == next(
        FrameDecoder().feed(genuine[proof.start :])
    )


def _receive(dials: bool, has_secret: bool, pieces: Sequence[bytes]) -> _End:
    dialling, listening = _dialling(_OURS, has_secret), _listening(_OURS, has_secret)
    side: _Side = dialling if dials else listening
    said = bytearray()
    try:
        for piece in pieces:
            _feed(side, piece, said)
    except AsyncKVError as exc:
        return _End(type(exc).__name__, bytes(said), None)
    if dials:
        agreement = None if side.missing_bytes else dialling.outcome().agreement
        return _End("", bytes(said), agreement)
    if listening.agreement is not None:
        expect(bool(listening.welcome(b"token", b"")), "no Welcome")
        listening.lane_proofs()
    return _End("", bytes(said), listening.agreement)


def _feed(side: _Side, piece: bytes, said: bytearray) -> None:
    """Read as the socket does: no byte beyond the greeting."""
    start = 0
    while start < len(piece) and (wanted := side.missing_bytes):
        expect(wanted <= _MAX_WANTED, "asks for too much", wanted)
        said += side.receive(piece[start : start + wanted])
        start += wanted


def _check_agreement(agreement: Agreement) -> None:
    for field in Limits.__struct_fields__:
        agreed, ours = getattr(agreement.limits, field), getattr(_OURS.limits, field)
        expect(agreed <= ours, "more than we offered", field, agreed)
    expect(1 <= agreement.lanes <= _OURS.lanes, "lanes nobody offered", agreement)
    expect(agreement.payload_path in _OURS.payload_paths, "no path of ours", agreement)
    other = agreement.fingerprint not in (None, _OURS.fingerprint)
    expect(not other, "agreed on another model", agreement)


GREETING: Final = Target("greeting", _make, _check)
