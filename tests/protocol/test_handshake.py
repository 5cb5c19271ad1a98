from __future__ import annotations

import logging
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
from asynckv.protocol.failures import to_refuse
from asynckv.protocol.frames import Attached
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
    here, _ = accept_welcome(ours, welcome_to(theirs, there, link_token=b"t"))
    assert here.limits == there.limits == Limits(max_streams=7, heartbeat_ms=50)
    assert (here.lanes, here.digest, here.payload_path) == (3, "full", "map")
    assert (here.peer.id, there.peer.id) == ("listens", "dials")
    assert here.peer_limits == theirs.limits


def test_another_major_version_is_refused_by_name() -> None:
    hello = msgspec.structs.replace(hello_from(terms()), major=2)
    with pytest.raises(IncompatiblePeer, match=r"protocol 2\.0 there") as caught:
        agree(terms(), hello)
    assert caught.value.field == "major"


@pytest.mark.parametrize("field", ["model", "dtype", "layout", "ranks", "details"])
def test_different_fingerprints_are_refused_by_their_field(field: str) -> None:
    ours = KVFingerprint(**{field: "mine"})
    hello = hello_from(terms(fingerprint=KVFingerprint(**{field: "yours"})))
    with pytest.raises(IncompatiblePeer, match="mine.*yours") as caught:
        agree(terms(fingerprint=ours), hello)
    assert caught.value.field == field


def test_one_fingerprint_alone_is_let_in_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        agreement = agree(terms(fingerprint=KVFingerprint("m")), hello_from(terms()))
    assert agreement.fingerprint is None
    assert "never matches" in caplog.text


def test_equal_fingerprints_and_none_say_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    agree(terms(), hello_from(terms()))
    both = terms(fingerprint=KVFingerprint("m"))
    assert agree(both, hello_from(both)).fingerprint == KVFingerprint("m")
    assert not caplog.records


def test_no_payload_path_in_common_is_refused() -> None:
    with pytest.raises(IncompatiblePeer) as caught:
        agree(terms(payload_paths=("map",)), hello_from(terms(payload_paths=("x",))))
    assert caught.value.field == "payload_paths"


@pytest.mark.parametrize(
    "limits",
    [
        Limits(heartbeat_ms=0),
        Limits(max_control_bytes=0),
        Limits(max_body_bytes=10),
        Limits(max_streams=0),
        Limits(max_chunk_bytes=1),
    ],
)
def test_limits_under_which_no_link_works_are_refused(limits: Limits) -> None:
    with pytest.raises(IncompatiblePeer) as caught:
        agree(terms(), hello_from(terms(limits=limits)))
    assert caught.value.field.startswith("limits.")


def test_a_refusal_is_raised_as_what_it_tells() -> None:
    with pytest.raises(AuthError, match="who"):
        accept_welcome(terms(), to_refuse(AuthError("who are you")))
    with pytest.raises(LocalProtocolError, match="the peer refuses us: bad"):
        accept_welcome(terms(), to_refuse(RemoteProtocolError("bad")))


def test_anything_but_a_welcome_is_a_broken_rule() -> None:
    with pytest.raises(RemoteProtocolError, match="Attached in answer"):
        accept_welcome(terms(), Attached())


@pytest.mark.parametrize("change", [{"lanes": 9}, {"digest": "off"}])
def test_a_welcome_to_something_else_is_a_broken_rule(change: dict[str, Any]) -> None:
    welcome = welcome_to(terms(), agree(terms(), hello_from(terms())), link_token=b"")
    with pytest.raises(RemoteProtocolError, match="not what was offered"):
        accept_welcome(terms(), msgspec.structs.replace(welcome, **change))


def test_a_hello_that_is_too_long_is_refused_here() -> None:
    hello = hello_from(terms(fingerprint=KVFingerprint(details="x" * 5000)))
    with pytest.raises(LocalProtocolError, match="shorten the fingerprint"):
        encode_hello(hello)


_modes = st.sampled_from(["full", "edges", "off"])


@given(_modes, _modes)
def test_the_strictest_digest_wins_on_either_side(
    ours: DigestMode, theirs: DigestMode
) -> None:
    assert strictest(ours, theirs) == strictest(theirs, ours)
    assert strictest("full", theirs) == "full"
