from __future__ import annotations

import gc
import mmap

import pytest
import torch
from hypothesis import given, strategies as st

from asynckv.tensors.views import (
    bytes_of,
    check_into,
    dtype_of,
    empty_tensor,
    packed,
    spec_of,
    tensor_from,
    tensor_over,
)
from asynckv.types import DTYPE_NBYTES, TensorSpec

FLOATS = TensorSpec((2, 3), "float32")


_SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (3, 0, 2), (5,), (2, 3, 4), (1,) * 14)


@pytest.mark.parametrize("dtype", DTYPE_NBYTES)
@pytest.mark.parametrize("shape", _SHAPES)
def test_every_dtype_and_shape_keeps_its_bytes(
    dtype: str, shape: tuple[int, ...]
) -> None:
    spec = TensorSpec(shape, dtype)
    tensor = empty_tensor(spec)
    memory = bytes_of(tensor)
    memory[:] = bytes(index % 251 for index in range(spec.nbytes))
    again = tensor_over(bytes(memory), spec_of(tensor))
    assert (again.dtype, again.shape) == (tensor.dtype, tensor.shape)
    assert bytes_of(again) == memory
    assert memory.nbytes == spec.nbytes


@pytest.mark.parametrize("dtype", DTYPE_NBYTES)
@pytest.mark.parametrize("shape", _SHAPES)
def test_what_is_packed_is_what_the_long_way_says(
    dtype: str, shape: tuple[int, ...]
) -> None:
    tensor = empty_tensor(TensorSpec(shape, dtype))
    bytes_of(tensor)[:] = bytes(index % 2 for index in range(tensor.nbytes))
    small = packed(tensor, tensor.nbytes)
    assert small == (spec_of(tensor), bytes(bytes_of(tensor)))
    assert tensor.nbytes == 0 or packed(tensor, tensor.nbytes - 1) is None


@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16, torch.float8_e4m3fn])
def test_what_is_packed_is_the_elements_in_order_whatever_the_strides(
    dtype: torch.dtype,
) -> None:
    tensor = torch.arange(12).view(3, 4).to(dtype)
    for one in (tensor.t(), tensor[:, 1], tensor[0, 0].expand(3), tensor[::2, ::3]):
        assert packed(one, 1000) == (spec_of(one), bytes(bytes_of(one.contiguous())))


def test_what_wants_gradients_is_packed_as_it_is_or_not_at_all() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        tensor = torch.ones(2, dtype=dtype, requires_grad=True)
        assert packed(tensor, 8) in (None, (spec_of(tensor), bytes(bytes_of(tensor))))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(2, requires_grad=True),
        torch.nn.Parameter(torch.ones(2), requires_grad=False),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.ones(2, dtype=torch.complex64).conj().imag,
        torch._neg_view(torch.ones(2, dtype=torch.bfloat16)),
        torch.eye(2).to_sparse(),
        torch.eye(2, dtype=torch.bfloat16).to_sparse(),
        torch.ones(2, device="meta"),
        torch.ones(2, dtype=torch.bfloat16, device="meta"),
        torch._to_functional_tensor(torch.ones(2)),
        torch._to_functional_tensor(torch.ones(2, dtype=torch.bfloat16)),
        torch.ones((1,) * 15),
    ],
)
def test_what_is_not_plain_is_not_packed(tensor: torch.Tensor) -> None:
    assert packed(tensor, 1000) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_that_was_freed_is_not_read(dtype: torch.dtype) -> None:
    tensor = torch.ones(1000, dtype=dtype)
    tensor.untyped_storage().resize_(0)
    assert packed(tensor, 10_000) is None
    for look in (spec_of, bytes_of):
        with pytest.raises(ValueError, match="memory of a tensor was freed"):
            look(tensor)


def test_bytes_of_is_the_tensors_own_memory() -> None:
    tensor = torch.zeros(4, dtype=torch.bfloat16)
    bytes_of(tensor)[:2] = b"\x80\x3f"
    assert tensor[0] == 1


def test_one_element_out_of_a_wide_row_has_bytes() -> None:
    column = torch.arange(96).reshape(2, 48)[:1, 5]
    assert column.stride() != (1,)
    assert bytes(bytes_of(column)) == (5).to_bytes(8, "little")


def test_memory_outlives_the_tensor_it_came_from() -> None:
    memory = bytes_of(torch.full((1000,), 7, dtype=torch.uint8))
    gc.collect()
    assert memory == bytes([7]) * 1000


def test_parameters_and_inference_tensors_have_bytes() -> None:
    with torch.inference_mode():
        inference = torch.ones(2)
    parameter = torch.nn.Parameter(torch.ones(2))
    assert bytes_of(inference) == bytes_of(parameter)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(4, 4).t()[1:],
        torch.zeros(1).expand(3),
        torch.zeros(3, dtype=torch.complex64).conj(),
        torch.zeros(3, dtype=torch.complex64).conj().imag,
        torch.zeros(3, 3).to_sparse(),
        torch.zeros(3, device="meta"),
    ],
    ids=["strided", "expanded", "conjugate", "negative", "sparse", "meta"],
)
def test_memory_that_is_not_the_elements_in_order_is_refused(
    tensor: torch.Tensor,
) -> None:
    with pytest.raises(ValueError, match="tensor"):
        bytes_of(tensor)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_quantised_tensors_are_refused() -> None:
    quantised = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)
    with pytest.raises(ValueError, match="int_repr"):
        bytes_of(quantised)


def test_a_tensor_over_read_only_memory_warns_nobody_and_pins_it() -> None:
    mapping = mmap.mmap(-1, 4096, prot=mmap.PROT_READ)
    tensor = tensor_over(memoryview(mapping), TensorSpec((1024,), "float32"))
    with pytest.raises(BufferError):
        mapping.close()
    assert tensor.sum() == 0
    del tensor
    gc.collect()
    mapping.close()


def test_a_tensor_over_writable_memory_writes_it() -> None:
    memory = bytearray(10)
    tensor_over(memory, TensorSpec((2,), "int32")).fill_(1)
    assert bytes(memory) == b"\1\0\0\0\1\0\0\0\0\0"


@given(st.integers(0, 7), st.integers(0, 20))
def test_misaligned_memory_reads_right(skip: int, length: int) -> None:
    numbers = torch.arange(length, dtype=torch.int64)
    buffer = memoryview(bytes(skip) + bytes(bytes_of(numbers)))[skip:]
    assert torch.equal(tensor_over(buffer, spec_of(numbers)), numbers)


def test_a_short_buffer_is_refused() -> None:
    with pytest.raises(ValueError, match="7 bytes cannot hold 8"):
        tensor_over(bytes(7), TensorSpec((1,), "int64"))


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="qint8"):
        dtype_of("qint8")
    assert dtype_of("bfloat16") is torch.bfloat16


@pytest.mark.parametrize(
    ("into", "spec"),
    [
        (torch.zeros(2, 4), FLOATS),
        (torch.zeros(2, 3, dtype=torch.float16), FLOATS),
        (torch.zeros(3, 2).t(), FLOATS),
        (torch.zeros(2, 3, device="meta"), FLOATS),
        (torch.zeros(6, dtype=torch.complex64).conj().imag.view(2, 3), FLOATS),
        (torch._neg_view(torch.zeros(2, 3)), FLOATS),
        (
            torch.zeros(4, dtype=torch.complex64).conj(),
            TensorSpec((4,), "complex64"),
        ),
    ],
    ids=["shape", "dtype", "strides", "device", "negative", "negated", "conjugate"],
)
def test_into_must_fit(into: torch.Tensor, spec: TensorSpec) -> None:
    with pytest.raises(ValueError, match=r"into|sent"):
        check_into(into, spec, "key")


def test_into_that_fits_is_accepted() -> None:
    check_into(torch.zeros(2, 3), TensorSpec((2, 3), "float32"), "key")
    with pytest.raises(TypeError, match="into is a list, not a tensor"):
        check_into([1.0], TensorSpec((1,), "float32"), "key")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["bool", "bfloat16", "complex32", "int64", "uint16"])
def test_a_tensor_from_a_few_bytes_has_its_own_memory(name: str) -> None:
    spec = TensorSpec((2, 3), name)
    source = bytes(index % 2 for index in range(spec.nbytes))
    tensor = tensor_from(source, spec)
    assert spec_of(tensor) == spec and bytes(bytes_of(tensor)) == source
    bytes_of(tensor)[0] = 0
    assert tensor_from(b"", TensorSpec((0,), name)).numel() == 0
    with pytest.raises(ValueError, match="bytes are not"):
        tensor_from(source[1:], spec)
