"""What the fuzzer has found, tried again: each of these broke a promise once."""

from __future__ import annotations

import msgspec
import pytest

from asynckv.protocol.frames import Accepted, Cancelled, Frame, Offer, Result
from asynckv.protocol.wire import TYPE_CONTROL
from asynckv.types import TensorSpec
from harness.fuzzing.fuzzer import TARGETS
from harness.fuzzing.mutations import Item, join
from harness.fuzzing.peer_target import SIDES
from harness.raw_inserts import body_with

SIDE = {side.name: number for number, side in enumerate(SIDES)}
LARGE = body_with({"key": TensorSpec((80_000,), "int8")})


def said_to(side: str, *said: tuple[int, Frame, bytes]) -> bytes:
    items = [
        Item(TYPE_CONTROL, msgspec.msgpack.encode(frame), body, stream)
        for stream, frame, body in said
    ]
    return bytes((SIDE[side],)) + join(items)


FOUND: dict[str, tuple[str, bytes]] = {
    # A drop_select waited for ever when its peer ended it without a reason.
    "a query that is cancelled unasked": (
        "peer",
        said_to("asking", (1, Cancelled(), b"")),
    ),
    "a query that is accepted": ("peer", said_to("asking", (1, Accepted(), b""))),
    "an offer that is cancelled": (
        "peer",
        said_to("asking", (1, Offer(2, inline=False), LARGE), (1, Cancelled(), b"")),
    ),
    # The next put waited 30 s for the grant of a stream that was over.
    "a writer that is done before it has put all": (
        "peer",
        said_to("asking", (13, Accepted(), b"")),
    ),
    # A rank waited for ever for its group.
    "a rank whose place is cancelled": (
        "peer",
        said_to("following", (1, Cancelled(), b"")),
    ),
    "a rank that gets a result": ("peer", said_to("following", (1, Result(), b""))),
    # UnicodeEncodeError, from what argv and the environment can well hold.
    "a role that is no text": ("config", b'{"kv_role": "\xe1kv_producer"}'),
    # str(address), which a listener shows as its url, led elsewhere or nowhere.
    "a path with a percent sign": ("urls", b"unix:///a%2520b"),
    "a path with a question mark": ("urls", b"unix:///a%3Fb"),
    "a name with an at sign": ("urls", b"mem:@"),
    "a name with a bracket": ("urls", b"mem:]/"),
    # Dropped without a word, so that it was port 7000.
    "a port on two lines": ("urls", b"tcp://127.0.0.1:70\n00"),
}


@pytest.mark.parametrize(("target", "data"), FOUND.values(), ids=FOUND)
def test_what_was_found_once_is_right_now(target: str, data: bytes) -> None:
    TARGETS[target].check(data)
