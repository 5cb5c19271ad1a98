"""Memory that a forked child has views of too: shared, where the heap is copied."""

from __future__ import annotations

import functools
import os
import weakref
from typing import Protocol

__all__ = ("KeepsForChild", "watch_forks")


class KeepsForChild(Protocol):
    """What hands out views of shared memory."""

    def keep_for_child(self) -> None:
        """This process is about to be copied, views and all. Called in any thread."""


def watch_forks(owner: KeepsForChild) -> None:
    """Tell ``owner``, as long as it lives, before this process is forked."""
    _owners()[id(owner)] = owner


@functools.cache
def _owners() -> weakref.WeakValueDictionary[int, KeepsForChild]:
    owners: weakref.WeakValueDictionary[int, KeepsForChild] = (
        weakref.WeakValueDictionary()
    )
    # Once, as it cannot be undone.
    os.register_at_fork(before=lambda: _tell(owners))
    return owners


def _tell(owners: weakref.WeakValueDictionary[int, KeepsForChild]) -> None:
    for ref in owners.valuerefs():  # a list: other threads may add to them
        owner = ref()
        if owner is not None:
            owner.keep_for_child()
