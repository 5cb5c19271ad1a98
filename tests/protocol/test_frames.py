from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest

from asynckv.protocol import (
    frames,
    frames as pin_frames,
    transfer_frames as device_frames,
    transfer_frames as ipc_frames,
    transfer_frames as map_frames,
    transfer_frames as payload_frames,
    values,
)
from asynckv.protocol.frames import (
    Frame,
    Hello,
    Insert,
    OpeningFrame,
    Result,
    Select,
    Welcome,
)
from asynckv.protocol.transfer_frames import Sent
from asynckv.protocol.values import (
    Contents,
    Limits,
    NamedSpecs,
    PeerIdentity,
    Place,
)
from asynckv.types import KVFingerprint, TensorSpec

FRAMES: tuple[type[msgspec.Struct], ...] = get_args(Frame)
DECODER = msgspec.msgpack.Decoder[Any](Frame)
IDENTITY = PeerIdentity(id="node", incarnation="1", role="producer", pid=7)
VALUES: dict[str, Any] = {
    "identity": IDENTITY,
    "limits": Limits(),
    "payload_paths": ("inline",),
    "keys": ("a", "b"),
    "message": "text",
    "code": "code",
    "entry_id": "id",
    "key": "name",
    "payload_path": "inline",
    "address": "asynckv-0",
    "kind": "edges",
    "ticket": b"t" * 16,
    "of": "lookup",
    "handle": b"h" * 64,
    "Proved.nonce": b"n" * 16,
    "description": b"d" * 16,
    "generations": (1, None),
    "pipe": 1,
    "unique_id": b"u" * 128,
    "token": b"t" * 16,
    "link_token": b"l" * 32,
    "mac": b"m" * 32,
    "has_key": True,
    "inline": False,
    "place": Place(((0, 4096),), 64, 1),
    "url": "unix:///run/rank-1",
    "group_id": "group",
    "ranks": (1, 3),
    "parts": (0, 2),
    "urls": ("", "tcp://127.0.0.1:7000"),
    "spec": TensorSpec((2, 3), "float16"),
}


def sample(frame: type[msgspec.Struct]) -> msgspec.Struct:
    """A frame with a value in each field that has no default."""
    needed = [f.name for f in msgspec.structs.fields(frame) if f.required]
    own = {name: VALUES.get(f"{frame.__name__}.{name}") for name in needed}
    return frame(**{name: own[name] or VALUES.get(name, 3) for name in needed})


@pytest.mark.parametrize("frame", FRAMES)
def test_every_frame_survives_the_wire(frame: type[msgspec.Struct]) -> None:
    value = sample(frame)
    assert DECODER.decode(msgspec.msgpack.encode(value)) == value


def test_no_two_frames_have_the_same_tag() -> None:
    tags = {frame.__struct_config__.tag for frame in FRAMES}
    assert len(tags) == len(FRAMES)


def test_every_frame_of_the_page_belongs_to_the_union() -> None:
    tagged = [
        value
        for page in (
            device_frames,
            frames,
            ipc_frames,
            map_frames,
            payload_frames,
            pin_frames,
        )
        for name in page.__all__
        if isinstance(value := getattr(page, name), type)
        if issubclass(value, msgspec.Struct) and value.__struct_config__.tag
    ]
    assert set(tagged) == set(FRAMES)
    assert set(get_args(OpeningFrame)) < set(FRAMES)


@pytest.mark.parametrize("frame", FRAMES)
def test_an_unknown_field_is_refused(frame: type[msgspec.Struct]) -> None:
    fields = msgspec.to_builtins(sample(frame), builtin_types=(bytes,))
    with pytest.raises(msgspec.ValidationError, match="unknown field"):
        DECODER.decode(msgspec.msgpack.encode({**fields, "surprise": 1}))


def test_an_unknown_tag_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        DECODER.decode(msgspec.msgpack.encode({"t": "shutdown"}))


@pytest.mark.parametrize(
    "frame",
    [
        *get_args(OpeningFrame),
        frames.Push,
    ],
)
def test_a_request_may_say_what_it_is_traced_by(frame: type[msgspec.Struct]) -> None:
    plain = sample(frame)
    assert b"trace" not in msgspec.msgpack.encode(plain)
    traced = msgspec.structs.replace(plain, trace=b"t" * 64)
    assert DECODER.decode(msgspec.msgpack.encode(traced)) == traced
    traced = msgspec.structs.replace(plain, trace=b"t" * 65)
    with pytest.raises(msgspec.ValidationError):
        DECODER.decode(msgspec.msgpack.encode(traced))


@pytest.mark.parametrize(
    "frame",
    [
        Sent(transfer=-1, part=0),
        Sent(transfer=2**62 + 1, part=0),
        Sent(transfer=1, part=0, digest=b"x" * 17),
        Insert(entry_id="i" * 257, transfer=0, inline=True),
        Insert(entry_id="i", transfer=0, inline=True, deliveries=0),
        Insert(entry_id="i", transfer=0, inline=True, ttl_s=-1.0),
        Select(has_key=True, min_matched_tokens=0),
        Result(flags=(True,) * 4097),
    ],
)
def test_a_value_outside_its_bounds_is_refused(frame: msgspec.Struct) -> None:
    with pytest.raises(msgspec.ValidationError):
        DECODER.decode(msgspec.msgpack.encode(frame))


@pytest.mark.parametrize(
    ("frame", "field", "last", "beyond"),
    [
        (frames.Hello, "payload_description", b"d" * 4096, b"d" * 4097),
        (frames.Hello, "nonce", b"n" * 64, b"n" * 65),
        (frames.Welcome, "link_token", b"l" * 32, b"l" * 33),
        (frames.Welcome, "payload_description", b"d" * 4096, b"d" * 4097),
        (frames.Challenge, "nonce", b"n" * 64, b"n" * 65),
        (frames.Attach, "link_token", b"l" * 32, b"l" * 33),
        (Insert, "ttl_s", 0.0, -5e-324),
        (Insert, "deliveries", 1, 0),
        (Insert, "deliveries", 2**31, 2**31 + 1),
        (Select, "min_matched_tokens", 1, 0),
        (Select, "min_matched_tokens", 2**31, 2**31 + 1),
        (frames.Contains, "keys", ("k",) * 4096, ("k",) * 4097),
        (frames.Missing, "ranks", (1,) * 1024, (1,) * 1025),
        (frames.Members, "urls", ("",) * 1024, ("",) * 1025),
        (Result, "flags", (True,) * 4096, (True,) * 4097),
        (map_frames.Proved, "nonce", b"n" * 64, b"n" * 65),
        (payload_frames.Eager, "parts", (0,) * 1024, (0,) * 1025),
        (payload_frames.Eager, "digests", (b"",) * 1024, (b"",) * 1025),
        (pin_frames.Pin, "keys", ("k",) * 4096, ("k",) * 4097),
        (pin_frames.Pinned, "flags", (True,) * 4096, (True,) * 4097),
    ],
)
def test_a_field_may_reach_its_bound_and_no_further(
    frame: type[msgspec.Struct], field: str, last: object, beyond: object
) -> None:
    value = msgspec.structs.replace(sample(frame), **{field: last})
    assert DECODER.decode(msgspec.msgpack.encode(value)) == value
    value = msgspec.structs.replace(sample(frame), **{field: beyond})
    with pytest.raises(msgspec.ValidationError):
        DECODER.decode(msgspec.msgpack.encode(value))


def test_a_manifest_survives_the_wire() -> None:
    layout = msgspec.msgpack.encode([("0.key", TensorSpec((2, 3), "bfloat16"))])
    contents = Contents(layout, (b"d" * 16,), input_tokens=TensorSpec((4,), "int32"))
    encoded = msgspec.msgpack.encode(contents)
    assert msgspec.msgpack.decode(encoded, type=Contents) == contents


def test_a_manifest_has_a_bounded_number_of_tensors() -> None:
    encode, decode = msgspec.msgpack.encode, msgspec.msgpack.decode
    tensor = ("0.key", TensorSpec((1,), "int8"))
    assert len(decode(encode([tensor] * 16384), type=NamedSpecs)) == 16384
    assert len(decode(encode(Contents(b"", (b"",) * 16384)), type=Contents).digests)
    with pytest.raises(msgspec.ValidationError):
        decode(encode([tensor] * 16385), type=NamedSpecs)
    with pytest.raises(msgspec.ValidationError):
        decode(encode(Contents(b"", (b"",) * 16385)), type=Contents)


@pytest.mark.parametrize("frame", [Hello, Welcome])
def test_both_introductions_carry_the_fingerprint(frame: type[msgspec.Struct]) -> None:
    value = msgspec.structs.replace(
        sample(frame), fingerprint=KVFingerprint(model="m", dtype="bfloat16")
    )
    assert DECODER.decode(msgspec.msgpack.encode(value)) == value


def test_a_bounded_field_refuses_more() -> None:
    layout = msgspec.msgpack.encode([("x" * 513, ((1,), "float32"))])
    with pytest.raises(msgspec.ValidationError, match="length"):
        msgspec.msgpack.decode(layout, type=values.NamedSpecs)


@pytest.mark.parametrize(
    ("kind", "last", "beyond"),
    [
        (values.Count, 2**62, 2**62 + 1),
        (values.Count, 0, -1),
        (values.Port, 65535, 65536),
        (values.Port, 1, 0),
        (values.Name, "n" * 512, "n" * 513),
        (values.Id, "i" * 256, "i" * 257),
        (values.Text, "t" * 2048, "t" * 2049),
        (values.Digest, b"d" * 16, b"d" * 17),
        (values.Token, b"t" * 16, b"t" * 17),
        (values.Mac, b"m" * 32, b"m" * 33),
        (
            values.PeerIdentity,
            values.PeerIdentity("i" * 256, "1"),
            values.PeerIdentity("i" * 257, "1"),
        ),
        (
            values.Place,
            values.Place(((0, 1),) * 64, 0, 1),
            values.Place(((0, 1),) * 65, 0, 1),
        ),
    ],
)
def test_a_value_may_reach_its_own_bound_and_no_further(
    kind: Any, last: object, beyond: object
) -> None:
    encode, decode = msgspec.msgpack.encode, msgspec.msgpack.decode
    assert decode(encode(last), type=kind) == last
    with pytest.raises(msgspec.ValidationError):
        decode(encode(beyond), type=kind)


@pytest.mark.parametrize("name", ["two\nlines", "\x1b[2J", "a\u2028b", "\x00"])
def test_a_peers_name_cannot_write_lines_into_a_log(name: str) -> None:
    identity = msgspec.msgpack.encode({"id": name, "incarnation": "1"})
    with pytest.raises(msgspec.ValidationError, match="regex"):
        msgspec.msgpack.decode(identity, type=values.PeerIdentity)


def test_a_peers_name_may_be_in_any_language() -> None:
    identity = values.PeerIdentity("Größe 東京 🙂", "1")
    encoded = msgspec.msgpack.encode(identity)
    assert msgspec.msgpack.decode(encoded, type=values.PeerIdentity) == identity
