from __future__ import annotations

import msgspec
import pytest

from asynckv.cli.demo.messages import (
    Landed,
    Load,
    Note,
    Order,
    Prefill,
    Sampled,
    SelectSlowly,
    Text,
    decode_note,
    decode_order,
    encode_line,
)
from asynckv.cli.demo.report import BackpressureSample


@pytest.mark.parametrize(
    "order",
    [
        Prefill("layerwise", "a"),
        Load("/folder", "tcp://here", (1, 2), (1, 3), 10),
        SelectSlowly(3, 0.5),
    ],
)
def test_an_order_survives_its_line(order: Order) -> None:
    line = encode_line(order)
    assert line.count(b"\n") == 1
    assert decode_order(line) == order


@pytest.mark.parametrize(
    "note",
    [
        Landed(4),
        Text("two\nlines"),
        Sampled(BackpressureSample(1.5, 2, 3, 4), 5),
    ],
)
def test_a_note_survives_its_line(note: Note) -> None:
    line = encode_line(note)
    assert line.count(b"\n") == 1
    assert decode_note(line) == note


def test_a_note_is_no_order() -> None:
    with pytest.raises(msgspec.MsgspecError):
        decode_order(encode_line(Landed(4)))
