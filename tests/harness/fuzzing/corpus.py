"""Frames to start from: one of every kind, and those of recorded connections."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from asynckv.protocol.frames import OpeningFrame
from asynckv.protocol.values import Contents
from asynckv.protocol.wire import TYPE_CONTROL
from asynckv.transfers.manifest import pack, read_layout
from asynckv.transfers.tokens import Tokens
from asynckv.types import TensorSpec
from harness.fuzzing.mutations import (
    Item,
    change_bytes,
    change_items,
    join,
    one_of,
)
from harness.fuzzing.samples import frame_makers, sample_contents
from harness.fuzzing.wire_frames import split

__all__ = ("OF_THE_LINK", "OPENING", "Corpus", "body_of")

OPENING: Final = frozenset(kind.__name__ for kind in OpeningFrame.__args__)
OF_THE_LINK: Final = frozenset(
    ("Hello", "Welcome", "Refuse", "Attach", "Attached", "Ping", "Pong", "Goodbye")
)
_EACH: Final = 24
_TALK: Final = 30
_GREETING: Final = 3
"""At most as many frames come before the link is open."""
_encode: Final = msgspec.msgpack.Encoder().encode


def _memory(spec: TensorSpec, rng: random.Random) -> bytes:
    return rng.randbytes(spec.nbytes) if spec.dtype != "bool" else bytes(spec.nbytes)


def _entry_body(contents: Contents, inline: bool, rng: random.Random) -> bytes:
    rows = [
        None if spec is None else Tokens(_memory(spec, rng), spec)
        for spec in (contents.input_tokens, contents.roi)
    ]
    layout = read_layout(contents.layout)
    specs = layout.specs.values() if inline else ()
    views = [memoryview(_memory(spec, rng)) for spec in specs]
    return pack(layout, contents.digests, rows[0], rows[1], views)


def body_of(frame: Any, rng: random.Random) -> bytes:
    """Return a body that makes sense behind ``frame``."""
    match type(frame).__name__:
        case "Insert" | "Offer":
            return _entry_body(sample_contents(rng), frame.inline, rng)
        case "Select" | "Peek":
            return rng.randbytes(8 * rng.randrange(1, 9)) if frame.has_key else b""
        case "Put" | "Push" if frame.inline and frame.spec is not None:
            return _memory(frame.spec, rng)
    return b""


class Corpus:
    """What inputs are made from; the same seed and recordings, the same corpus.

    ``recorded`` holds what one side sent on one control connection each.
    """

    def __init__(self, seed: int, recorded: Iterable[bytes] = ()) -> None:
        rng = random.Random(seed)
        self.frames: list[tuple[str, Item]] = []
        for name, make in frame_makers().items():
            for _ in range(_EACH):
                frame = make(rng)
                item = Item(TYPE_CONTROL, _encode(frame), body_of(frame, rng))
                self.frames.append((name, item))
        self.sequences = [
            [Item(f.header.type, f.control, f.payload, f.header.stream, f.header.more)
             for f in split(data)]
            for data in recorded
        ]  # fmt: skip

    def pick(self, rng: random.Random, *, opener: int) -> list[Item]:
        """Return a few frames as a peer may send them, one behind the other.

        ``opener`` is the lowest stream that the peer may open.
        """
        if self.sequences and rng.random() < 0.4:
            sequence = one_of(self.sequences, rng)
            start = rng.randrange(len(sequence))
            return sequence[start : start + rng.randrange(1, 5)]
        next_stream, items = opener, []
        for _ in range(one_of((1, 1, 2, 3, 4), rng)):
            name, item = one_of(self.frames, rng)
            if name in OPENING:
                items.append(item._replace(stream=next_stream))
                next_stream += 2
            elif name in OF_THE_LINK:
                items.append(item)
            else:
                items.append(item._replace(stream=rng.randrange(1, next_stream + 4)))
        return items

    def conversation(self, rng: random.Random) -> list[Item]:
        """Return much of what one side has said on a link, if that was recorded."""
        talks = [items for items in self.sequences if len(items) > _TALK]
        if not talks:
            return []
        items = one_of(talks, rng)
        start = max(_GREETING, rng.randrange(len(items)))
        return items[start : start + rng.randrange(1, _TALK)]

    def hostile(self, rng: random.Random, *, opener: int) -> bytes:
        """Return bytes that begin as those of a peer, and go wrong somewhere."""
        if rng.random() < 0.02:
            return rng.randbytes(rng.randrange(200))
        items = self.pick(rng, opener=opener)
        for _ in range(one_of((0, 1, 1, 1, 2, 3), rng)):
            if items:
                change_items(items, rng)
        data = join(items)
        for _ in range(one_of((0, 0, 0, 1, 2), rng)):
            data = change_bytes(data, rng)
        return data
