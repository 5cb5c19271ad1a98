"""Whose process it is: what a fork has copied is its parent's to use and to close."""

from __future__ import annotations

import os

__all__ = ("ProcessBound",)


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
