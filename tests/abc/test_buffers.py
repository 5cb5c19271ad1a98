from __future__ import annotations

from collections.abc import Coroutine

from asynckv.abc import (
    DropSelect,
    KVCacheBuffer,
    KVLookupBuffer,
    KVStoreBuffer,
)


def test_what_a_drop_select_returns_is_a_coroutine_and_a_context_manager() -> None:
    assert issubclass(DropSelect, Coroutine)
    assert hasattr(DropSelect, "__aenter__")


def test_both_kinds_of_buffer_are_buffers() -> None:
    assert issubclass(KVLookupBuffer, KVCacheBuffer)
    assert issubclass(KVStoreBuffer, KVCacheBuffer)
