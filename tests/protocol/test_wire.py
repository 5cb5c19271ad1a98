"""The bytes of wire version 1, as they were written down once.

A change that this finds is a change of the wire: both sides would need it. It takes
another version, or is undone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from asynckv.protocol.codec import FrameDecoder, encode_frame
from asynckv.protocol.frames import Frame
from asynckv.protocol.header import WIRE_VERSION

WRITTEN: list[dict[str, Any]] = json.loads(
    Path(__file__).with_name("wire_1.json").read_text()
)


def name_of(written: dict[str, Any]) -> str:
    return str(written["frame"]).partition("(")[0]


def test_every_kind_of_frame_is_written_down() -> None:
    kinds = {kind.__name__ for kind in Frame.__args__}
    assert {name_of(written) for written in WRITTEN} == kinds
    assert WIRE_VERSION == 1


@pytest.mark.parametrize("written", WRITTEN, ids=name_of)
def test_a_frame_is_read_and_written_as_it_always_was(written: dict[str, Any]) -> None:
    data = bytes.fromhex(written["bytes"])
    ((stream, frame, body),) = FrameDecoder().feed(data)
    assert (stream, repr(frame)) == (written["stream"], written["frame"])
    assert body == written["body"].encode()
    assert b"".join(encode_frame(stream, frame, body)) == data
