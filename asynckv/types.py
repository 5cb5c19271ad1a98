"""Values that every floor shares. No torch, no I/O."""

from __future__ import annotations

import functools
import math
import operator
import re
from collections.abc import Iterable, Mapping
from typing import Final, SupportsIndex

import msgspec

__all__ = (
    "DTYPE_NBYTES",
    "MAX_TENSOR_DIMENSIONS",
    "KVFingerprint",
    "TensorSpec",
    "as_count",
    "as_flag",
    "as_seconds",
    "as_timeout",
    "parse_bytes",
)

MAX_TENSOR_DIMENSIONS: Final = 14
"""As many dimensions as the original pipe could describe."""

DTYPE_NBYTES: Final[dict[str, int]] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "uint32": 4,
    "int32": 4,
    "uint64": 8,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
}
"""Bytes an element, by torch's name of the dtype: all that may cross a wire."""

_MAX_NBYTES: Final = 2**48
_MOST_BYTES: Final = 2**63 - 1
"""What a machine can count of them, whatever somebody writes."""
_NO_BOUND: Final = 2**62
"""The most that a peer can be told, and more than anybody has."""

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]*)?(?:[eE][0-9]+)?)\s*([kKmMgGtT]i?)?[bB]?")
_FACTORS: Final = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}


def parse_bytes(size: int | float | str) -> int:
    """Turn ``1073741824``, ``1e9``, ``"2GiB"``, ``"1 GB"`` or ``"1e9"`` into bytes.

    ``sys.maxsize``, or any size above 2**62, is 2**62: as good as no bound.

    :raises ValueError: if it is no size, negative, no whole number of bytes, or none
        that a machine can have
    """
    if isinstance(size, str):
        match = _SIZE.fullmatch(size.strip())
        if match is None:
            raise ValueError(f"{size!r} is not a size; write 1048576, '64MiB' or '2GB'")
        unit = (match[2] or "").lower()
        size = float(match[1]) * _FACTORS[unit]
        if unit and math.isfinite(size):
            size = math.floor(size)  # of 0.1 KiB nobody means the fraction of a byte
    is_number = isinstance(size, int | float) and not isinstance(size, bool)
    if not is_number or not 0 <= size <= _MOST_BYTES:  # NaN is neither
        raise ValueError(f"{f'{size!r}':.40} is not a number of bytes")
    if size != int(size):
        raise ValueError(f"{size!r} is not a whole number of bytes")
    return min(int(size), _NO_BOUND)


_MAX_COUNT: Final = 2**31


def as_count(value: object, name: str, *, least: int = 1) -> int:
    """Return a number from ``least`` on, of any type of whole numbers but ``bool``.

    :raises TypeError: it is no whole number
    :raises ValueError: it is below ``least``, or above 2**31
    """
    if type(value) is not int:
        value = _whole_number(value, name)
    if not least <= value <= _MAX_COUNT:
        raise ValueError(f"{name} is at least {least}, and at most 2**31")
    return value


def as_flag(value: object, name: str) -> bool:
    """Return ``True`` or ``False``, and nothing that is merely true or false.

    :raises TypeError: it is no ``bool``
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name} is True or False, not {value!r:.40}")
    return value


def as_seconds(value: object, name: str) -> float | None:
    """Return a time, ``None`` for no end.

    :raises TypeError: it is no number
    :raises ValueError: it is negative, or not finite
    """
    if value is None or (type(value) is float and 0 <= value < math.inf):
        return value
    seconds = as_timeout(value, name)
    if seconds == math.inf:
        raise ValueError(f"{name} is finite; None means no end")
    return seconds


def as_timeout(value: object, name: str) -> float:
    """Return how long something may take, ``math.inf`` for no end.

    :raises TypeError: it is no number
    :raises ValueError: it is negative, or NaN
    """
    if isinstance(value, bool | str | bytes) or not hasattr(value, "__float__"):
        raise TypeError(f"{name} is a number of seconds, not {value!r:.40}")
    try:
        seconds = float(value)
    except OverflowError:
        seconds = math.inf
    except (TypeError, ValueError, RuntimeError) as exc:
        raise TypeError(f"{name} is a number of seconds, not {value!r:.40}") from exc
    if not seconds >= 0:  # NaN is not
        raise ValueError(f"{name} is a number of seconds from 0 on, not {seconds:g}")
    return seconds


def _whole_number(value: object, name: str) -> int:
    # Of torch and numpy, too, which are not imported here.
    is_bool = str(getattr(value, "dtype", type(value).__name__)).endswith("bool")
    if not is_bool and hasattr(value, "__index__"):
        try:
            return operator.index(value)
        except (TypeError, RuntimeError):  # a tensor of several, or of none here
            pass
    raise TypeError(f"{name} is a whole number, not {value!r:.40}")


class TensorSpec(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Shape and dtype of a tensor that is still to come.

    ``dtype`` is torch's name of it (``"bfloat16"``); ``torch.bfloat16`` itself
    is accepted too and turned into its name.

    :raises ValueError: if the dtype is unknown, a dimension is negative, there are
        more than 14 dimensions, or no tensor can be as large
    :raises TypeError: if the shape is no sequence of whole numbers
    """

    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        if type(self.dtype) is not str or self.dtype not in DTYPE_NBYTES:
            name = str(self.dtype).removeprefix("torch.")
            msgspec.structs.force_setattr(self, "dtype", name)
        if type(self.shape) is not tuple or not _INT.issuperset(map(type, self.shape)):
            msgspec.structs.force_setattr(self, "shape", _whole(self.shape))
        _checked_nbytes(self.shape, self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's elements, densely packed."""
        return math.prod(self.shape) * DTYPE_NBYTES[self.dtype]


_INT: Final = frozenset({int})


def _whole(shape: Iterable[SupportsIndex]) -> tuple[int, ...]:
    try:
        found = tuple(shape)
        if bool in map(type, found):
            raise TypeError("a bool is no dimension")
        return tuple(operator.index(dimension) for dimension in found)
    except TypeError as exc:
        raise TypeError(
            f"a shape is a sequence of whole numbers, not {shape!r:.60}"
        ) from exc


@functools.lru_cache(maxsize=4096)
def _checked_nbytes(shape: tuple[int, ...], dtype: str) -> int:
    if dtype not in DTYPE_NBYTES:
        raise ValueError(f"dtype {dtype!r} cannot be sent")
    if len(shape) > MAX_TENSOR_DIMENSIONS:
        raise ValueError(
            f"{len(shape)} dimensions; a tensor may have at most "
            f"{MAX_TENSOR_DIMENSIONS}: reshape it before sending"
        )
    if any(dimension < 0 for dimension in shape):
        raise ValueError(f"negative dimension in {shape}")
    nbytes = math.prod(shape) * DTYPE_NBYTES[dtype]
    if nbytes > _MAX_NBYTES:
        raise ValueError(f"a tensor of {nbytes} bytes cannot be sent")
    if math.prod(filter(None, shape)) * DTYPE_NBYTES[dtype] > _MOST_BYTES:
        raise ValueError(f"an empty tensor of the shape {shape} cannot be sent")
    return nbytes


class KVFingerprint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What must be equal for one side's KV to mean anything to the other.

    Every field is free text; two fingerprints are equal when all fields are.
    """

    model: str = ""
    dtype: str = ""
    layout: str = ""
    ranks: str = ""
    details: str = ""

    @classmethod
    def of(
        cls, fingerprint: KVFingerprint | Mapping[str, str] | str | None
    ) -> KVFingerprint | None:
        """Accept a fingerprint as users write it: a model's name or a mapping.

        :raises TypeError: it is none of these
        :raises ValueError: if a mapping has a key that is no field, or a field is no
            text that could be sent
        """
        if fingerprint is None:
            return None
        if isinstance(fingerprint, str):
            fields: dict[str, str] = {"model": fingerprint}
        elif isinstance(fingerprint, Mapping):
            fields = dict(fingerprint)
        elif isinstance(fingerprint, KVFingerprint):
            fields = msgspec.structs.asdict(fingerprint)
        else:
            raise TypeError(
                "a fingerprint is a model's name, a mapping or a KVFingerprint, not "
                f"{fingerprint!r:.40}"
            )
        try:
            read = msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=cls)
        except (TypeError, ValueError, OverflowError) as exc:
            raise ValueError(f"not a fingerprint: {exc}") from exc
        return fingerprint if isinstance(fingerprint, KVFingerprint) else read

    def as_text(self) -> str:
        """Return it as ``--fingerprint`` takes it: a model's name, or JSON."""
        fields = msgspec.structs.asdict(self)
        said = {name: text for name, text in fields.items() if text}
        if said.keys() == {"model"} and not self.model.startswith("{"):
            return self.model
        return msgspec.json.encode(said).decode()

    def difference(self, other: KVFingerprint) -> str | None:
        """Name the first field that differs, or ``None`` if they are equal."""
        for field in self.__struct_fields__:
            if getattr(self, field) != getattr(other, field):
                return field
        return None
