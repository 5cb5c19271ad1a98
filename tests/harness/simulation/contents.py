"""What entries hold: a function of their number, so that any byte can be checked."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping
from typing import Any, Final

import numpy
import torch

from asynckv import KVEntry, TensorSpec
from asynckv.tensors.views import bytes_of, empty_tensor

__all__ = (
    "Contents",
    "Library",
    "Wanted",
    "by_field",
    "scribble",
    "wrong_bytes",
)

_NOISE: Final = numpy.random.default_rng(20_240_601).bytes(2**21)
_PRIMES: Final = (611_953, 15_485_863)
_NUMBER: Final = "extras.number"
_FAMILIES: Final = 4
_FIRST_UNIQUE_TOKEN: Final = 1000


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What a select asks for."""

    tokens: tuple[int, ...] | None = None
    entry_id: str | None = None
    match: str = "prefix"
    min_matched_tokens: int = 1

    def matched(self, contents: Contents) -> int | None:
        """Return the matched tokens if ``contents`` are what is asked for."""
        if self.entry_id is not None and self.entry_id != contents.entry_id:
            return None
        if self.tokens is None:
            return 0
        ours, theirs = self.tokens, contents.key
        agree = min(len(ours), len(theirs))
        if not agree or ours[:agree] != theirs[:agree]:
            return None
        if self.match == "exact":
            return agree if len(ours) == len(theirs) else None
        return agree if agree >= self.min_matched_tokens else None

    def __str__(self) -> str:
        parts = ["any" if self.tokens is None else f"{list(self.tokens)}"]
        if self.match == "exact":
            parts.append("exactly")
        if self.min_matched_tokens > 1:
            parts.append(f"at least {self.min_matched_tokens}")
        if self.entry_id is not None:
            parts.append(f"of id {self.entry_id}")
        return " ".join(parts)


@dataclasses.dataclass(frozen=True)
class Contents:
    """One entry as it was inserted. ``entry_id`` is empty if the buffer chooses."""

    number: int
    entry_id: str
    tokens: tuple[int, ...]
    roi: tuple[int, ...] | None
    specs: Mapping[str, TensorSpec]
    ttl_s: float | None = None
    deliveries: int = 1

    @property
    def key(self) -> tuple[int, ...]:
        """The selected tokens."""
        if self.roi is None:
            return self.tokens
        pairs = zip(self.tokens, self.roi, strict=True)
        return tuple(token for token, selected in pairs if selected)

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(spec.nbytes for spec in self.specs.values())

    @property
    def is_small(self) -> bool:
        """Whether it rides with its frame."""
        return self.nbytes <= 64 * 1024

    def expected(self, name: str) -> bytes:
        """Return the bytes of one tensor."""
        if name == _NUMBER:
            return self.number.to_bytes(8, "little")
        nbytes = self.specs[name].nbytes
        index = list(self.specs).index(name)
        start = self.number * _PRIMES[0] + index * _PRIMES[1]
        start %= len(_NOISE) - nbytes
        return _NOISE[start : start + nbytes]

    def tensor(self, name: str) -> torch.Tensor:
        """Return one tensor, in memory of its own."""
        spec = self.specs[name]
        tensor = empty_tensor(spec)
        bytes_of(tensor)[:] = self.expected(name)
        return tensor

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all its tensors by name."""
        return {name: self.tensor(name) for name in self.specs}


class Library:
    """Every content that was ever inserted, by its number."""

    def __init__(self) -> None:
        self.all: list[Contents] = []

    def new(self, chance: random.Random, *, streaming: bool = False) -> Contents:
        """Make up the next entry."""
        number = len(self.all) + 1
        tokens = _draw_tokens(chance, number)
        contents = Contents(
            number=number,
            entry_id=f"e{number}" if streaming or chance.random() < 0.8 else "",
            tokens=tokens,
            roi=_draw_roi(chance, tokens),
            specs=_draw_specs(chance),
            ttl_s=chance.choice((600.0, None, None, None, None, 2.0)),
            deliveries=chance.choice((1, 1, 1, 1, 2, 3)),
        )
        self.all.append(contents)
        return contents

    def find(self, tensor: object) -> Contents | None:
        """Return whose number this tensor is."""
        if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.int64:
            return None
        number = int(tensor.item()) if tensor.numel() == 1 else 0
        return self.all[number - 1] if 0 < number <= len(self.all) else None

    def find_by_id(self, entry_id: str) -> Contents | None:
        """Return the entry that was given this id by whoever inserted it."""
        if not entry_id.startswith("e") or not entry_id[1:].isdigit():
            return None
        return self.all[int(entry_id[1:]) - 1]

    def wrong_entry(self, entry: KVEntry) -> tuple[Contents | None, str]:
        """Return which entry this is, and what is wrong with it, if anything."""
        contents = self.find(entry.extras.get("number"))
        if contents is None:
            return None, "holds no number of an entry"
        if contents.entry_id and entry.entry_id != contents.entry_id:
            return contents, f"has the id {entry.entry_id}, not {contents.entry_id}"
        if _listed(entry.input_tokens) != contents.tokens:
            return contents, "has other tokens than were inserted"
        if _listed(entry.roi) != contents.roi:
            return contents, "has another roi than was inserted"
        found = _by_name(entry)
        if set(found) != set(contents.specs):
            return contents, f"has the tensors {', '.join(found)}"
        for name, tensor in found.items():
            if wrong := wrong_bytes(contents, name, tensor):
                return contents, wrong
        return contents, ""


def wrong_bytes(contents: Contents, name: str, tensor: torch.Tensor) -> str:
    """Say what is wrong with one tensor of an entry, if anything."""
    spec = contents.specs[name]
    if (tuple(tensor.shape), str(tensor.dtype)) != (spec.shape, f"torch.{spec.dtype}"):
        return f"{name} is {tensor.dtype} {tuple(tensor.shape)}"
    if bytes(bytes_of(tensor)) != contents.expected(name):
        return f"{name} has other bytes than were inserted"
    return ""


def by_field(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return tensors as the arguments of ``insert``."""
    fields: dict[str, Any] = {"key": {}, "value": {}, "hidden": None, "extras": {}}
    for name, tensor in tensors.items():
        first, _, last = name.partition(".")
        if first == "extras":
            fields["extras"][last] = tensor
        elif last:
            fields[last][first] = tensor
        else:
            fields[first] = tensor
    return fields


def scribble(tensors: Mapping[str, torch.Tensor]) -> None:
    """Overwrite memory that is its owner's again."""
    for tensor in tensors.values():
        bytes_of(tensor)[:] = b"\xa5" * tensor.nbytes


def _draw_tokens(chance: random.Random, number: int) -> tuple[int, ...]:
    tokens = [1 + chance.randrange(_FAMILIES)]
    while chance.random() < 0.6 and len(tokens) < 6:
        tokens.append(10 + chance.randrange(2))
    if chance.random() < 0.6:
        tokens.append(_FIRST_UNIQUE_TOKEN + number)
    return tuple(tokens)


def _draw_roi(chance: random.Random, tokens: tuple[int, ...]) -> tuple[int, ...] | None:
    if chance.random() < 0.8:
        return None
    return (1, *(chance.randint(0, 1) for _ in tokens[1:]))


def _draw_specs(chance: random.Random) -> dict[str, TensorSpec]:
    specs = {_NUMBER: TensorSpec((), "int64")}
    if chance.random() < 0.5:
        rows = chance.choice((1, 8, 64))
        specs["key"] = TensorSpec((rows, 16), "float16")
        specs["hidden"] = TensorSpec((chance.randrange(200),), "uint8")
        return specs
    for layer in range(chance.randint(1, 3)):
        rows = chance.randint(50, 160)
        specs[f"layer{layer}.key"] = TensorSpec((rows, 64), "bfloat16")
        specs[f"layer{layer}.value"] = TensorSpec((rows, 64), "float32")
    specs["hidden"] = TensorSpec((chance.randint(50_000, 70_000),), "uint8")
    return specs


def _listed(tensor: torch.Tensor | None) -> tuple[int, ...] | None:
    return None if tensor is None else tuple(tensor.tolist())


def _by_name(entry: KVEntry) -> dict[str, torch.Tensor]:
    found = {f"extras.{name}": tensor for name, tensor in entry.extras.items()}
    for field in ("key", "value"):
        part = getattr(entry, field)
        if isinstance(part, torch.Tensor):
            found[field] = part
        elif part is not None:
            found |= {f"{layer}.{field}": tensor for layer, tensor in part.items()}
    if entry.hidden is not None:
        found["hidden"] = entry.hidden
    return found
