"""What an audited process hears of itself. Needs nothing but the standard library.

Counted is each class that a pickle names, each code object that is unmarshalled
and each shell command, if the package is anywhere in the stack, also where others
do it for the package; and what the package itself compiles or runs. Importing does
not count.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Final

__all__ = ("Listener", "report_to")

_BY_ANYBODY: Final = frozenset(
    ("pickle.find_class", "marshal.load", "marshal.loads", "os.system")
)
_EVENTS: Final = _BY_ANYBODY | {"compile", "exec"}
_IMPORTING: Final = "<frozen importlib._bootstrap>"


class Listener:
    """Tells ``found`` where code of a folder, ``package``, turned data into code."""

    def __init__(self, package: str, found: Callable[[str], None]) -> None:
        self._package = package
        self._found = found
        self._is_on = True

    def begin(self) -> None:
        """Hear from now on, in every thread of this process and what it forks."""
        sys.addaudithook(self._receive)  # for ever: there is no other way

    def end(self) -> None:
        """Hear no longer."""
        self._is_on = False

    def _receive(self, event: str, arguments: tuple[object, ...]) -> None:
        if not self._is_on or event not in _EVENTS:  # to look at frames is one too
            return
        cause = sys._getframe().f_back  # none where the interpreter itself begins
        if event in _BY_ANYBODY:
            cause = self._innermost(cause)
        if cause is not None and self._is_ours(cause):
            self._notify(event, cause)

    def _notify(self, event: str, frame: FrameType) -> None:
        self._found(f"{event} for {frame.f_code.co_filename}:{frame.f_lineno}")

    def _is_ours(self, frame: FrameType) -> bool:
        return frame.f_code.co_filename.startswith(self._package)

    def _innermost(self, frame: FrameType | None) -> FrameType | None:
        """Return the package's innermost frame, unless a module is being imported."""
        while frame is not None and frame.f_code.co_filename != _IMPORTING:
            if self._is_ours(frame):
                return frame
            frame = frame.f_back
        return None


def report_to(folder: str, package: str) -> None:
    """Write what this process does from now on to a file of ``folder``, by line."""

    def write(where: str) -> None:
        path = os.path.join(folder, f"{os.getpid()}.found")
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(file, f"{where}\n".encode())
        finally:
            os.close(file)

    Listener(package, write).begin()
