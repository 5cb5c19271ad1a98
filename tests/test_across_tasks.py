from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

import asynckv
from asynckv.testing import use_across_tasks

pytestmark = pytest.mark.both_loops

MANAGERS: dict[str, Callable[[], AbstractAsyncContextManager[Any, Any]]] = {
    "LookupBuffer": lambda: asynckv.LookupBuffer("1MiB"),
    "StoreBuffer": lambda: asynckv.StoreBuffer(max_bytes="1MiB"),
}


@pytest.mark.parametrize("name", MANAGERS)
async def test_what_one_task_enters_another_may_leave(name: str) -> None:
    await use_across_tasks(MANAGERS[name]())
