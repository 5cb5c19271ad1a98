"""Whose process it is: what a fork has copied is its parent's to use and to close."""

from __future__ import annotations

import functools
import os
import weakref
from typing import Protocol

__all__ = (
    "KeepsForChild",
    "ProcessBound",
    "watch_forks",
)


class ProcessBound:
    """Mixed into what owns sockets and threads.

    A forked child has copies of both: the sockets are shared with the parent,
    down to what ``shutdown()`` and an event loop's registrations do to them, and
    no thread has come along to let go of a lock. So nothing is to be done with
    them in a child, not even closing. Public coroutines raise ``WrongLoop`` there.
    """

    _pid = 0

    def _own(self) -> None:
        """Remember this process as the owner. To be called once, when made."""
        self._pid = os.getpid()

    @property
    def _is_copy(self) -> bool:
        """Whether this is what a fork left in a child."""
        return self._pid != os.getpid()


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
    os.register_at_fork(before=lambda: _notify(owners))
    return owners


def _notify(owners: weakref.WeakValueDictionary[int, KeepsForChild]) -> None:
    for ref in owners.valuerefs():  # a list: other threads may add to them
        owner = ref()
        if owner is not None:
            owner.keep_for_child()
