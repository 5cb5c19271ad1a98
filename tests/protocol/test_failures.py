from __future__ import annotations

import pytest

from asynckv import errors
from asynckv.errors import (
    AsyncKVError,
    AuthError,
    EntryAborted,
    EntryTooLarge,
    IncompatiblePeer,
    LocalProtocolError,
    RemoteProtocolError,
)
from asynckv.protocol.codec import encode_frame
from asynckv.protocol.failures import (
    fail_by,
    from_failure,
    from_refuse,
    to_failure,
    to_refuse,
)
from asynckv.protocol.frames import Cancelled, Failure, Frame, Refuse
from asynckv.protocol.transfer_frames import Grant


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_arrives_as_what_it_was(name: str) -> None:
    kind = getattr(errors, name)
    arrived = from_failure(to_failure(kind("words")))
    mirrored = {
        LocalProtocolError: RemoteProtocolError,
        RemoteProtocolError: LocalProtocolError,
    }
    assert type(arrived) is mirrored.get(kind, kind)
    assert "words" in str(arrived)


@pytest.mark.parametrize("kind", [KeyError, ValueError])
def test_wrong_arguments_arrive_as_such(kind: type[Exception]) -> None:
    arrived = from_failure(to_failure(kind("no such name")))
    assert type(arrived) is kind
    assert arrived.args == ("no such name",)


def test_what_an_error_knows_arrives_with_it() -> None:
    large = from_failure(to_failure(EntryTooLarge(nbytes=7, max_bytes=5)))
    gone = from_failure(to_failure(EntryAborted(reason="ttl")))
    other = from_failure(to_failure(IncompatiblePeer("no", field="dtype")))
    assert isinstance(large, EntryTooLarge)
    assert (large.nbytes, large.max_bytes) == (7, 5)
    assert isinstance(gone, EntryAborted)
    assert gone.reason == "ttl"
    assert isinstance(other, IncompatiblePeer)
    assert other.field == "dtype"


def test_a_fault_of_this_side_tells_nothing() -> None:
    failure = to_failure(RuntimeError("/root/secret at 0xdeadbeef"))
    assert failure == Failure("AsyncKVError", "the peer failed; its log says why")


@pytest.mark.parametrize(
    ("said", "published"),
    [
        ("open /etc/passwd failed", "open ... failed"),
        ("cannot read '~/model/a.bin'", "cannot read '...'"),
        ("<Link at 0x7f00dead>", "<Link at ...>"),
        ("peer 10.1.2.3:7000 is gone", "peer ... is gone"),
        ("peer [fe80::1]:70 is gone", "peer ... is gone"),
        ("dial tcp://host:1 first", "dial ... first"),
        ("3 of 4 and/or LAYER.key", "3 of 4 and/or LAYER.key"),
    ],
)
def test_paths_and_addresses_stay_here(said: str, published: str) -> None:
    assert to_failure(AuthError(said)).message == published


def test_an_unknown_code_is_still_an_error() -> None:
    assert type(from_failure(Failure("SystemExit", "boo"))) is AsyncKVError
    assert type(from_failure(Failure("__class__", ""))) is AsyncKVError


def test_an_error_of_somebody_else_is_told_in_its_words() -> None:
    class Another(AsyncKVError):
        pass

    assert to_failure(Another("words")) == Failure("AsyncKVError", "words")


def test_a_key_error_without_a_word_is_still_one() -> None:
    assert to_failure(KeyError()) == Failure("KeyError", "")


@pytest.mark.parametrize("name", ["KeyError", "ValueError", *errors.__all__])
def test_no_error_of_a_peer_has_more_than_one_line(name: str) -> None:
    words = "words\nCRITICAL root: \x1b[31m"
    for error in (
        from_failure(Failure(name, words, reason=words)),
        from_refuse(Refuse(name, words, field=words)),
    ):
        told = [str(error), *(getattr(error, a, "") for a in ("reason", "field"))]
        assert all(text.isprintable() for text in told)
        assert "words\\nCRITICAL" in told[0]


def test_text_is_cut_where_a_frame_ends() -> None:
    aborted = to_failure(EntryAborted("x" * 3000, reason="y" * 300))
    assert (aborted.message, aborted.reason) == ("x" * 2048, "y" * 256)
    other = to_failure(IncompatiblePeer("no", field="z" * 300))
    assert other.reason == "z" * 256


def test_what_an_error_says_arrives_whatever_else_it_knows() -> None:
    for error in (
        EntryTooLarge("words", nbytes=7, max_bytes=5),
        EntryAborted("words", reason="ttl"),
        IncompatiblePeer("words", field="dtype"),
    ):
        assert str(from_failure(to_failure(error))) == str(error)


def test_any_text_fits_its_frame() -> None:
    failure = to_failure(EntryAborted("x" * 10_000, reason="y" * 10_000))
    assert encode_frame(1, failure)
    assert encode_frame(0, to_refuse(KeyError("x" * 10_000)))


def test_a_refusal_names_the_field() -> None:
    refused = from_refuse(to_refuse(IncompatiblePeer("no", field="model")))
    assert isinstance(refused, IncompatiblePeer)
    assert (str(refused), refused.field) == ("no", "model")


def test_a_refusal_is_always_one_of_ours() -> None:
    refused = from_refuse(Refuse("ValueError", "odd"))
    assert type(refused) is AsyncKVError and str(refused) == "odd"


@pytest.mark.parametrize(
    ("frame", "kind"),
    [
        (Failure("KeyError", "who?"), KeyError),
        (Failure("RemoteProtocolError", "broken"), RemoteProtocolError),
        (Cancelled(), AsyncKVError),
    ],
)
def test_a_last_frame_that_is_no_answer_fails_the_request(
    frame: Frame, kind: type[Exception]
) -> None:
    failed: list[Exception] = []
    fail_by(frame, "question", failed.append)
    assert [type(error) for error in failed] == [kind]


def test_any_other_frame_breaks_the_link_too() -> None:
    failed: list[Exception] = []
    with pytest.raises(RemoteProtocolError, match="no Grant belongs here"):
        fail_by(Grant(1), "question", failed.append)
    assert isinstance(failed[0], RemoteProtocolError)
