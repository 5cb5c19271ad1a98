"""What the checks share: bytes to move, and how to say what was expected."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Awaitable, Iterator
from typing import Final, TypeVar

import numpy
import torch

from asynckv.tensors.views import bytes_of
from asynckv.testing.cancellation import CancelMode

__all__ = (
    "CANCEL_MODES",
    "expect",
    "expect_error",
    "expect_same",
    "is_same",
    "naming",
    "noise",
    "only",
)

_E = TypeVar("_E", bound=BaseException)

CANCEL_MODES: Final[tuple[CancelMode, ...]] = ("task", "scope", "completion")
"""Every way to cancel."""


def noise(nbytes: int, seed: int) -> torch.Tensor:
    """Return ``nbytes`` of uint8; no run of them is like another."""
    return _pattern(nbytes, seed).clone()


@functools.lru_cache(maxsize=64)
def _pattern(nbytes: int, seed: int) -> torch.Tensor:
    values = torch.arange(seed, seed + nbytes, dtype=torch.int64)
    return ((values * 2654435761) >> 13).to(torch.uint8)


def is_same(found: torch.Tensor | None, expected: torch.Tensor) -> bool:
    """Whether dtype, shape and every byte are those expected."""
    dense = expected.cpu().resolve_conj().resolve_neg().contiguous()
    if found is None or (found.dtype, found.shape) != (dense.dtype, dense.shape):
        return False
    if not found.is_cpu:  # as bytes: torch warns of any new memory of complex32
        found = found.contiguous().reshape(-1).view(torch.uint8).cpu()
    return numpy.array_equal(bytes_of(found), bytes_of(dense))


def only(tensor: object) -> torch.Tensor:
    """Return what an entry has in place of one tensor: no mapping, and not nothing.

    :raises AssertionError: it is not so
    """
    if not isinstance(tensor, torch.Tensor):
        raise AssertionError(f"expected a tensor, found {type(tensor).__name__}")
    return tensor


def expect(is_so: bool, otherwise: object) -> None:
    """Say what is wrong if it is not so.

    :raises AssertionError: it is not so
    """
    if not is_so:
        raise AssertionError(str(otherwise))


def expect_same(found: torch.Tensor | None, expected: torch.Tensor) -> None:
    """As :func:`is_same`.

    :raises AssertionError: it is not so
    """
    if not is_same(found, expected):
        what = "None" if found is None else f"{found.dtype} {tuple(found.shape)}"
        raise AssertionError(
            f"expected a {expected.dtype} {tuple(expected.shape)} with its bytes, "
            f"found {what}"
        )


async def expect_error(kind: type[_E], call: Awaitable[object]) -> _E:
    """Return the error of that kind that ``call`` ends with.

    :raises AssertionError: it does not fail
    """
    try:
        await call
    except kind as exc:
        return exc
    raise AssertionError(f"{kind.__name__} was expected, and nothing was raised")


@contextlib.contextmanager
def naming(check: object) -> Iterator[None]:
    """Note in whatever error comes out of the block which check it was."""
    try:
        yield
    except Exception as exc:
        exc.add_note(f"in {getattr(check, '__name__', check)}")
        raise
