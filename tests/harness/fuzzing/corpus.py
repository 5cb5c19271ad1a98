"""Frames to start from, and what is asked of every input that is made of them.

Valid values of any wire type are made up from what its annotations allow: so a frame
that is added tomorrow is fuzzed tomorrow.
"""

from __future__ import annotations

import itertools
import random
import tracemalloc
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec
import msgspec.inspect as inspect

from asynckv.protocol.frames import Frame, OpeningFrame
from asynckv.protocol.values import Contents
from asynckv.protocol.wire import TYPE_CONTROL
from asynckv.transfers.manifest import layout_of, pack, read_layout
from asynckv.transfers.tokens import Tokens
from asynckv.types import DTYPE_NBYTES, MAX_TENSOR_DIMENSIONS, TensorSpec
from harness.fuzzing.mutations import (
    Item,
    change_bytes,
    change_items,
    join,
    one_of,
)
from harness.fuzzing.wire_frames import split

__all__ = (
    "OF_THE_LINK",
    "OPENING",
    "Corpus",
    "Finding",
    "Maker",
    "Target",
    "body_of",
    "expect",
    "frame_makers",
    "make_spec",
    "measured",
    "pieces_of",
    "sample_contents",
)


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


Maker: TypeAlias = Callable[[random.Random], Any]

_NAMES: Final = (
    ("key", "value", "hidden", "extras.logits"),
    ("layers.0.key", "layers.0.value", "hidden", "extras.logits"),
)
_DTYPES: Final = tuple(DTYPE_NBYTES)
_SMALL: Final = 70
_RARELY: Final = 0.05


def frame_makers() -> dict[str, Maker]:
    """Return what makes up frames, by the name of each class of the union."""
    union = inspect.type_info(Frame)
    if not isinstance(union, inspect.UnionType):
        raise NotImplementedError("a protocol of one frame")
    return {
        member.cls.__name__: _maker(member)
        for member in union.types
        if isinstance(member, inspect.StructType)
    }


def make_spec(rng: random.Random) -> TensorSpec:
    """Return a tensor's shape and dtype: mostly a small one, never impossible."""
    if rng.random() < _RARELY:
        count = rng.randrange(MAX_TENSOR_DIMENSIONS + 1)
        shape = tuple(rng.choice((0, 1, 2, 3)) for _ in range(count))
    else:
        shape = tuple(rng.randrange(5) for _ in range(rng.randrange(1, 4)))
    return TensorSpec(shape, rng.choice(_DTYPES))


def sample_contents(rng: random.Random) -> Contents:
    """Return the manifest of an entry that makes sense."""
    names = rng.choice(_NAMES)
    specs = {name: make_spec(rng) for name in names if rng.random() < 0.5}
    length = rng.randrange(12)
    has_tokens = rng.random() < 0.8
    return Contents(
        layout_of(specs).encoded,
        tuple(rng.randbytes(16) for _ in specs),
        TensorSpec((length,), "int64") if has_tokens else None,
        TensorSpec((length,), "bool") if has_tokens and rng.random() < 0.3 else None,
    )


def _maker(kind: Any) -> Maker:
    match kind:
        case inspect.StructType(cls=cls) if cls is TensorSpec:
            return make_spec
        case inspect.StructType():
            return _struct_maker(kind)
        case inspect.UnionType(types=types):
            makers = [_maker(member) for member in types]
            return lambda rng: rng.choice(makers)(rng)
        case inspect.LiteralType(values=values):
            return lambda rng: rng.choice(values)
        case inspect.VarTupleType(item_type=item, max_length=longest):
            return _tuple_maker(_maker(item), longest)
        case inspect.TupleType(item_types=types):
            items = [_maker(item) for item in types]
            return lambda rng: tuple(item(rng) for item in items)
        case _:
            return _plain_maker(kind)


def _plain_maker(kind: Any) -> Maker:
    match kind:
        case inspect.IntType(ge=least, le=most):
            return _int_maker(least or 0, most or 2**31)
        case inspect.FloatType(ge=least):
            return lambda rng: (least or 0.0) + rng.choice((0.0, 1e-9, 0.5, 600, 1e300))
        case inspect.StrType(max_length=longest):
            return lambda rng: "".join(
                rng.choices("ab.0/ é", k=_length(rng, longest or _SMALL))
            )
        case inspect.BytesType(max_length=longest):
            return lambda rng: rng.randbytes(_length(rng, longest or _SMALL))
        case inspect.BoolType():
            return lambda rng: rng.random() < 0.5
        case inspect.NoneType():
            return lambda rng: None
    raise NotImplementedError(f"no samples of {kind}")


def _int_maker(least: int, most: int) -> Maker:
    edges = [least, least + 1, 3, 4, 5, 255, 2**16, 2**32 - 1, most - 1, most]
    allowed = [edge for edge in edges if least <= edge <= most]
    return lambda rng: rng.choice(allowed)


def _length(rng: random.Random, longest: int) -> int:
    if rng.random() < _RARELY:
        return longest
    return rng.randrange(min(longest, _SMALL) + 1)


def _tuple_maker(item: Maker, longest: int | None) -> Maker:
    def make(rng: random.Random) -> tuple[Any, ...]:
        few = rng.random() >= _RARELY
        count = rng.randrange(4) if few else min(longest or _SMALL, 4 * _SMALL)
        return tuple(item(rng) for _ in range(count))

    return make


def _struct_maker(kind: inspect.StructType) -> Maker:
    fields: Sequence[tuple[str, Maker, bool]] = [
        (field.name, _maker(field.type), field.required) for field in kind.fields
    ]

    def make(rng: random.Random) -> msgspec.Struct:
        values = {
            name: maker(rng)
            for name, maker, required in fields
            if required or rng.random() < 0.7
        }
        struct: msgspec.Struct = kind.cls(**values)
        return struct

    return make


_EDGES: Final = (1, 4, 35, 36, 37, 56)
_SHORT: Final = 160


class Finding(Exception):
    """An input for which a promise does not hold."""


class Target(NamedTuple):
    """One thing to be fuzzed.

    ``check(data)`` raises whatever is wrong: a :exc:`Finding`, or the exception
    that nobody documented. It depends on nothing but ``data``.
    """

    name: str
    make: Callable[[random.Random, Corpus], bytes]
    check: Callable[[bytes], None]


def expect(holds: bool, what: str, *details: Any) -> None:
    """Tell of a broken promise unless it ``holds``.

    :raises Finding: it does not
    """
    if not holds:
        raise Finding(f"{what}: {', '.join(f'{d!r:.300}' for d in details)}")


def pieces_of(data: bytes) -> Sequence[bytes]:
    """Cut ``data`` in pieces, always the same for the same data."""
    nbytes, noise = len(data), zlib.crc32(data)
    if nbytes <= _SHORT and noise % 16 == 0:
        return [data[i : i + 1] for i in range(nbytes)]
    cuts = {0, nbytes}
    for factor in (1, 7, 49)[: noise % 3 + 1]:
        cuts.add(noise * factor // 4 % (nbytes + 1))
    if noise & 16:
        edge = _EDGES[noise % len(_EDGES)]
        cuts |= {min(edge, nbytes), max(0, nbytes - edge)}
    return [data[a:b] for a, b in itertools.pairwise(sorted(cuts))]


def measured(check: Callable[[bytes], None], data: bytes) -> int:
    """Run ``check(data)`` and return the most bytes that it held at a time."""
    tracemalloc.start()
    try:
        check(data)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
