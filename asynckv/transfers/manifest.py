"""An entry as the body of a frame: what it holds, its tokens, its small tensors.

Its tensors are named ``key``, ``LAYER.key``, ``extras.NAME``. One model's entries often
have one layout, so the last few that were made here, or read and checked, are kept.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Final, TypeAlias

import msgspec
import torch

from asynckv.abc import KVSource, KVTensors
from asynckv.errors import ChecksumError, EntryTooLarge, RemoteProtocolError
from asynckv.observability.lines import as_line
from asynckv.protocol.values import MAX_TENSORS, Contents, NamedSpecs, Place
from asynckv.protocol.wire import digest_of
from asynckv.tensors.blocks import KVMemory
from asynckv.tensors.views import MISSING_DTYPES, dtype_of
from asynckv.transfers.tokens import Tokens, as_text
from asynckv.types import TensorSpec

__all__ = (
    "INLINE_NBYTES",
    "Layout",
    "Manifest",
    "check_body",
    "check_dtypes",
    "check_names",
    "content_digest",
    "flatten",
    "layout_of",
    "names_in",
    "pack",
    "read_layout",
    "unflatten",
    "unpack",
    "unpack_mapped",
    "verify",
    "verify_inline",
)

_NAMES_SHOWN: Final = 16

_KEPT_TENSORS: Final = 512
"""Layouts of more tensors are made anew each time."""

_KEPT_LAYOUTS: Final = 16
"""Of those made here: of 512 tensors each they take some 4 MiB, with usual names."""

_SHORT_NBYTES, _LONG_NBYTES = 512, 16 * 1024
"""Peers choose what is kept: 64 short layouts and four long ones.

They are 96 KiB as encoded; the objects made of them take up to some 2 MiB.
"""

_encode: Final = msgspec.msgpack.Encoder().encode
_decode_specs: Final = msgspec.msgpack.Decoder[NamedSpecs](NamedSpecs).decode


class Layout(msgspec.Struct, frozen=True):
    """Names, shapes and dtypes of an entry's tensors. Shared: nothing changes it."""

    specs: Mapping[str, TensorSpec]
    sizes: tuple[int, ...]
    nbytes: int
    """Bytes of the tensors, without tokens and roi."""
    encoded: bytes
    """As a peer is told it."""
    by_name: tuple[int, ...]
    """The order that no order of arguments changes: what is hashed."""
    encoded_by_name: bytes


def layout_of(specs: Mapping[str, TensorSpec]) -> Layout:
    """Return the layout of these tensors, whose names were checked."""
    named = tuple(specs.items())
    return _kept_layout(named) if len(named) <= _KEPT_TENSORS else _make_layout(named)


def read_layout(encoded: bytes) -> Layout:
    """Read what a peer says of an entry's tensors, and check all of it.

    :raises msgspec.MsgspecError: it is none, or too long
    :raises ValueError: a name, a dtype or a shape is none, or a name comes twice
    """
    if len(encoded) <= _SHORT_NBYTES:
        return _read_short(encoded)
    return (_read_long if len(encoded) <= _LONG_NBYTES else _read)(encoded)


def _make_layout(named: NamedSpecs) -> Layout:
    specs = dict(named)
    sizes = tuple(spec.nbytes for spec in specs.values())
    by_name = sorted(range(len(named)), key=lambda place: named[place][0])
    return Layout(
        MappingProxyType(specs),
        sizes,
        sum(sizes),
        encoded=_encode(named),
        by_name=tuple(by_name),
        encoded_by_name=_encode([named[place] for place in by_name]),
    )


def _read(encoded: bytes) -> Layout:
    named = _decode_specs(encoded)
    if len(dict(named)) != len(named):
        raise ValueError("it names a tensor twice")
    _check_names([name for name, _ in named])
    check_dtypes(spec for _, spec in named)
    return _make_layout(named)


# What raises is not kept, and raises each time.
_kept_layout = lru_cache(maxsize=_KEPT_LAYOUTS)(_make_layout)
_read_short = lru_cache(maxsize=64)(_read)
_read_long = lru_cache(maxsize=4)(_read)


def check_dtypes(specs: Iterable[TensorSpec | None]) -> None:
    """Refuse what this process's torch has no dtype for. ``None`` is of no tensor.

    :raises ValueError: there is one
    """
    if MISSING_DTYPES:
        for spec in specs:
            if spec is not None:
                dtype_of(spec.dtype)


_WHOLE = ("key", "value", "hidden")
_EXTRAS = "extras."


def flatten(
    key: KVSource,
    value: KVSource,
    hidden: KVMemory | None,
    extras: Mapping[str, KVMemory] | None,
) -> dict[str, KVMemory]:
    """Name every tensor of an entry.

    :raises TypeError: if one of them is no tensor, or a layer's name no text
    :raises ValueError: if a layer's name makes its tensors ambiguous
    """
    named: dict[str, KVMemory] = {}
    for field, tensors in (("key", key), ("value", value)):
        if isinstance(tensors, Mapping):
            for layer in tensors:
                _check_layer(layer)
            named.update({f"{layer}.{field}": t for layer, t in tensors.items()})
        elif tensors is not None:
            named[field] = tensors
    if hidden is not None:
        named["hidden"] = hidden
    if extras is not None:
        if not isinstance(extras, Mapping):
            raise TypeError(
                f"extras maps names to tensors; it is a {type(extras).__name__}"
            )
        for name, tensor in extras.items():
            named[_EXTRAS + as_text(name, "an extra's name")] = tensor
    for name, tensor in named.items():
        if not isinstance(tensor, KVMemory):
            raise TypeError(
                f"{name} is a {type(tensor).__name__}, not a tensor: pass a torch "
                "tensor or KVBlocks; layers as {name: tensor}"
            )
    check_names(named)
    return named


def check_names(names: Iterable[str]) -> None:
    """Refuse names that no entry can have.

    :raises TypeError: one is no str
    :raises ValueError: UTF-8 has no bytes for one, or it is none of ``key``,
        ``value``, ``hidden``, ``LAYER.key``, ``LAYER.value``, ``extras.NAME``, or
        both a whole tensor and a layer's are named
    """
    some = tuple(names)
    (_check_kept if len(some) <= _KEPT_TENSORS else _check_names)(some)


def _check_names(names: Sequence[str]) -> None:
    if len(names) > MAX_TENSORS:
        raise ValueError(f"an entry has at most {MAX_TENSORS} tensors")
    whole: set[str] = set()
    layered: set[str] = set()
    for name in names:
        if name in _WHOLE:
            whole.add(name)
            continue
        name = as_text(name, "a tensor's name")
        if len(name) > 512:
            raise ValueError(f"the name {name[:40]!r}... is longer than 512 characters")
        if name.startswith(_EXTRAS):
            continue
        layer, _, field = name.rpartition(".")
        if not layer or field not in ("key", "value"):
            raise ValueError(
                f"{name!r} is no tensor's name; write key, value, hidden, "
                "LAYER.key, LAYER.value or extras.NAME"
            )
        layered.add(field)
    if both := whole & layered:
        raise ValueError(f"{min(both)} is either one tensor or one a layer, not both")


_check_kept = lru_cache(maxsize=_KEPT_LAYOUTS)(_check_names)


def unflatten(
    named: Iterable[tuple[str, torch.Tensor]],
) -> tuple[KVTensors, KVTensors, torch.Tensor | None, dict[str, torch.Tensor]]:
    """Put named tensors back in their fields: key, value, hidden, extras."""
    key = value = hidden = None
    keys: dict[str, torch.Tensor] = {}
    values: dict[str, torch.Tensor] = {}
    extras: dict[str, torch.Tensor] = {}
    for name, tensor in named:
        if name == "key":
            key = tensor
        elif name == "value":
            value = tensor
        elif name == "hidden":
            hidden = tensor
        elif name.startswith(_EXTRAS):
            extras[name.removeprefix(_EXTRAS)] = tensor
        elif name.endswith(".key"):
            keys[name.removesuffix(".key")] = tensor
        elif name.endswith(".value"):
            values[name.removesuffix(".value")] = tensor
    return keys or key, values or value, hidden, extras


def _check_layer(layer: object) -> None:
    if not isinstance(layer, str):
        raise TypeError(f"a layer's name is text, not {layer!r}: write {str(layer)!r}")
    if f"{layer}.".startswith(_EXTRAS):
        raise ValueError(f"a layer called {layer!r} cannot be told from the extras")


def names_in(names: Collection[str]) -> str:
    """Return the first names for a message, and how many there are beside them."""
    first, rest = list(names)[:_NAMES_SHOWN], len(names) - _NAMES_SHOWN
    return ", ".join(first) + (f" and {rest:,} more" if rest > 0 else "")


INLINE_NBYTES: Final = 64 * 1024
"""Tensors of so many bytes in all ride with their frame."""

_LENGTH_NBYTES: Final = 4
_FEW_NBYTES: Final = 1024
_decode_contents: Final = msgspec.msgpack.Decoder(Contents).decode
_decode_places: Final = msgspec.msgpack.Decoder(tuple[Place | None, ...]).decode


class Manifest(msgspec.Struct, frozen=True, gc=False):
    """A body, read: layout, tokens, and the tensors' bytes if they rode along.

    Of each tensor in the layout there is a digest, which is empty if it is not known.
    """

    layout: Layout
    digests: tuple[bytes, ...]
    input_tokens: Tokens | None
    roi: Tokens | None
    inline: Sequence[memoryview]


def pack(
    layout: Layout,
    digests: Sequence[bytes],
    input_tokens: Tokens | None,
    roi: Tokens | None,
    inline: Iterable[memoryview] = (),
    *,
    by_name: bool = False,
) -> bytes:
    """Return the body of an entry; its tensors' digests may be in order of names."""
    contents = _encode(
        Contents(
            layout.encoded_by_name if by_name else layout.encoded,
            tuple(digests),
            None if input_tokens is None else input_tokens.spec,
            None if roi is None else roi.spec,
        )
    )
    length = len(contents).to_bytes(_LENGTH_NBYTES, "big")
    token_bytes = b"" if input_tokens is None else input_tokens.data
    roi_bytes = b"" if roi is None else roi.data
    return b"".join((length, contents, token_bytes, roi_bytes, *inline))


def check_body(max_body_bytes: int, body: bytes) -> None:
    """Refuse a body that the link cannot carry.

    :raises EntryTooLarge: tokens, roi and names are longer than that
    """
    if len(body) > max_body_bytes:
        raise EntryTooLarge(
            nbytes=len(body),
            max_bytes=max_body_bytes,
            hint="tokens, roi and names of an entry ride in one frame",
        )


def unpack(body: bytes, *, inline: bool) -> Manifest:
    """Read a body that a peer sent.

    :raises RemoteProtocolError: if it is not exactly what it says
    """
    layout, digests, tokens, roi, end = _read_head(body)
    pieces = _read_pieces(body, end, layout.sizes if inline else ())
    return Manifest(layout, digests, tokens, roi, pieces)


def unpack_mapped(
    body: bytes, nbytes: int, *, inline: bool = True
) -> tuple[Manifest, Sequence[Place | None]]:
    """Read a body that says, in ``nbytes``, where its tensors lie; nothing is checked.

    Those that lie nowhere are the manifest's ``inline`` ones, if they came along.

    :raises RemoteProtocolError: if it is not exactly what it says
    """
    layout, digests, tokens, roi, end = _read_head(body)
    try:
        places = _decode_places(body[end : end + nbytes])
    except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
        raise RemoteProtocolError(f"an offer's places are broken: {exc}") from exc
    sizes = layout.sizes
    if len(places) != len(sizes):
        raise RemoteProtocolError(f"{len(places)} places for {len(sizes)} tensors")
    others = [n for n, place in zip(sizes, places, strict=True) if place is None]
    pieces = _read_pieces(body, end + nbytes, others if inline else ())
    return Manifest(layout, digests, tokens, roi, pieces), places


_Head: TypeAlias = tuple[Layout, tuple[bytes, ...], Tokens | None, Tokens | None, int]


def _read_head(body: bytes) -> _Head:
    end = _LENGTH_NBYTES + int.from_bytes(body[:_LENGTH_NBYTES], "big")
    try:
        contents = _decode_contents(body[_LENGTH_NBYTES:end])
        layout = read_layout(contents.layout)
        check_dtypes((contents.input_tokens, contents.roi))
    except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
        raise RemoteProtocolError(f"an entry's manifest is broken: {exc}") from exc
    digests = contents.digests
    if len(digests) != len(layout.sizes):
        raise RemoteProtocolError(
            f"{len(digests)} digests for {len(layout.sizes)} tensors"
        )
    tokens = roi = None
    if (spec := contents.input_tokens) is not None:
        start, end = end, end + spec.nbytes
        tokens = Tokens(body[start:end], spec)
    if (spec := contents.roi) is not None:
        start, end = end, end + spec.nbytes
        roi = Tokens(body[start:end], spec)
    return layout, digests, tokens, roi, end


def _read_pieces(body: bytes, end: int, sizes: Sequence[int]) -> list[memoryview]:
    """Return the bytes of tensors of these sizes, which end the body."""
    pieces: list[memoryview] = []
    if sizes:
        begin, view = end, memoryview(body)[end:]
        if begin > _FEW_NBYTES:  # who keeps a tensor shall not keep the tokens twice
            view = memoryview(bytes(view))
        for nbytes in sizes:
            start, end = end, end + nbytes
            pieces.append(view[start - begin : end - begin])
    if end != len(body):
        raise RemoteProtocolError(
            f"an entry's body holds {len(body)} bytes, its manifest says {end}"
        )
    return pieces


def content_digest(
    layout: Layout,
    digests: Sequence[bytes],
    input_tokens: Tokens | None,
    roi: Tokens | None,
    packed: bytes | None = None,
) -> bytes:
    """Return the digest of a whole entry: layout, digests, tokens and roi.

    The order of its tensors does not matter: names are unique in an entry. ``packed``
    is all that in their order, if it is at hand: of one there is nothing to sort.
    """
    if packed is None or len(digests) > 1:
        digests = [digests[place] for place in layout.by_name]
        packed = pack(layout, digests, input_tokens, roi, by_name=True)
    return digest_of(packed)


def verify(name: str, digest: bytes, found: bytes) -> None:
    """Compare the digest of what arrived with what was announced.

    Empty digests mean that the link carries none.

    :raises ChecksumError: they differ
    """
    if digest and digest != found:
        raise ChecksumError(
            f"{as_line(name)} arrived with other bytes than were sent",
            hint="the delivery was refused; nothing of it was used",
        )


def verify_inline(manifest: Manifest) -> list[bytes]:
    """Digest what rode along, and verify it.

    :raises ChecksumError: some bytes changed on their way
    """
    found: list[bytes] = []
    every = zip(manifest.layout.specs, manifest.digests, manifest.inline, strict=True)
    for name, digest, piece in every:
        found.append(digest_of(piece))
        verify(name, digest, found[-1])
    return found
