from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, strategies as st

from asynckv.errors import (
    AuthError,
    IncompatiblePeer,
    LocalProtocolError,
    RemoteProtocolError,
)
from asynckv.protocol.failures import from_refuse, to_refuse
from asynckv.protocol.frames import Attached, Hello, Welcome
from asynckv.protocol.handshake import (
    DigestMode,
    Terms,
    accept_welcome,
    agree,
    encode_hello,
    hello_from,
    strictest,
    welcome_to,
)
from asynckv.protocol.values import Limits, PeerIdentity
from asynckv.types import KVFingerprint


def terms(name: str = "a", **kwargs: Any) -> Terms:
    kwargs = {"payload_paths": ("map", "inline"), "lanes": 4, **kwargs}
    return Terms(identity=PeerIdentity(name, "1"), **kwargs)


def test_both_sides_agree_on_the_same() -> None:
    ours = terms("dials", limits=Limits(max_streams=7), lanes=3)
    theirs = terms("listens", limits=Limits(heartbeat_ms=50), digest="off")
    there = agree(theirs, hello_from(ours))
    welcome = welcome_to(theirs, there, link_token=b"t", payload_description=b"")
    here, _ = accept_welcome(ours, welcome)
    assert here.limits == there.limits == Limits(max_streams=7, heartbeat_ms=50)
    assert (here.lanes, here.digest, here.payload_path) == (3, "full", "map")
    assert (here.peer.id, there.peer.id) == ("listens", "dials")
    assert here.peer_limits == theirs.limits


def test_a_hello_and_its_welcome_say_all_of_a_sides_terms() -> None:
    said: dict[str, Any] = {
        "limits": Limits(max_streams=7),
        "lanes": 3,
        "digest": "edges",
        "fingerprint": KVFingerprint("model"),
    }
    ours = terms(payload_paths=("map",), **said)
    who = PeerIdentity("a", "1")
    hello = Hello(2, 0, who, payload_paths=("map",), nonce=b"n" * 32, **said)
    assert hello_from(ours, b"n" * 32) == hello
    assert hello_from(ours).nonce == b""
    agreement = agree(ours, msgspec.structs.replace(hello, payload_description=b"d"))
    assert (agreement.fingerprint, agreement.payload_description) == (
        KVFingerprint("model"),
        b"d",
    )
    assert welcome_to(
        ours, agreement, link_token=b"t", payload_description=b"w"
    ) == Welcome(
        2, 0, who, payload_path="map", link_token=b"t", payload_description=b"w", **said
    )


@pytest.mark.parametrize(
    ("ours", "theirs", "agreed"), [(0, 0, 1), (0, 4, 1), (3, 4, 3), (99, 99, 8)]
)
def test_there_are_as_many_lanes_as_both_sides_can_have(
    ours: int, theirs: int, agreed: int
) -> None:
    agreement = agree(terms(lanes=ours), hello_from(terms(lanes=theirs)))
    assert agreement.lanes == agreed


def test_the_path_is_the_first_of_ours_that_is_theirs_too() -> None:
    theirs = hello_from(terms(payload_paths=("inline", "map")))
    agreement = agree(terms(payload_paths=("ucx", "map", "inline")), theirs)
    assert agreement.payload_path == "map"


def test_another_major_version_is_refused_by_name() -> None:
    hello = msgspec.structs.replace(hello_from(terms()), major=3)
    with pytest.raises(IncompatiblePeer, match=r"protocol 3\.0 there, 2\.0 here") as c:
        agree(terms(), hello)
    assert c.value.field == "major"
    assert "same release" in c.value.hint


@pytest.mark.parametrize("field", ["model", "dtype", "layout", "ranks", "details"])
def test_different_fingerprints_are_refused_by_their_field(field: str) -> None:
    ours = KVFingerprint(**{field: "mine"})
    hello = hello_from(terms(fingerprint=KVFingerprint(**{field: "yours"})))
    says = f"differ in '{field}': 'mine' and 'yours'"
    with pytest.raises(IncompatiblePeer, match=says) as caught:
        agree(terms(fingerprint=ours), hello)
    assert caught.value.field == field
    assert "equal models" in caught.value.hint
    assert ("same option" in str(caught.value)) is (field == "model")


def test_another_model_is_told_which_option_names_it() -> None:
    ours = terms(fingerprint=KVFingerprint("/models/m"))
    hello = hello_from(terms(fingerprint=KVFingerprint("m")))
    with pytest.raises(IncompatiblePeer, match="same option 'fingerprint'") as caught:
        agree(ours, hello)
    arrived = from_refuse(to_refuse(caught.value))
    assert "'/models/m' and 'm'; if it is one model" in str(arrived)


def test_it_is_known_that_one_side_alone_has_a_fingerprint() -> None:
    named = terms(fingerprint=KVFingerprint("m"))
    agreement = agree(named, hello_from(terms()))
    assert agreement.fingerprint is None and agreement.has_one_fingerprint
    assert agree(terms(), hello_from(named)).has_one_fingerprint
    assert not agree(terms(), hello_from(terms())).has_one_fingerprint
    agreement = agree(named, hello_from(named))
    assert agreement.fingerprint == KVFingerprint("m")
    assert not agreement.has_one_fingerprint


def test_no_payload_path_in_common_is_refused() -> None:
    ours, theirs = terms(payload_paths=("map", "ucx")), terms(payload_paths=("x", "y"))
    with pytest.raises(IncompatiblePeer, match="map, ucx here, x, y there") as caught:
        agree(ours, hello_from(theirs))
    assert caught.value.field == "payload_paths"


def test_what_a_peer_says_is_not_repeated_at_length() -> None:
    theirs = terms(payload_paths=("x" * 150, "y" * 150))
    with pytest.raises(IncompatiblePeer) as caught:
        agree(terms(payload_paths=("map",)), hello_from(theirs))
    said = f"{'x' * 150}, {'y' * 48} there"
    assert str(caught.value).endswith(f"map here, {said}")


@pytest.mark.parametrize(
    ("field", "least"),
    [
        ("heartbeat_ms", 10),
        ("max_control_bytes", 4096),
        ("max_body_bytes", 65536),
        ("max_streams", 1),
        ("max_chunk_bytes", 4096),
        ("max_requests_per_s", 1),
        ("max_cancels_per_s", 1),
    ],
)
def test_limits_under_which_no_link_works_are_refused(field: str, least: int) -> None:
    limits = Limits(**{field: least})
    assert agree(terms(), hello_from(terms(limits=limits))).limits == limits
    limits = Limits(**{field: least - 1})
    says = f"{field} is {least - 1}; no link works below {least}"
    with pytest.raises(IncompatiblePeer, match=says) as caught:
        agree(terms(), hello_from(terms(limits=limits)))
    assert caught.value.field == f"limits.{field}"


def test_a_refusal_is_raised_as_what_it_tells() -> None:
    with pytest.raises(AuthError, match="the peer refuses us: who are you") as caught:
        accept_welcome(terms(), to_refuse(AuthError("who are you")))
    assert "the same secret" in caught.value.hint
    with pytest.raises(IncompatiblePeer, match="another model"):
        accept_welcome(terms(), to_refuse(IncompatiblePeer("another model")))
    with pytest.raises(LocalProtocolError, match="the peer refuses us: bad"):
        accept_welcome(terms(), to_refuse(RemoteProtocolError("bad")))


def test_anything_but_a_welcome_is_a_broken_rule() -> None:
    with pytest.raises(RemoteProtocolError, match="Attached in answer"):
        accept_welcome(terms(), Attached())


@pytest.mark.parametrize("change", [{"lanes": 9}, {"digest": "off"}])
def test_a_welcome_to_something_else_is_a_broken_rule(change: dict[str, Any]) -> None:
    agreement = agree(terms(), hello_from(terms()))
    welcome = welcome_to(terms(), agreement, link_token=b"", payload_description=b"")
    with pytest.raises(RemoteProtocolError, match="not what was offered"):
        accept_welcome(terms(), msgspec.structs.replace(welcome, **change))


def test_a_hello_that_is_too_long_is_refused_here() -> None:
    hello = hello_from(terms(fingerprint=KVFingerprint(details="x" * 5000)))
    with pytest.raises(LocalProtocolError, match="Hello takes") as caught:
        encode_hello(hello)
    assert "shorten the fingerprint" in caught.value.hint


_modes = st.sampled_from(["full", "edges", "off"])


@given(_modes, _modes)
def test_the_strictest_digest_wins_on_either_side(
    ours: DigestMode, theirs: DigestMode
) -> None:
    assert strictest(ours, theirs) == strictest(theirs, ours)
    assert strictest("full", theirs) == "full"
    assert strictest("edges", "off") == "edges"


def test_a_payload_path_that_a_peer_offers_is_told_in_one_line() -> None:
    theirs = hello_from(terms("far", payload_paths=("x\nCRITICAL", "\x1b[31m")))
    with pytest.raises(IncompatiblePeer) as caught:
        agree(terms("near"), theirs)
    assert str(caught.value).isprintable()
