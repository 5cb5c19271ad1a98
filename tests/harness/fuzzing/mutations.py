"""Changes to frames and bytes, seeded: the same seed makes the same hostile input.

Frames are changed as what they are (fields, lengths, order), and then as bytes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from asynckv.protocol.wire import TYPE_CHUNK, TYPE_CONTINUATION, TYPE_CONTROL
from harness.fuzzing.wire_frames import seal

__all__ = ("Item", "change_bytes", "change_items", "change_tree", "join", "one_of")

_T = TypeVar("_T")

_INTEGERS: Final = (
    *(-(2**63), -(2**31), -2, -1, 0, 1, 2, 3, 20, 64, 255, 256, 4095, 65535, 65536),
    *(2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**48, 2**62, 2**62 + 1),
    *(2**63 - 1, 2**63, 2**64 - 1),
)
_LENGTHS: Final = (0, 1, 15, 16, 17, 32, 33, 64, 65, 256, 257, 512, 513, 2048, 2049)
_SELDOM: Final = 0.002
"""How often a long body is made: it takes as long as hundreds of short ones."""
_FLOATS: Final = (0.0, -0.0, -1.0, 1e308, float("inf"), float("-inf"), float("nan"))


def _raw(*texts: bytes) -> tuple[msgspec.Raw, ...]:
    return tuple(map(msgspec.Raw, texts))


_BOMBS: Final = _raw(
    *(b"\x91" * 300 + b"\xc0", b"\x91" * 3000 + b"\xc0", b"\x81\xa1a" * 500 + b"\xc0"),
    *(b"\xdf\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff", b"\xdd\x00\x10\x00\x00\xc0"),
    *(b"\xdb\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xc9\xff\xff\xff\xff\x01"),
    *(
        b"\xa2\xff\xfe",
        b"\xa3\xed\xa0\x80",
        b"\xc1",
        b"\xc7\x03\x01abc",
        b"\xd6\xff" * 4,
    ),
    *(b"\xd9\x01\xa0", b"\xcf" + b"\xff" * 8, b"\xd3\x80" + bytes(7), b""),
)


class Item(NamedTuple):
    """One frame of an input that is being made."""

    type: int
    control: bytes
    payload: bytes = b""
    stream: int = 0
    more: bool = False
    claims: tuple[int, int] | None = None

    def sealed(self) -> bytes:
        """Return the frame, with the checksums that fit."""
        return seal(
            self.type,
            self.control,
            self.payload,
            self.stream,
            more=self.more,
            claims=self.claims,
        )


def one_of(choices: Sequence[_T], rng: random.Random) -> _T:
    """Return one of ``choices``; in a third of the time of ``rng.choice``."""
    return choices[int(rng.random() * len(choices))]


def join(items: Sequence[Item]) -> bytes:
    """Return the frames, one behind the other."""
    return b"".join([item.sealed() for item in items])


# Bytes.


def change_bytes(data: bytes, rng: random.Random) -> bytes:
    """Return ``data`` with one change: a flip, a cut, something more or repeated."""
    if not data:
        return rng.randbytes(rng.randrange(1, 9))
    changed = bytearray(data)
    start = rng.randrange(len(data))
    end = min(len(data), start + one_of((1, 2, 4, 8, 36, 64), rng))
    match rng.randrange(9):
        case 0 | 1 | 2:
            changed[start] ^= 1 << rng.randrange(8)
        case 3:
            changed[start] = one_of((0, 1, 0x7F, 0x80, 0xC1, 0xFF), rng)
        case 4:
            del changed[start:]
        case 5:
            del changed[start:end]
        case 6:
            changed[start:start] = rng.randbytes(one_of((1, 2, 4, 36), rng))
        case 7:
            changed[start:start] = changed[start:end]
        case _:
            changed[start:end] = rng.randbytes(end - start)
    return bytes(changed)


# Fields.


def change_tree(control: bytes, rng: random.Random) -> bytes:
    """Return msgpack with one value, name or length of it changed."""
    try:
        tree = msgspec.msgpack.decode(control)
        return msgspec.msgpack.encode(_changed(tree, rng))
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError):
        return change_bytes(control, rng)


def _changed(tree: Any, rng: random.Random) -> Any:
    if isinstance(tree, dict) and tree and rng.random() < 0.9:
        return _changed_map(tree, rng)
    if isinstance(tree, list) and tree and rng.random() < 0.9:
        return _changed_list(tree, rng)
    return _hostile(tree, rng)


def _changed_map(tree: dict[Any, Any], rng: random.Random) -> dict[Any, Any]:
    keys = list(tree)
    key = one_of(keys, rng)
    choice = rng.random()
    if choice < 0.75:
        return {**tree, key: _changed(tree[key], rng)}
    if choice < 0.85:
        return {k: v for k, v in tree.items() if k != key}
    if choice < 0.93:
        return {**tree, one_of(("t", "more", 7, "", "nonce"), rng): tree[key]}
    rng.shuffle(keys)
    return {k: tree[k] for k in keys}


def _changed_list(tree: list[Any], rng: random.Random) -> list[Any]:
    index = rng.randrange(len(tree))
    choice = rng.random()
    if choice < 0.7:
        return [*tree[:index], _changed(tree[index], rng), *tree[index + 1 :]]
    if choice < 0.8:
        return tree[:index]
    if choice < 0.9:
        return [*tree, tree[index]]
    return tree * one_of((2, 20), rng)


def _hostile(value: Any, rng: random.Random) -> Any:
    choice = rng.random()
    if choice < 0.4:
        return _near(value, rng)
    if choice < 0.6:
        return one_of(_INTEGERS, rng)
    if choice < 0.75:
        return one_of(_BOMBS, rng)
    if choice < 0.85:
        return "x" * one_of(_LENGTHS, rng)
    if choice < 0.93:
        return bytes(one_of(_LENGTHS, rng))
    return one_of((None, True, False, [], {}, [[]], {"t": "get"}, *_FLOATS), rng)


def _near(value: Any, rng: random.Random) -> Any:
    """Return a value of the same type, which may well be allowed."""
    match value:
        case bool():
            return not value
        case int():
            return value + one_of((-1, 1, 8, 256), rng)
        case float():
            return one_of(_FLOATS, rng)
        case str():
            return value[: rng.randrange(len(value) + 1)] or "é" * one_of(_LENGTHS, rng)
        case bytes():
            return change_bytes(value, rng)
    return value


# Frames.


def change_items(items: list[Item], rng: random.Random) -> None:
    """Make one change to frames, or to their order."""
    index = rng.randrange(len(items))
    change = _cut_in_parts if rng.random() < _SELDOM else one_of(_CHANGES, rng)
    items[index : index + 1] = change(items[index], items, rng)


def _other_stream(item: Item, items: list[Item], rng: random.Random) -> list[Item]:
    near = item.stream + one_of((-2, -1, 1, 2, 4), rng)
    stream = one_of((near, near, 0, items[0].stream, 2**31, 2**32 - 1), rng)
    return [item._replace(stream=stream & 0xFFFFFFFF)]


def _claimed(item: Item, items: list[Item], rng: random.Random) -> list[Item]:
    lengths = [len(item.control), len(item.payload)]
    which = rng.randrange(2)
    near = lengths[which] + one_of((-1, 1, 8), rng)
    lengths[which] = one_of((near, near, 0, 4097, 65536, 65537, 2**31, 2**64 - 1), rng)
    return [item._replace(claims=(lengths[0], lengths[1]))]


def _put_off(item: Item, items: list[Item]) -> list[Item]:
    items.append(item)
    return []


def _spliced(item: Item, items: list[Item], rng: random.Random) -> list[Item]:
    other = one_of(items, rng)
    part = one_of(("control", "payload", "stream"), rng)
    return [item._replace(**{part: getattr(other, part)})]


def _cut_in_parts(item: Item, items: list[Item], rng: random.Random) -> list[Item]:
    """A body in continuations: of the right size, or of a wrong one."""
    size = one_of((65536, 65536, 65536, 65535, 1, 0), rng)
    first = item._replace(payload=bytes(size), more=True)
    last = Item(TYPE_CONTINUATION, b"", item.payload or b"end", item.stream)
    middle = last._replace(payload=bytes(size), more=True)
    return [first, *([middle] * one_of((0, 0, 1, 3), rng)), last]


_Change = Callable[[Item, list[Item], random.Random], list[Item]]
_KINDS: Final = (TYPE_CONTROL, TYPE_CONTINUATION, TYPE_CHUNK, 3, 255)
_WEIGHED: Final[tuple[tuple[int, _Change], ...]] = (
    (6, lambda one, _, rng: [one._replace(control=change_tree(one.control, rng))]),
    (3, lambda one, _, rng: [one._replace(payload=change_bytes(one.payload, rng))]),
    (2, _other_stream),
    (1, lambda one, _, rng: [one._replace(type=one_of(_KINDS, rng))]),
    (1, lambda one, _, rng: [one._replace(more=not one.more)]),
    (1, _claimed),
    (1, lambda one, _, rng: [one, one]),
    (1, lambda one, items, rng: [] if len(items) > 1 else [one]),
    (1, lambda one, items, rng: _put_off(one, items)),
    (1, _spliced),
)
_CHANGES: Final = [change for weight, change in _WEIGHED for _ in range(weight)]
