"""Valid values of any wire type, made up from what its annotations allow.

So a frame that is added tomorrow is fuzzed tomorrow.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import msgspec
import msgspec.inspect as inspect

from asynckv.protocol.frames import Frame
from asynckv.protocol.values import Contents
from asynckv.transfers.manifest import layout_of
from asynckv.types import DTYPE_NBYTES, MAX_TENSOR_DIMENSIONS, TensorSpec

__all__ = ("Maker", "frame_makers", "make_spec", "sample_contents")

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
