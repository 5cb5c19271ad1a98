"""A pytest plugin that fails a run in which asynckv turned data into code.

``pytest -p asynckv.testing.audit``, with pytest-xdist or without. It watches the
interpreter's own audit events.
Counted is each class that a pickle names, each code object that is unmarshalled
and each shell command, if asynckv is anywhere in the stack, also where others do it
for asynckv; and what asynckv itself compiles or runs. Importing does not count.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any, Final

import pytest

__all__ = ("Audit", "pytest_configure")

_BY_ANYBODY: Final = frozenset(
    ("pickle.find_class", "marshal.load", "marshal.loads", "os.system")
)
_BY_OURSELVES: Final = frozenset(("compile", "exec"))
_PACKAGE: Final = str(Path(__file__).resolve().parents[1]) + "/"
_FOUND: Final = "asynckv.testing.audit"
_IMPORTING: Final = "<frozen importlib._bootstrap>"


class Audit:
    """Hears of audit events, and keeps those that code of ``package`` has caused."""

    def __init__(self, package: str = _PACKAGE) -> None:
        self.found: dict[str, int] = {}
        self._package = package
        self._is_on = True

    def begin(self) -> None:
        """Hear from now on, in every thread of this process."""
        sys.addaudithook(self._hear)  # for ever: there is no other way

    def end(self) -> None:
        """Hear no longer."""
        self._is_on = False

    def _hear(self, event: str, arguments: tuple[object, ...]) -> None:
        if not self._is_on:
            return
        if event in _BY_OURSELVES:
            frame = sys._getframe(1)
            if self._is_ours(frame):
                self._note(event, frame)
        elif event in _BY_ANYBODY:
            cause = self._cause(sys._getframe(1))
            if cause is not None:
                self._note(event, cause)

    def _note(self, event: str, frame: FrameType) -> None:
        where = f"{event} for {frame.f_code.co_filename}:{frame.f_lineno}"
        self.found[where] = self.found.get(where, 0) + 1

    def _is_ours(self, frame: FrameType) -> bool:
        return frame.f_code.co_filename.startswith(self._package)

    def _cause(self, frame: FrameType | None) -> FrameType | None:
        """Return the package's innermost frame, unless a module is being imported."""
        while frame is not None and frame.f_code.co_filename != _IMPORTING:
            if self._is_ours(frame):
                return frame
            frame = frame.f_back
        return None

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail the run if there was anything; a worker of pytest-xdist tells it."""
        if self.found:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput[_FOUND] = self.found

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Hear what a worker of pytest-xdist has found."""
        told = getattr(node, "workeroutput", {}).get(_FOUND, {})
        for where, count in told.items():
            self.found[where] = self.found.get(where, 0) + count

    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter
    ) -> None:
        """Say what there was."""
        for where, count in self.found.items():
            terminalreporter.write_line(f"data became code: {where}, {count} times")

    def pytest_unconfigure(self) -> None:
        """The run is over."""
        self.end()


def pytest_configure(config: pytest.Config) -> None:
    """Watch this run."""
    audit = Audit()
    config.pluginmanager.register(audit)
    audit.begin()
