from __future__ import annotations

import msgspec
import pytest

from asynckv.protocol.frames import Frame
from asynckv.protocol.ipc_frames import Exported, Imported, OpenIpc

DECODER = msgspec.msgpack.Decoder[Frame](Frame)
UUID = "0123456789abcdef" * 2


def test_what_can_be_survives_the_wire() -> None:
    for frame in (OpenIpc(UUID), Exported("a", b"t", b"h" * 64, 1), Imported(b"n")):
        assert DECODER.decode(msgspec.msgpack.encode(frame)) == frame


@pytest.mark.parametrize(
    "frame",
    [
        OpenIpc("0" * 65),
        Exported("a" * 257, b"", b"h" * 64, 1),
        Exported("a", b"t" * 17, b"h" * 64, 1),
        Exported("a", b"", b"h" * 65, 1),
        Exported("a", b"", b"h" * 64, -1),
        Imported(b"n" * 65),
    ],
)
def test_what_cannot_be_is_refused(frame: Frame) -> None:
    with pytest.raises(msgspec.ValidationError):
        DECODER.decode(msgspec.msgpack.encode(frame))
