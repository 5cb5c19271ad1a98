from __future__ import annotations

import inspect
from collections.abc import Coroutine

import pytest
import torch

from asynckv import abc
from asynckv.abc import DropSelect, KVCacheBuffer, KVEntry

CLASSES = [
    value
    for name in abc.__all__
    if inspect.isclass(value := getattr(abc, name)) and inspect.isabstract(value)
]


def make_entry() -> KVEntry:
    return KVEntry(
        input_tokens=torch.arange(4),
        roi=None,
        key={"0": torch.zeros(2, 3), "1": torch.zeros(2, 3)},
        value=torch.zeros(5),
        hidden=None,
        extras={"logits": torch.zeros(7)},
    )


def test_an_entry_unpacks_as_the_five_fields_of_the_original() -> None:
    entry = make_entry()
    input_tokens, roi, key, value, hidden = entry
    assert input_tokens is entry.input_tokens
    assert (roi, hidden) == (None, None)
    assert key is entry.key
    assert value is entry.value


def test_the_bytes_of_an_entry_are_those_of_all_its_tensors() -> None:
    assert make_entry().nbytes == 4 * 8 + 4 * (2 * 6 + 5 + 7)


def test_an_entry_knows_every_tensor_it_holds() -> None:
    assert [tensor.numel() for tensor in make_entry().tensors()] == [4, 6, 6, 5, 7]


def test_an_entry_is_itself_only() -> None:
    entry = make_entry()
    assert entry == entry
    assert entry != make_entry()


def test_what_a_drop_select_returns_is_a_coroutine_and_a_context_manager() -> None:
    assert issubclass(DropSelect, Coroutine)
    assert hasattr(DropSelect, "__aenter__")


@pytest.mark.parametrize("page", CLASSES)
def test_every_public_method_of_the_page_has_its_contract(page: type) -> None:
    for name, member in vars(page).items():
        if callable(member) and not name.startswith("_"):
            assert inspect.getdoc(member), f"{page.__name__}.{name}"


def test_every_coroutine_of_users_says_what_its_cancellation_leaves_behind() -> None:
    for page in set(CLASSES) - {abc.PayloadTransport}:
        for name, member in vars(page).items():
            if inspect.iscoroutinefunction(member) and not name.startswith("_"):
                assert "cancel" in str(inspect.getdoc(member)), f"{page}.{name}"


async def test_leaving_a_buffer_closes_it() -> None:
    class Buffer(KVCacheBuffer):
        closed = 0

        async def aclose(self) -> None:
            self.closed += 1

        def abort(self) -> None:
            raise NotImplementedError

        def statistics(self) -> object:
            return self.closed

    async with Buffer() as buffer:
        assert buffer.statistics() == 0
    assert buffer.statistics() == 1
