"""What a changed bit would mean if no checksum found it: why there is one."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Final

import msgspec

from asynckv.errors import ChecksumError, RemoteProtocolError
from asynckv.protocol.frames import Frame, Insert, Offer
from asynckv.transfers.manifest import Manifest, unpack, verify_inline
from harness.fuzzing.recording import Connection
from harness.fuzzing.wire_frames import WireFrame

__all__ = ("changed_meanings", "meaning_of")

_decode: Final = msgspec.msgpack.Decoder[Frame](Frame).decode


def changed_meanings(connection: Connection) -> collections.Counter[str]:
    """Count, by what it changes, each bit that would pass for something else."""
    return collections.Counter(
        meaning
        for to_listener in (True, False)
        for frame in connection.frames(to_listener=to_listener)
        if frame.control and not frame.header.more
        for control, payload in _flipped(frame)
        if (meaning := meaning_of(frame, control, payload))
    )


def _flipped(frame: WireFrame) -> Iterator[tuple[bytes, bytes]]:
    data, control_bytes = frame.control + frame.payload, len(frame.control)
    for place in range(len(data)):
        for bit in range(8):
            changed = bytearray(data)
            changed[place] ^= 1 << bit
            yield bytes(changed[:control_bytes]), bytes(changed[control_bytes:])


def meaning_of(frame: WireFrame, control: bytes, payload: bytes) -> str:
    """Return what differs if ``frame`` arrives like that, or ``""`` if it is found.

    Found by the types and bounds of the fields, by the sizes in a manifest, or
    by the digests of tensors that ride along: all there is but the checksums.
    """
    sent = _decode(frame.control)
    try:
        came = _decode(control)
        if isinstance(came, Insert | Offer):
            manifest = unpack(payload, inline=came.inline)
            if came.inline:
                verify_inline(manifest)
    except (msgspec.MsgspecError, ValueError, RemoteProtocolError, ChecksumError):
        return ""
    name = type(sent).__name__
    if type(came) is not type(sent):
        return f"{name} becomes {type(came).__name__}"
    if came != sent:
        return f"{name}.{_difference(sent, came)}"
    if payload == frame.payload:
        return ""
    if isinstance(sent, Insert | Offer):
        before = unpack(frame.payload, inline=sent.inline)
        return f"{name} body: {_difference_of_entries(before, manifest)}"
    return f"{name} body"


def _difference(sent: msgspec.Struct, came: msgspec.Struct) -> str:
    fields = sent.__struct_fields__
    return next(f for f in fields if getattr(sent, f) != getattr(came, f))


def _difference_of_entries(sent: Manifest, came: Manifest) -> str:
    for name, before, after in (
        ("tokens", sent.input_tokens, came.input_tokens),
        ("roi", sent.roi, came.roi),
    ):
        if before != after:
            return name
    if sent.digests != came.digests:
        return "a tensor's digest"
    specs = zip(sent.layout.specs.items(), came.layout.specs.items(), strict=True)
    for (name, spec), (other_name, other) in specs:
        if spec != other:
            return f"a tensor's {_difference(spec, other)}"
        if name != other_name:
            return "a tensor's name"
    return "a tensor's bytes"
