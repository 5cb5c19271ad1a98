"""``asynckv serve``: what it runs, and what it logs.

What needs torch is imported when it is used, so that ``--help`` is quick.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging.handlers
import os
import queue
import select
import threading
from collections.abc import Iterator, Sequence
from typing import Final

from asynckv.cli.options import (
    NO_KEY_OPTIONS,
    KeyOptions,
    LogLevel,
    ServeOptions,
    in_flags,
)
from asynckv.cli.process import run
from asynckv.errors import AsyncKVError
from asynckv.observability.lines import without_secrets

__all__ = ("logging_to_stderr", "serve")

_NO_OPTIONS: Final = ServeOptions()

_STDERR: Final = 2
_MAX_LINES: Final = 1000
_LAST_LINES_S: Final = 0.5


def serve(
    options: ServeOptions = _NO_OPTIONS, keys: KeyOptions = NO_KEY_OPTIONS
) -> int:
    """Serve a lookup buffer, a store, or both, until SIGTERM or Ctrl-C.

    Prints the URL that peers connect to on standard output, one line, when they can.
    Logs on standard error which peers come, leave, are refused and are lost. A second
    signal ends it at once.
    """
    from asynckv.cli.serve.running import EndDeadline, run_until_stopped

    options.check(keys)
    with logging_to_stderr(options.log_level, options.tier) as log:
        try:
            with EndDeadline(log) as deadline:
                run(run_until_stopped(options, keys, deadline))
        except (KeyboardInterrupt, asyncio.CancelledError):
            return 0
        except (AsyncKVError, ValueError, OSError) as exc:
            words = _without_passwords(in_flags(exc), (*options.tier, options.listen))
            log.write(f"asynckv serve: {words}")
            return 1
    return 0


class _OneLine(logging.Formatter):
    """A line each with its time; passwords of ``urls`` are not in it."""

    def __init__(self, urls: Sequence[str]) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")
        self._urls = urls

    def format(self, record: logging.LogRecord) -> str:
        return _without_passwords(super().format(record), self._urls)


def _without_passwords(text: str, urls: Sequence[str]) -> str:
    for url in urls:
        text = without_secrets(text, url)
    return text


class _Lines(logging.handlers.QueueHandler):
    """Writes to standard error in a thread: if nobody reads it, nobody waits for that.

    It keeps at most so many lines that wait; of the further ones it says how many.
    """

    def __init__(self) -> None:
        # No other queue lets a finalizer log in the midst of a put().
        self._waiting: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        super().__init__(self._waiting)
        self._lost = 0
        name = "asynckv serve: log"
        self._thread = threading.Thread(target=self._write, name=name, daemon=True)
        self._thread.start()

    def enqueue(self, record: logging.LogRecord) -> None:
        if self._waiting.qsize() >= _MAX_LINES:
            self._lost += 1
        else:
            self.write(record.getMessage())

    def write(self, line: str) -> None:
        """Let a line be written soon, behind those that wait. Never waits."""
        self._tell_lost()
        self._waiting.put(line)

    def close(self) -> None:
        """Let what waits be written, for a moment at most."""
        self._tell_lost()
        self._waiting.put(None)
        self._thread.join(_LAST_LINES_S)
        super().close()

    def _tell_lost(self) -> None:
        lost, self._lost = self._lost, 0
        if lost:
            self._waiting.put(f"{lost} lines are missing here: nobody read them")

    def _write(self) -> None:
        while (line := self._waiting.get()) is not None:
            data = f"{line}\n".encode(errors="backslashreplace")
            with contextlib.suppress(OSError):
                while data:
                    try:
                        data = data[os.write(_STDERR, data) :]
                    except BlockingIOError:
                        select.select([], [_STDERR], [])


@contextlib.contextmanager
def logging_to_stderr(level: LogLevel, urls: Sequence[str] = ()) -> Iterator[_Lines]:
    """Write what is logged to standard error, of asynckv from ``level`` on.

    Whoever logs never waits for that. Passwords of ``urls`` are not in it.
    """
    logger, lines = logging.getLogger("asynckv"), _Lines()
    lines.setFormatter(_OneLine(urls))
    before = logger.level
    logging.root.addHandler(lines)
    logger.setLevel(level.upper())
    try:
        yield lines
    finally:
        logging.root.removeHandler(lines)
        logger.setLevel(before)
        lines.close()
