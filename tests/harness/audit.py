"""A pytest plugin that fails a run in which asynckv turned data into code.

``pytest -p harness.audit``, with pytest-xdist or without. It watches the
interpreter's own audit events, in this process and in every Python that is started
from here, unless it is started without its environment: see
:mod:`harness.audit_hook` for what counts.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Final

import pytest

import asynckv
from harness import audit_hook
from harness.audit_hook import Listener

__all__ = ("Audit", "pytest_configure")

_PACKAGE: Final = str(Path(asynckv.__file__).resolve().parent) + "/"
_FOLDER: Final = "ASYNCKV_AUDIT"
_PATH: Final = "PYTHONPATH"
_ON_START: Final = """\
import importlib.util
spec = importlib.util.spec_from_file_location("asynckv_audit_hook", {hook!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
module.report_to({folder!r}, {package!r})
"""


class Audit:
    """Collects what code of ``package`` did, here and in processes started meanwhile.

    Each of those reports to a file of ``folder``.
    """

    def __init__(self, folder: Path, package: str = _PACKAGE) -> None:
        self._folder = folder
        self._package = package
        self._found: Counter[str] = Counter()
        self._listener = Listener(package, self._note)
        self._before: dict[str, str | None] = {}

    def begin(self) -> None:
        """Hear from now on, in every thread of this process and all it starts."""
        text = _ON_START.format(
            hook=audit_hook.__file__, folder=str(self._folder), package=self._package
        )
        (self._folder / "sitecustomize.py").write_text(text)
        self._before = {name: os.environ.get(name) for name in (_FOLDER, _PATH)}
        path = self._before[_PATH]
        os.environ[_FOLDER] = str(self._folder)
        os.environ[_PATH] = os.pathsep.join([str(self._folder), *filter(None, [path])])
        self._listener.begin()

    def end(self) -> None:
        """Hear no longer, and let what is started from now on be as it was."""
        self._listener.end()
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    def found(self) -> Counter[str]:
        """Return where it was, and how often, so far."""
        told = [path.read_text() for path in self._folder.glob("*.found")]
        return self._found + Counter("".join(told).splitlines())

    def _note(self, where: str) -> None:
        self._found[where] += 1

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail the run if there was anything."""
        if self.found():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter
    ) -> None:
        """Say what there was."""
        for where, count in self.found().items():
            terminalreporter.write_line(f"data became code: {where}, {count} times")

    def pytest_unconfigure(self) -> None:
        """The run is over."""
        self.end()
        shutil.rmtree(self._folder, ignore_errors=True)


def pytest_configure(config: pytest.Config) -> None:
    """Watch this run, unless the one that started this process does so."""
    if _FOLDER in os.environ:
        return
    audit = Audit(Path(tempfile.mkdtemp(prefix="asynckv-audit-")))
    config.pluginmanager.register(audit)
    audit.begin()
