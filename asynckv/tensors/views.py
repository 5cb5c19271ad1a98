"""Tensors as bytes and bytes as tensors, without a copy. CPU memory only.

Every view keeps the memory that it shows alive.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Final, Protocol, TypeAlias

import numpy
import numpy.typing
import torch

from asynckv.errors import EntryTooLarge
from asynckv.tensors.runs import Memory
from asynckv.types import DTYPE_NBYTES, MAX_TENSOR_DIMENSIONS, TensorSpec

__all__ = (
    "MISSING_DTYPES",
    "InPlaces",
    "bytes_of",
    "check_into",
    "check_landing_place",
    "check_plain",
    "check_sendable",
    "dtype_of",
    "empty_tensor",
    "memory_of",
    "no_memory",
    "packed",
    "spec_like",
    "spec_of",
    "tensor_from",
    "tensor_in",
    "tensor_over",
)

_Bytes: TypeAlias = numpy.typing.NDArray[numpy.uint8]


class _Dtypes(dict[str, torch.dtype]):
    def __missing__(self, name: str) -> torch.dtype:
        raise ValueError(f"dtype {name!r} cannot be sent by this version of torch")


_DTYPES: Final = _Dtypes(
    {name: getattr(torch, name) for name in DTYPE_NBYTES if hasattr(torch, name)}
)
MISSING_DTYPES: Final = frozenset(DTYPE_NBYTES) - frozenset(_DTYPES)
"""What a peer may send and this version of torch does not know."""

_NAMES: Final = {dtype: name for name, dtype in _DTYPES.items()}
_NUMPY_DTYPES: Final = {
    dtype
    for name, dtype in _DTYPES.items()
    if name not in ("bfloat16", "complex32") and not name.startswith("float8")
}
"""What numpy knows too: the short way to the bytes."""


_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_PACKED: Final = {
    dtype: (name, None if dtype in _NUMPY_DTYPES else _INTEGERS[DTYPE_NBYTES[name]])
    for dtype, name in _NAMES.items()
}
"""The name of each dtype, and as what numpy sees its elements if not as they are."""

_spec_of_shape: Final = functools.lru_cache(maxsize=1024)(TensorSpec)


class _WritableWindow:
    """Memory that a buffer lends, offered to numpy as writable."""

    def __init__(self, lender: _Bytes) -> None:
        self._lender = lender
        self.__array_interface__ = {
            **lender.__array_interface__,
            "data": (lender.ctypes.data, False),
        }


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype that torch calls ``name``.

    :raises ValueError: if it cannot be sent, or this torch does not have it
    """
    return _DTYPES[name]


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    """Return shape and dtype of ``tensor``, in CPU memory or on a GPU.

    :raises ValueError: if it has no plain bytes in either
    """
    check_plain(tensor)
    if tensor.device.type not in ("cpu", "cuda"):
        raise _nowhere_to_send_from(tensor)
    name = _NAMES.get(tensor.dtype)
    return TensorSpec(tuple(tensor.shape), name or str(tensor.dtype))


def spec_like(shape: Sequence[int], dtype: torch.dtype) -> TensorSpec:
    """Return the spec of tensors of this shape and dtype.

    :raises ValueError: they cannot be sent
    """
    name = spec_of(torch.empty(0, dtype=dtype)).dtype
    return TensorSpec(tuple(shape), name)


def check_sendable(tensor: torch.Tensor) -> None:
    """Refuse what has no plain bytes in CPU memory; any strides will do.

    :raises ValueError: for sparse, quantised and nested tensors, and for
        tensors on any device but the CPU
    """
    check_plain(tensor)
    if tensor.device.type != "cpu":
        raise _nowhere_to_send_from(tensor)


def _nowhere_to_send_from(tensor: torch.Tensor) -> ValueError:
    return ValueError(f"a tensor on {tensor.device} cannot be sent: use .cpu()")


def check_plain(tensor: torch.Tensor) -> None:
    """Refuse what has no plain bytes, on whatever device; any strides will do.

    :raises ValueError: for sparse, quantised and nested tensors, and for those whose
        memory was freed
    """
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise ValueError(f"a {tensor.layout} tensor cannot be sent: make it dense")
    is_plain = type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    if not is_plain or torch._is_functional_tensor(tensor):
        raise ValueError(f"a {type(tensor).__name__} has no bytes of its own to send")
    if tensor.is_quantized:
        raise ValueError("a quantised tensor cannot be sent: send its int_repr()")
    if _is_freed(tensor):
        raise ValueError("the memory of a tensor was freed: its storage has no bytes")


def _is_freed(tensor: torch.Tensor) -> bool:
    # As FSDP does with parameters, of which torch still shows the address.
    return not tensor.untyped_storage().nbytes() and tensor.numel() > 0


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of ``tensor``: flat, writable, not a copy.

    :raises ValueError: if it cannot be sent, or its memory is not its elements
        in order (not contiguous, or a lazy conjugate or negative)
    """
    if (tensor.dtype in _NUMPY_DTYPES) and not tensor.requires_grad:
        try:
            array = tensor.numpy()
        except (RuntimeError, TypeError):
            pass  # the checks below say what is wrong
        else:
            if array.flags.c_contiguous and not _is_freed(tensor):
                return array.reshape(-1).view(numpy.uint8).data
    check_sendable(tensor)
    if not tensor.is_contiguous():
        raise ValueError("the tensor is not contiguous")
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError("the tensor is a lazy conjugate or negative: resolve it")
    # One element may come with any stride, which reshape() keeps and view() refuses.
    elements = tensor.detach().as_strided((tensor.numel(),), (1,))
    flat: _Bytes = elements.view(torch.uint8).numpy()
    return flat.data


class InPlaces(Protocol):
    """Bytes that are no tensor's."""

    def memory(self) -> Memory:
        """Return where they lie."""


def memory_of(memory: torch.Tensor | InPlaces) -> Memory:
    """Return where the bytes of it lie, not copied.

    :raises ValueError: it has none that are its elements in order
    """
    return bytes_of(memory) if isinstance(memory, torch.Tensor) else memory.memory()


def packed(tensor: torch.Tensor, max_nbytes: int) -> tuple[TensorSpec, bytes] | None:
    """Return shape, dtype and a copy of the elements of a small plain tensor.

    ``None`` for any other one, and for one that cannot be sent: :func:`spec_of` and
    :func:`bytes_of` say of these what there is to say. In as few calls as can be.
    """
    name, seen_as = _PACKED.get(tensor.dtype, ("", None))
    if not name or type(tensor) is not torch.Tensor:
        return None
    if torch._is_functional_tensor(tensor):  # numpy would show what is not there
        return None
    try:
        array = (tensor if seen_as is None else tensor.view(seen_as)).numpy()
    except (RuntimeError, TypeError):
        return None
    if array.nbytes > max_nbytes or array.ndim > MAX_TENSOR_DIMENSIONS:
        return None
    if _is_freed(tensor):
        return None
    return _spec_of_shape(array.shape, name), array.tobytes()


def tensor_over(
    buffer: bytes | bytearray | memoryview | _Bytes, spec: TensorSpec
) -> torch.Tensor:
    """Return a tensor whose memory is the first bytes of ``buffer``.

    A tensor over read-only memory must never be written to: torch cannot know,
    and the write would crash the process or change what should be constant.
    The buffer stays exported (it cannot be resized or closed) while the tensor
    or a view of it lives.

    :raises ValueError: if the buffer is too short, or not contiguous
    """
    dtype = dtype_of(spec.dtype)
    lent, nbytes = numpy.frombuffer(buffer, dtype=numpy.uint8), spec.nbytes
    if lent.nbytes < nbytes:
        raise ValueError(f"{lent.nbytes} bytes cannot hold {nbytes}")
    if nbytes == 0:
        return empty_tensor(spec)
    lent = lent[:nbytes]
    if not lent.flags.writeable:
        lent = numpy.asarray(_WritableWindow(lent))
    return torch.from_numpy(lent).view(dtype).view(spec.shape)


def tensor_from(piece: bytes | memoryview, spec: TensorSpec) -> torch.Tensor:
    """Return a tensor of its own memory that holds a copy of ``piece``.

    For few bytes: what rides with a frame.

    :raises ValueError: if there are not exactly as many bytes
    """
    if len(piece) != spec.nbytes:
        raise ValueError(f"{len(piece)} bytes are not a tensor of {spec.nbytes}")
    if not piece or spec.dtype == "complex32":  # frombuffer() refuses, or warns
        tensor = empty_tensor(spec)
        bytes_of(tensor)[:] = piece
        return tensor
    return tensor_in(bytearray(piece), spec)


def tensor_in(memory: bytearray, spec: TensorSpec) -> torch.Tensor:
    """Return a tensor that has just these bytes, of which there are some."""
    flat = torch.frombuffer(memory, dtype=dtype_of(spec.dtype))
    # Each call of torch counts: a view takes twice as long as the tensor.
    return flat if len(spec.shape) == 1 else flat.view(spec.shape)


def empty_tensor(spec: TensorSpec) -> torch.Tensor:
    """Return a new tensor in CPU memory whose elements are not set.

    :raises ValueError: if this torch does not have the dtype
    :raises EntryTooLarge: the process may have no more memory
    """
    try:
        # By way of bytes: torch.empty() warns about complex32.
        flat = torch.empty(spec.nbytes, dtype=torch.uint8)
    except RuntimeError as exc:  # what torch raises where there is no memory
        raise no_memory(spec.nbytes) from exc
    return flat.view(dtype_of(spec.dtype)).view(spec.shape)


def no_memory(nbytes: int) -> EntryTooLarge:
    """Return what says that the process can have no memory for so much."""
    return EntryTooLarge(
        f"this process can have no memory for {nbytes} bytes more",
        nbytes=nbytes,
        hint="see ulimit -v, and what else it holds",
    )


def check_landing_place(into: torch.Tensor) -> None:
    """Refuse memory that no tensor can land in.

    :raises ValueError: it is not plain memory, or not contiguous
    """
    if into.device.type == "cuda":
        check_plain(into)
        if not into.is_contiguous() or into.is_conj() or into.is_neg():
            raise ValueError("the tensor is not contiguous")
    else:
        bytes_of(into)


def check_into(into: torch.Tensor, spec: TensorSpec, name: str) -> None:
    """Refuse memory that cannot take the tensor ``name`` as it is.

    :raises ValueError: if shape or dtype differ, or the memory is not plain
        contiguous CPU memory
    :raises TypeError: it is no tensor
    """
    if not isinstance(into, torch.Tensor):
        raise TypeError(f"into is a {type(into).__name__}, not a tensor")
    found = spec_of(into)
    if found != spec:
        raise ValueError(
            f"into[{name!r}] is {found.dtype} {found.shape}, "
            f"the tensor is {spec.dtype} {spec.shape}"
        )
    if not into.is_contiguous() or into.is_conj() or into.is_neg():
        raise ValueError(f"into[{name!r}] is not contiguous")
