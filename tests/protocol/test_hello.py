from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, strategies as st

from asynckv.errors import AsyncKVError, AuthError, IncompatiblePeer, ProtocolError
from asynckv.protocol.codec import FrameDecoder, encode_frame
from asynckv.protocol.failures import to_refuse
from asynckv.protocol.frames import (
    Attach,
    Attached,
    Challenge,
    Frame,
    Hello,
    Ping,
    Proof,
    Welcome,
)
from asynckv.protocol.handshake import Terms, encode_hello, hello_from
from asynckv.protocol.hello import DialSide, ListenSide
from asynckv.protocol.values import Limits, PeerIdentity
from asynckv.protocol.wire import (
    HEADER_BYTES,
    TYPE_CONTROL,
    checksum_of,
    pack_header,
    unpack_header,
)
from asynckv.security.names import Assurance, CertifiedNames
from asynckv.security.shared_secret import Secret
from asynckv.types import KVFingerprint

OURS, OTHER = Secret(b"o" * 32), Secret(b"x" * 32)
NEAR_NONCE, FAR_NONCE = b"n" * 32, b"f" * 32
TOKEN = b"token"
ONE, TWO = Assurance(binding=b"one"), Assurance(binding=b"two")

Change = Callable[[int, bytes], bytes]


def terms(name: str, **kwargs: Any) -> Terms:
    identity = PeerIdentity(name, "1")
    return Terms(identity=identity, payload_paths=("inline",), lanes=2, **kwargs)


def dialling(secret: Secret | None = OURS, **kwargs: Any) -> DialSide:
    kwargs = {"nonce": NEAR_NONCE, **kwargs}
    return DialSide(kwargs.pop("terms", terms("near")), secret, **kwargs)


def listening(*secrets: Secret, **kwargs: Any) -> ListenSide:
    kwargs = {"nonce": FAR_NONCE, **kwargs}
    return ListenSide(kwargs.pop("terms", terms("far")), secrets, **kwargs)


def greet(
    near: DialSide, far: ListenSide, change: Change = lambda number, data: data
) -> None:
    """Carry what they say; ``change`` gets the number of each message."""
    said = change(0, near.hello)
    for number in (1, 3):
        said = change(number, answer_of(far, said))
        said = change(number + 1, near.receive(said))
        if not said:
            return


def answer_of(far: ListenSide, said: bytes) -> bytes:
    """What a listening side sends, its refusals included."""
    try:
        answer = far.receive(said)
    except AsyncKVError as exc:
        return encode_frame(0, to_refuse(exc))[0]
    return answer or (far.welcome(TOKEN, b"") if far.agreement else b"")


def recorded(secret: Secret | None = OURS) -> list[bytes]:
    """What is said in a greeting: hello, (challenge, proof,) welcome."""
    said: list[bytes] = []

    def note(number: int, data: bytes) -> bytes:
        said.extend([data] if data else [])
        return data

    greet(dialling(secret), listening(*([secret] if secret else [])), note)
    return said


def frames_in(data: bytes) -> Iterator[tuple[int, int, Frame]]:
    """Each frame, with where it begins and ends."""
    decoder, start = FrameDecoder(), 0
    for end in range(1, len(data) + 1):
        for _, frame, _ in decoder.feed(data[end - 1 : end]):
            yield start, end, frame
            start = end


@pytest.mark.parametrize("secrets", [(), (OURS,), (OURS, OTHER), (OTHER, OURS)])
def test_both_sides_come_to_the_same(secrets: Sequence[Secret]) -> None:
    near, far = dialling(OURS if secrets else None), listening(*secrets)
    greet(near, far)
    outcome = near.outcome()
    assert far.is_over
    assert far.agreement is not None
    assert (outcome.agreement.peer.id, far.agreement.peer.id) == ("far", "near")
    assert outcome.link_token == TOKEN
    assert near.missing_bytes == far.missing_bytes == 0


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("near_secret", "far_secrets"),
    [(OURS, [OTHER]), (OURS, []), (None, [OURS]), (None, [OURS, OTHER])],
)
def test_without_a_shared_secret_both_sides_refuse_with_one_error(
    near_secret: Secret | None, far_secrets: list[Secret]
) -> None:
    said: list[bytes] = []
    far = listening(*far_secrets)
    with pytest.raises(AuthError, match="no proof of a shared secret") as caught:
        greet(dialling(near_secret), far, lambda _, data: said.append(data) or data)  # type: ignore[func-returns-value]
    assert "same secret" in caught.value.hint
    assert not far.is_over
    assert said[-1] == encode_frame(0, to_refuse(AuthError(_message(said[-1]))))[0]


def _message(data: bytes) -> str:
    ((_, _, frame),) = frames_in(data)
    return frame.message  # type: ignore[union-attr]


@pytest.mark.refusal
def test_a_refusal_is_the_same_whatever_is_missing() -> None:
    wrong, missing = listening(OURS), listening(OURS)
    near = dialling(OTHER)
    proof = near.receive(wrong.receive(near.hello))
    refusals = {answer_of(wrong, proof), answer_of(missing, dialling(None).hello)}
    assert len(refusals) == 1


@pytest.mark.refusal
@pytest.mark.parametrize("answer", [Welcome, Challenge])
def test_a_side_with_a_secret_never_goes_on_without_a_proof(answer: type) -> None:
    _, _, welcome = next(frames_in(recorded(None)[-1]))
    near = dialling()
    if answer is Challenge:
        near.receive(encode_frame(0, Challenge(FAR_NONCE))[0])
        near.receive(encode_frame(0, welcome)[0])
    with pytest.raises(AuthError):
        near.receive(encode_frame(0, welcome)[0])


@pytest.mark.refusal
def test_one_without_a_secret_does_not_answer_a_challenge() -> None:
    with pytest.raises(AuthError) as caught:
        dialling(None).receive(encode_frame(0, Challenge(FAR_NONCE))[0])
    assert "the same secret_file" in caught.value.hint


def test_nothing_is_told_to_one_who_has_not_proved_itself() -> None:
    ours = terms("far", fingerprint=KVFingerprint("secret-model"))
    theirs = terms("near", fingerprint=KVFingerprint("another"))
    far = listening(OURS, terms=ours)
    answer = far.receive(dialling(OTHER, terms=theirs).hello)
    ((_, _, challenge),) = frames_in(answer)
    assert challenge == Challenge(FAR_NONCE)
    with pytest.raises(AuthError) as caught:
        far.receive(encode_frame(0, Proof(b"m" * 32))[0])
    assert "model" not in str(caught.value)


@pytest.mark.refusal
def test_where_a_proof_has_to_come_anything_else_is_none() -> None:
    far = listening(OURS)
    far.receive(dialling().hello)
    with pytest.raises(AuthError, match="no proof"):
        far.receive(encode_frame(0, Ping(1))[0])


def test_after_the_proof_what_does_not_fit_is_said_by_name() -> None:
    far = listening(OURS, terms=terms("far", fingerprint=KVFingerprint("one")))
    near = dialling(terms=terms("near", fingerprint=KVFingerprint("two")))
    with pytest.raises(IncompatiblePeer) as caught:
        greet(near, far)
    assert caught.value.field == "model"


@pytest.mark.refusal
def test_another_version_is_refused_before_anything_is_proved() -> None:
    hello = msgspec.structs.replace(hello_from(terms("near"), NEAR_NONCE), major=9)
    with pytest.raises(IncompatiblePeer, match=r"9\.0 there"):
        listening(OURS).receive(encode_hello(hello))


@pytest.mark.refusal
def test_what_was_said_before_proves_nothing_to_a_listening_side() -> None:
    hello, _, proof, _ = recorded()
    far = listening(OURS, nonce=b"another nonce".ljust(32))
    far.receive(hello)
    with pytest.raises(AuthError):
        far.receive(proof)


@pytest.mark.refusal
def test_what_was_said_before_proves_nothing_to_a_dialling_side() -> None:
    _, challenge, _, welcome = recorded()
    near = dialling(nonce=b"another nonce".ljust(32))
    near.receive(challenge)
    with pytest.raises(AuthError):
        near.receive(welcome)


@pytest.mark.refusal
def test_what_a_side_said_itself_proves_nothing_to_it() -> None:
    near = dialling()
    mine = near.receive(encode_frame(0, Challenge(NEAR_NONCE))[0])
    welcome, _ = list(frames_in(recorded()[-1]))
    near.receive(encode_frame(0, welcome[2])[0])
    with pytest.raises(AuthError):
        near.receive(mine)


@pytest.mark.refusal
def test_a_listening_side_takes_no_proof_of_a_listening_side() -> None:
    # Somebody dials two of them at once, and hands on what they say.
    far, other = listening(OURS), listening(OURS, nonce=FAR_NONCE)
    hello = dialling().hello
    assert far.receive(hello) == other.receive(hello)
    _, proof = list(frames_in(recorded()[-1]))
    with pytest.raises(AuthError):
        far.receive(encode_frame(0, proof[2])[0])


@pytest.mark.refusal
def test_the_same_words_over_another_connection_are_refused() -> None:
    near, far = dialling(assurance=ONE), listening(OURS, assurance=TWO)
    with pytest.raises(AuthError):
        greet(near, far)
    greet(dialling(assurance=ONE), listening(OURS, assurance=ONE))


def tampered(data: bytes, bits: Sequence[int]) -> Iterator[bytes]:
    """Each byte with a bit flipped; then again with checksums that fit.

    The bit is another one in each byte, or each of ``bits``.
    """
    for place in range(len(data)):
        for bit in bits or (place % 8,):
            changed = bytearray(data)
            changed[place] ^= 1 << bit
            yield bytes(changed)
            if (fitting := with_checksums(data, bytes(changed))) != data:
                yield fitting  # else the header alone was changed


def replacing(number: int, new: bytes) -> Change:
    return lambda at, data: new if at == number else data


def with_checksums(data: bytes, changed: bytes) -> bytes:
    made = b""
    for start, end, _ in frames_in(data):
        control = changed[start + HEADER_BYTES : end]
        checksum = checksum_of(control)
        made += pack_header(TYPE_CONTROL, len(control), 0, checksum=checksum) + control
    return made


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize(
    "bits", [(), pytest.param(tuple(range(8)), marks=pytest.mark.trust)]
)
def test_a_greeting_with_any_bit_changed_comes_to_nothing(
    number: int, bits: Sequence[int]
) -> None:
    for changed in tampered(recorded()[number], bits):
        near = dialling()
        with pytest.raises((AuthError, ProtocolError, IncompatiblePeer)):
            greet(near, listening(OURS), replacing(number, changed))
            near.outcome()
        assert near.missing_bytes


@pytest.mark.refusal
@pytest.mark.parametrize("number", range(4))
def test_a_greeting_that_is_cut_comes_to_nothing(number: int) -> None:
    said = recorded()
    for length in range(len(said[number])):
        near, far = dialling(), listening(OURS)
        for at, data in enumerate([*said[:number], said[number][:length]]):
            near.receive(data) if at % 2 else far.receive(data)
        late: DialSide | ListenSide = near if number % 2 else far
        assert late.missing_bytes > 0
        assert number == 3 or not far.is_over


@given(st.lists(st.integers(1, 60), min_size=1))
def test_any_split_of_the_bytes_comes_to_the_same(sizes: list[int]) -> None:
    hello, challenge, proof, welcome = recorded()
    near, far = dialling(), listening(OURS)
    for side, data in ((far, hello), (near, challenge), (far, proof), (near, welcome)):
        pieces, start, turn = [], 0, 0
        while start < len(data):
            size = sizes[turn % len(sizes)]
            pieces.append(data[start : start + size])
            start, turn = start + size, turn + 1
        for piece in pieces:
            side.receive(piece)
        if side is far and far.is_over:
            far.welcome(TOKEN, b"")
    assert near.outcome().agreement.peer.id == "far"


@pytest.mark.refusal
@pytest.mark.parametrize("frame", [Ping(1), Attached(), Proof(b"m"), Challenge(b"n")])
def test_what_is_no_greeting_is_refused(frame: Frame) -> None:
    data = encode_frame(0, frame)[0]
    with pytest.raises(ProtocolError, match=f"{type(frame).__name__} is no greeting"):
        listening().receive(data)
    if not isinstance(frame, Challenge):
        says = f"{type(frame).__name__} in answer to a Hello"
        with pytest.raises(ProtocolError, match=says):
            dialling().receive(data)


def test_frames_of_a_stream_or_after_the_end_are_no_greeting() -> None:
    hello = encode_frame(3, hello_from(terms("near")))[0]
    with pytest.raises(ProtocolError, match="stream 3"):
        listening().receive(hello)
    far = listening()
    with pytest.raises(ProtocolError, match="Ping after the greeting"):
        far.receive(dialling(None).hello + encode_frame(0, Ping(1))[0])
    near = dialling(None)
    greet(near, listening())
    attached = listening()
    attached.receive(near.outcome().attach(0))
    for side in (near, attached):
        with pytest.raises(ProtocolError, match="Ping after the greeting"):
            side.receive(encode_frame(0, Ping(1))[0])


@pytest.mark.parametrize("nonce", [b"", b"n", b"n" * 31, b"n" * 33])
def test_a_nonce_has_32_bytes(nonce: bytes) -> None:
    with pytest.raises(AuthError):
        listening(OURS).receive(encode_hello(hello_from(terms("near"), nonce)))
    with pytest.raises(ProtocolError, match=f"a nonce of {len(nonce)} bytes"):
        dialling().receive(encode_frame(0, Challenge(nonce))[0])


def test_a_stranger_is_never_read_beyond_4_kib() -> None:
    far, read = listening(OURS), 0
    details = "x" * 2500
    near = dialling(terms=terms("near", fingerprint=KVFingerprint(details=details)))
    read += len(near.hello)
    far.receive(near.hello)
    longest = pack_header(TYPE_CONTROL, 128, 0)
    far.receive(longest)
    assert read + len(longest) + far.missing_bytes <= 4096
    far = listening(OURS)
    far.receive(pack_header(TYPE_CONTROL, 3072, 0))
    with pytest.raises(ProtocolError):
        listening(OURS).receive(pack_header(TYPE_CONTROL, 3073, 0))


def test_a_proof_is_not_as_long_as_a_hello() -> None:
    far = listening(OURS)
    far.receive(dialling().hello)
    with pytest.raises(ProtocolError, match="more than 128"):
        far.receive(pack_header(TYPE_CONTROL, 129, 0))


def test_a_first_frame_may_attach_a_lane() -> None:
    far = listening(OURS)
    attach = Attach(TOKEN, 1, b"proof")
    assert far.receive(encode_frame(0, attach)[0]) == b""
    assert far.attach == attach
    assert far.is_over
    assert far.agreement is None
    with pytest.raises(RuntimeError, match="before an agreement"):
        far.welcome(TOKEN, b"")


@pytest.mark.parametrize("secret", [None, OURS])
def test_lanes_are_attached_by_what_only_the_two_sides_know(
    secret: Secret | None,
) -> None:
    near, far = dialling(secret), listening(*([secret] if secret else []))
    greet(near, far)
    said = near.outcome().attach(1)
    ((_, _, attach),) = frames_in(said)
    assert unpack_header(said).stream == 0
    assert isinstance(attach, Attach)
    assert far.lane_proofs().is_proved("dialling", 1, attach.proof)
    attached = Attached(far.lane_proofs().prove("listening", 1))
    near.outcome().check_attached(1, attached)
    if secret is not None:
        assert not far.lane_proofs().is_proved("dialling", 0, attach.proof)
        for proof in (b"", attach.proof, far.lane_proofs().prove("listening", 0)):
            with pytest.raises(AuthError):
                near.outcome().check_attached(1, Attached(proof))


@pytest.mark.refusal
def test_a_lane_that_is_refused_or_answered_wrongly_says_so() -> None:
    near, far = dialling(None), listening()
    greet(near, far)
    with pytest.raises(AuthError, match="refuses us"):
        near.outcome().check_attached(0, to_refuse(AuthError("no")))
    with pytest.raises(ProtocolError, match="Ping in answer to an Attach"):
        near.outcome().check_attached(0, Ping(1))


@pytest.mark.parametrize("secret", [None, OURS])
def test_a_welcome_describes_how_payload_comes(secret: Secret | None) -> None:
    near, far = dialling(secret), listening(*([secret] if secret else []))
    challenge = far.receive(near.hello)
    if secret:
        far.receive(near.receive(challenge))
    near.receive(far.welcome(TOKEN, b"lanes"))
    assert near.outcome().agreement.payload_description == b"lanes"


def test_each_side_is_called_what_its_certificate_proves() -> None:
    near_names, far_names = CertifiedNames(("worker-1",)), CertifiedNames(("two",))
    near = dialling(assurance=Assurance(names=far_names))
    far = listening(OURS, assurance=Assurance(names=near_names))
    greet(near, far)
    assert near.outcome().agreement.peer == PeerIdentity("far@two", "1")
    assert far.agreement is not None
    assert far.agreement.peer == PeerIdentity("near@worker-1", "1")


@pytest.mark.refusal
def test_a_name_that_a_certificate_does_not_prove_is_refused() -> None:
    names = Assurance(names=CertifiedNames(("worker-1",)))
    with pytest.raises(AuthError, match="not in its certificate"):
        near = dialling(None, terms=terms("near@worker-2"))
        listening(assurance=names).receive(near.hello)


def test_there_is_no_outcome_before_the_end() -> None:
    with pytest.raises(RuntimeError, match="not over"):
        dialling().outcome()


def test_a_hello_says_whether_there_is_a_secret() -> None:
    ((_, _, with_one),) = frames_in(dialling().hello)
    ((_, _, without),) = frames_in(dialling(None).hello)
    assert isinstance(with_one, Hello)
    assert isinstance(without, Hello)
    assert (with_one.nonce, without.nonce) == (NEAR_NONCE, b"")
    assert Limits() == with_one.limits
