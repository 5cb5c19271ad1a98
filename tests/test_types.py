from __future__ import annotations

import math
import sys
from typing import Any

import msgspec
import numpy
import pytest
import torch

from asynckv.types import (
    DTYPE_NBYTES,
    MAX_TENSOR_DIMENSIONS,
    KVFingerprint,
    TensorSpec,
    as_count,
    as_seconds,
    as_timeout,
    parse_bytes,
)


@pytest.mark.parametrize(
    ("size", "nbytes"),
    [
        (0, 0),
        (1048576, 2**20),
        (1e9, 10**9),
        ("1e9", 10**9),
        ("2GiB", 2**31),
        ("1 GB", 10**9),
        ("64MiB", 64 * 2**20),
        ("1.5k", 1500),
        (" 12 ", 12),
        ("3b", 3),
        ("0.1KiB", 102),
        (2**62, 2**62),
        (sys.maxsize, 2**62),
    ],
)
def test_sizes_are_read_as_people_write_them(
    size: int | float | str, nbytes: int
) -> None:
    assert parse_bytes(size) == nbytes


@pytest.mark.parametrize(
    "size",
    [
        -1,
        1.5,
        "1.5",
        "2.5b",
        math.inf,
        math.nan,
        True,
        "",
        "GiB",
        "-1",
        "1 PiB",
        "1,000",
        "1e400",
        10**400,
        "9e18 TB",
        None,
        [1],
    ],
)
def test_what_is_no_size_is_refused(size: int | float | str) -> None:
    with pytest.raises(ValueError, match="is not a"):
        parse_bytes(size)


@pytest.mark.parametrize("name", DTYPE_NBYTES)
def test_every_dtype_has_the_width_that_torch_gives_it(name: str) -> None:
    assert getattr(torch, name).itemsize == DTYPE_NBYTES[name]


def test_a_spec_takes_torch_dtypes_and_shapes() -> None:
    tensor = torch.zeros(2, 3, dtype=torch.bfloat16)
    spec = TensorSpec(tensor.shape, tensor.dtype)  # type: ignore[arg-type]
    assert spec == TensorSpec((2, 3), "bfloat16")
    assert spec.nbytes == tensor.nbytes


def test_scalars_and_empty_tensors_have_specs() -> None:
    assert TensorSpec((), "int64").nbytes == 8
    assert TensorSpec((4, 0, 2), "float32").nbytes == 0


@pytest.mark.parametrize(
    ("shape", "dtype", "match"),
    [
        ((1,), "float7", "cannot be sent"),
        ((1,) * (MAX_TENSOR_DIMENSIONS + 1), "int8", "at most 14"),
        ((2, -1), "int8", "negative"),
        ((2**40, 2**40), "int8", "cannot be sent"),
        ((0, 2**64), "int8", "cannot be sent"),
        ((2**40, 0, 2**40), "int8", "cannot be sent"),
    ],
)
def test_what_cannot_be_sent_has_no_spec(
    shape: tuple[int, ...], dtype: str, match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        TensorSpec(shape, dtype)


def test_a_spec_from_the_wire_is_checked_too() -> None:
    encoded = msgspec.msgpack.encode(((-1,), "int8"))
    with pytest.raises(msgspec.ValidationError, match="negative"):
        msgspec.msgpack.decode(encoded, type=TensorSpec)


def test_a_fingerprint_is_written_as_a_name_a_mapping_or_itself() -> None:
    fingerprint = KVFingerprint(model="m")
    assert KVFingerprint.of(None) is None
    assert KVFingerprint.of("m") == fingerprint
    assert KVFingerprint.of({"model": "m"}) == fingerprint
    assert KVFingerprint.of(fingerprint) is fingerprint


@pytest.mark.parametrize(
    ("fingerprint", "text"),
    [
        (KVFingerprint(model="m"), "m"),
        (KVFingerprint(model="{m"), '{"model":"{m"}'),
        (KVFingerprint(model="m", dtype="int8"), '{"model":"m","dtype":"int8"}'),
        (KVFingerprint(), "{}"),
    ],
)
def test_a_fingerprint_is_shown_as_commands_take_it(
    fingerprint: KVFingerprint, text: str
) -> None:
    assert fingerprint.as_text() == text


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        ({"colour": "red"}, ValueError, "colour"),
        ({"model": 5}, ValueError, "model"),
        ({"model": object()}, ValueError, "object"),
        ({"model": 2**70}, ValueError, "not a fingerprint"),
        ("\ud800", ValueError, "surrogates"),
        (KVFingerprint(model="\ud800"), ValueError, "surrogates"),
        (KVFingerprint(model=5), ValueError, "model"),  # type: ignore[arg-type]
        (5, TypeError, "a model's name, a mapping or a KVFingerprint, not 5"),
    ],
)
def test_what_no_peer_could_read_is_no_fingerprint(
    given: Any, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        KVFingerprint.of(given)


def test_the_first_difference_of_two_fingerprints_is_named() -> None:
    ours = KVFingerprint(model="m", dtype="bfloat16")
    assert ours.difference(KVFingerprint(model="m", dtype="float16")) == "dtype"
    assert ours.difference(KVFingerprint(model="m", dtype="bfloat16")) is None


def test_counts_and_seconds_come_back_as_plain_numbers() -> None:
    assert type(as_count(numpy.uint8(3), "n")) is int
    assert type(as_seconds(2**70, "s")) is float and as_seconds(None, "s") is None
    assert type(as_timeout(numpy.int64(2), "s")) is float


def test_a_count_may_begin_at_another_number() -> None:
    assert as_count(0, "rank", least=0) == 0
    with pytest.raises(ValueError, match="rank is at least 0"):
        as_count(-1, "rank", least=0)


def test_what_may_take_any_time_may_take_for_ever() -> None:
    assert (as_timeout(0, "s"), as_timeout(math.inf, "s")) == (0, math.inf)
    with pytest.raises(ValueError, match="s is finite; None means no end"):
        as_seconds(math.inf, "s")


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (math.nan, ValueError),
        (-0.1, ValueError),
        (None, TypeError),
        ("5", TypeError),
        (True, TypeError),
    ],
)
def test_what_is_no_time_is_refused_by_name(
    value: object, error: type[Exception]
) -> None:
    with pytest.raises(error, match="drain_s is a number of seconds"):
        as_timeout(value, "drain_s")


def test_what_cannot_tell_how_many_seconds_it_is_is_no_time() -> None:
    class Late:
        def __float__(self) -> float:
            raise RuntimeError("not yet")

    with pytest.raises(TypeError, match="is a number of seconds"):
        as_seconds(Late(), "ttl_s")
