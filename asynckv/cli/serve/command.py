"""``asynckv serve``: what it runs, and what it logs.

What needs torch is imported when it is used, so that ``--help`` is quick.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import Iterator, Sequence
from typing import Final

from asynckv.cli.options import (
    NO_KEY_OPTIONS,
    KeyOptions,
    LogLevel,
    ServeOptions,
)
from asynckv.cli.process import run
from asynckv.errors import AsyncKVError
from asynckv.observability.lines import without_secrets

__all__ = ("serve",)

_NO_OPTIONS: Final = ServeOptions()


def serve(
    options: ServeOptions = _NO_OPTIONS, keys: KeyOptions = NO_KEY_OPTIONS
) -> int:
    """Serve a lookup buffer, a store, or both, until SIGTERM or Ctrl-C.

    Prints the URL that peers connect to on standard output, one line, when they can.
    Logs on standard error which peers come, leave, are refused and are lost. A second
    signal ends it at once.
    """
    from asynckv.cli.serve.running import EndDeadline, run_until_stopped

    try:
        options.check()
        logging_ = _logging_to_stderr(options.log_level, options.tier)
        with logging_, EndDeadline() as deadline:
            run(run_until_stopped(options, keys, deadline))
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 0
    except (AsyncKVError, ValueError, OSError) as exc:
        words = _without_passwords(str(exc), (*options.tier, options.listen))
        print(f"asynckv serve: {words}", file=sys.stderr)
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


@contextlib.contextmanager
def _logging_to_stderr(level: LogLevel, urls: Sequence[str]) -> Iterator[None]:
    """Write what asynckv logs to standard error."""
    logger, handler = logging.getLogger("asynckv"), logging.StreamHandler()
    handler.setFormatter(_OneLine(urls))
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
