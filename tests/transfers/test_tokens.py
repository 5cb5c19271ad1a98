from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable
from typing import Any, Final

import numpy
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from asynckv.abc import KVLookupBuffer, KVStoreBuffer
from asynckv.abc.closing import AsyncWithOnly
from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.store import StoreBuffer
from asynckv.testing.blocked import until
from asynckv.testing.pairs import open_peers
from asynckv.transfers.tokens import (
    Query,
    as_many_keys,
    as_mask,
    as_specs,
    as_tokens,
    key_of,
    make_query,
)
from asynckv.types import TensorSpec

INTEGERS = ("uint8", "int8", "int16", "uint16", "int32", "uint32", "int64")
MASKS = (*INTEGERS, "bool", "float32", "bfloat16", "float8_e4m3fn", "complex64")


def packed(*tokens: int) -> bytes:
    return struct.pack(f"<{len(tokens)}q", *tokens)


@pytest.mark.parametrize("name", INTEGERS)
def test_ids_of_every_integer_dtype_give_the_same_key(name: str) -> None:
    tokens = as_tokens(torch.tensor([1, 2, 100]).to(getattr(torch, name)))
    mask = as_mask([1, 0, 1], tokens)
    assert key_of(tokens, mask) == packed(1, 100)


def test_without_a_mask_every_id_counts() -> None:
    for dtype in (torch.int64, torch.int32):
        assert key_of(as_tokens(torch.tensor([1, 2], dtype=dtype)), None) == packed(
            1, 2
        )


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_may_be_of_any_dtype(name: str) -> None:
    tokens = as_tokens([5, 6, 7])
    mask = torch.tensor([0, 1, 1]).to(getattr(torch, name))
    assert key_of(tokens, as_mask(mask, tokens)) == packed(6, 7)


@pytest.mark.parametrize(
    "mask", [[0, 2], [0, -1], [0.5, 1], [float("nan"), 1], [1j, 1], [1], [[1, 0]], "ab"]
)
def test_a_mask_that_is_none_is_refused(mask: list[int]) -> None:
    with pytest.raises(ValueError, match="roi"):
        as_mask(mask, as_tokens([1, 2]))


@pytest.mark.parametrize(
    "tokens", [[1.5], [[1]], [2**63], ["a"], [True], 7, torch.tensor([1.0])]
)
def test_tokens_that_are_none_are_refused(tokens: list[int]) -> None:
    with pytest.raises(ValueError, match="token"):
        as_tokens(tokens)


def test_a_roi_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="pass both"):
        make_query(None, [1])


def test_nothing_selected_could_never_match() -> None:
    for tokens, roi in (([], None), ([1], [0])):
        with pytest.raises(ValueError, match="nothing could ever match"):
            make_query(tokens, roi)
    assert make_query([], None, entry_id="a") == Query(None, "a")


def test_other_options_are_checked() -> None:
    with pytest.raises(ValueError, match="match is"):
        make_query([1], None, match="longest")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least 1"):
        make_query([1], None, min_matched_tokens=0)


def test_strides_and_gradients_do_not_matter() -> None:
    tokens = as_tokens(torch.arange(6)[::2])
    assert key_of(tokens, None) == packed(0, 2, 4)


_NO_TEXT: Final = "\ud800"
_SPEC: Final = TensorSpec((2,), "float32")
_ROWS: Final = torch.zeros(2, 2)

with FakeTensorMode():
    _FAKE: Final = torch.ones(3)

_Values = tuple[tuple[object, type[Exception]], ...]

_COUNTS: Final[_Values] = (
    (1.5, TypeError),
    (True, TypeError),
    ("1", TypeError),
    (None, TypeError),
    (torch.tensor([1, 2]), TypeError),
    (torch.tensor(True), TypeError),
    (0, ValueError),
    (2**40, ValueError),
)
_SECONDS: Final[_Values] = (
    ("1", TypeError),
    (True, TypeError),
    (1j, TypeError),
    (float("nan"), ValueError),
    (10**400, ValueError),
)
_IDS: Final[_Values] = ((b"x", TypeError), (5, TypeError), (_NO_TEXT, ValueError))
_TOKENS: Final[_Values] = (
    ([True, True], ValueError),
    ("hello", ValueError),
    (b"hello", ValueError),
    ([1, 2.5], ValueError),
    (torch.ones(3, dtype=torch.int64, device="meta"), ValueError),
)
_SPECS: Final[_Values] = (
    (None, TypeError),
    ([("key", _SPEC)], TypeError),
    ({"key": ((2,), "float32")}, TypeError),
    ({5: _SPEC}, TypeError),
    ({f"{_NO_TEXT}.key": _SPEC}, ValueError),
)
_INTO: Final[_Values] = (
    ([1], TypeError),
    ({"key": None}, TypeError),
    ({"key": [1]}, TypeError),
    ({"key": torch.zeros(2, 2).t()}, ValueError),
    ({"key": _ROWS, "value": _ROWS}, ValueError),
    ({"key": _ROWS, "value": _ROWS[1]}, ValueError),
)
_TENSORS: Final[_Values] = (
    ([1], TypeError),
    (numpy.zeros(2), TypeError),
    (_FAKE, ValueError),
    (torch._to_functional_tensor(torch.ones(2)), ValueError),
    (torch.ones(2).to_sparse(), ValueError),
    (torch.ones(2, device="meta"), ValueError),
)
_EXTRAS: Final[_Values] = (
    ([1], TypeError),
    ({5: torch.ones(1)}, TypeError),
    ({_NO_TEXT: torch.ones(1)}, ValueError),
)
_KEYS: Final[_Values] = ((b"x", TypeError), (_NO_TEXT, ValueError))
_SOME_KEYS: Final[_Values] = (
    ("key", TypeError),
    (5, TypeError),
    ([b"x"], TypeError),
    ([_NO_TEXT], ValueError),
)

_CASES: Final[dict[str, dict[str, _Values]]] = {
    "insert": {
        "input_tokens": _TOKENS,
        "key": _TENSORS,
        "extras": _EXTRAS,
        "entry_id": _IDS,
        "ttl_s": _SECONDS,
        "deliveries": _COUNTS,
    },
    "open_insert": {
        "specs": _SPECS,
        "entry_id": _IDS,
        "ttl_s": _SECONDS,
        "deliveries": _COUNTS,
    },
    "drop_select": {
        "input_tokens": _TOKENS,
        "entry_id": _IDS,
        "min_matched_tokens": _COUNTS,
        "match": ((b"prefix", ValueError), (None, ValueError)),
        "into": _INTO,
    },
    "open_drop_select": {
        "entry_id": _IDS,
        "min_matched_tokens": _COUNTS,
        "into": _INTO,
    },
    "peek": {"input_tokens": _TOKENS},
    "taken": {"entry_id": _IDS},
    "withdraw": {"entry_id": _IDS},
}
_STORE_CASES: Final[dict[str, dict[str, _Values]]] = {
    "put": {"key": _KEYS, "value": _TENSORS},
    "get": {"key": _KEYS, "into": (([1], TypeError), (_ROWS.t(), ValueError))},
    "delete": {"key": _KEYS},
    "contains": {"keys": _SOME_KEYS},
    "match_prefix": {"block_keys": _SOME_KEYS},
    "pin": {"keys": _SOME_KEYS},
}
_NEEDED: Final[dict[str, dict[str, object]]] = {
    "insert": {"input_tokens": [1], "roi": None}
    | dict.fromkeys(("key", "value", "hidden")),
    "open_insert": {"input_tokens": [1], "roi": None, "specs": {"key": _SPEC}},
    "drop_select": {"input_tokens": [1]},
    "open_drop_select": {"input_tokens": [1]},
    "put": {"key": "k", "value": torch.ones(2)},
    "get": {"key": "k"},
}


async def _call(verb: Callable[..., Any], arguments: dict[str, object]) -> object:
    made = verb(**arguments)
    if isinstance(made, Awaitable) and not isinstance(made, AsyncWithOnly):
        return await made
    async with made as entered:
        return entered


async def _check_refusals(
    buffer: KVLookupBuffer | KVStoreBuffer, cases: dict[str, dict[str, _Values]]
) -> None:
    wrong: list[str] = []
    for verb, arguments in cases.items():
        for name, values in arguments.items():
            for value, error in values:
                called = _NEEDED.get(verb, {}) | {name: value}
                try:
                    async with asyncio.timeout(10):
                        await _call(getattr(buffer, verb), called)
                    found = "nothing"
                except Exception as exc:  # noqa: BLE001 - whatever leaks is shown
                    found = "" if type(exc) is error else repr(exc)
                if found:
                    wrong.append(f"{verb}({name}={value!r:.40}) raised {found}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("is_remote", [False, True], ids=["local", "remote"])
async def test_a_wrong_argument_is_refused_and_disturbs_nobody(
    is_remote: bool, local: LookupBuffer
) -> None:
    async with open_peers("tcp", local) as (_, producer, consumer):
        lookup = consumer.lookup if is_remote else local
        other = asyncio.create_task(consumer.lookup.drop_select([7]))
        await until(lambda: local.statistics().waiting_selects == 1)
        await _check_refusals(lookup, _CASES)
        assert local.statistics().entries == 0 and not other.done()
        await producer.lookup.insert([7], None, None, None, None)
        await other


@pytest.mark.parametrize("is_remote", [False, True], ids=["local", "remote"])
async def test_a_wrong_argument_to_a_store_is_refused(is_remote: bool) -> None:
    async with StoreBuffer("1MiB") as store:
        async with open_peers("tcp", store=store) as (_, _, consumer):
            found = consumer.store if is_remote else store
            await _check_refusals(found, _STORE_CASES)
            await found.put("k", torch.ones(2))
            assert await found.contains(iter(["k"])) == (True,)  # type: ignore[arg-type]


@pytest.mark.parametrize("is_remote", [False, True], ids=["local", "remote"])
async def test_integers_of_numpy_and_torch_are_integers(
    is_remote: bool, local: LookupBuffer
) -> None:
    one = torch.tensor(1)
    async with open_peers("tcp", local) as (_, _, consumer):
        lookup = consumer.lookup if is_remote else local
        entry_id = await lookup.insert(
            *([1], None, None, None, None),
            entry_id=numpy.str_("x"),
            ttl_s=numpy.float32(60),  # type: ignore[arg-type]
            deliveries=numpy.int64(1),  # type: ignore[arg-type]
        )
        entry = await lookup.drop_select([1], min_matched_tokens=one)  # type: ignore[arg-type]
        assert entry.entry_id == entry_id == "x"


async def test_a_writer_puts_nothing_but_tensors(local: LookupBuffer) -> None:
    async with open_peers("tcp", local) as (_, _, consumer):
        for lookup in (local, consumer.lookup):
            async with lookup.open_insert([1], None, {"key": _SPEC}) as writer:
                with pytest.raises(TypeError, match="'key' is a NoneType"):
                    await writer.put("key", None)  # type: ignore[arg-type]
                await writer.put("key", torch.ones(2))


def test_a_tensor_is_declared_by_a_spec() -> None:
    assert as_specs({"key": _SPEC}) == {"key": _SPEC}
    with pytest.raises(TypeError, match=r"is a tuple: write .*TensorSpec"):
        as_specs({"key": ((1,), "int8")})


async def test_others_have_their_turn_while_many_keys_are_looked_at() -> None:
    keys = [f"{number}" for number in range(5000)]
    looking = asyncio.create_task(as_many_keys(keys))
    await asyncio.sleep(0)
    keys.clear()
    await asyncio.sleep(0)
    assert not looking.done()
    assert await looking == tuple(f"{number}" for number in range(5000))


@pytest.mark.parametrize("wrong", ["key", 1, [*["key"] * 5000, 1]])
async def test_what_are_no_keys_are_refused_however_many_they_are(wrong: Any) -> None:
    with pytest.raises(TypeError, match="key"):
        await as_many_keys(wrong)
