"""The demo's processes as their parent sees them: start, ask, kill, stop.

A worker reads orders from its standard input and ends when that closes, so
none outlives its parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from typing import TypeVar

from asynckv.cli.demo.messages import (
    Computed,
    Doing,
    Failed,
    Landed,
    Note,
    Order,
    Progress,
    Sampled,
    decode_note,
    encode_line,
)

__all__ = ("Worker", "WorkerEnded", "WorkerFailed")

_N = TypeVar("_N", bound=Note)

_MAX_LINE_BYTES = 1 << 24
_STOP_GRACE_S = 2.0
_LAST_WORDS = 2000


class WorkerEnded(Exception):
    """The process ended while something was still expected of it."""


class WorkerFailed(Exception):
    """The process says that it could not do what it was asked."""


class Worker:
    """One process of the demo. Made by :meth:`start`, ended by :meth:`stop`.

    ``progress`` is called, on the loop, with each note that nobody asked for.
    """

    def __init__(self, process: Process, progress: Callable[[Progress], None]) -> None:
        self.progress = progress
        self._process = process
        self._last_words = b""
        self._expected: dict[type, asyncio.Future[Note]] = {}
        self._reader = asyncio.create_task(
            self._read_forever(), name=f"reader of the worker {process.pid}"
        )

    @classmethod
    async def start(
        cls, module: str, *arguments: str, progress: Callable[[Progress], None]
    ) -> Worker:
        """Start ``python -m module arguments`` in a process of its own."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            module,
            *arguments,
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            limit=_MAX_LINE_BYTES,
            env=_environment(),
            # Ctrl-C is for the parent, which then ends its workers.
            start_new_session=True,
        )
        return cls(process, progress)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ask(self, order: Order, answer: type[_N]) -> _N:
        """Send ``order`` and wait for its ``answer``.

        Orders with different answers may be under way at the same time.

        :raises WorkerEnded: the process is gone
        :raises WorkerFailed: it could not do it
        """
        self.send(order)
        return await self.expect(answer)

    def send(self, order: Order) -> None:
        """Send ``order`` and wait for nothing."""
        stdin = self._process.stdin
        if stdin is not None and not stdin.is_closing():
            stdin.write(encode_line(order))

    async def expect(self, answer: type[_N]) -> _N:
        """Wait for a note of this type.

        :raises WorkerEnded: the process is gone
        :raises WorkerFailed: it could not do what it was asked
        """
        if self._reader.done():
            raise self._ended()
        expected = asyncio.get_running_loop().create_future()
        self._expected[answer] = expected
        try:
            note = await expected
        finally:
            self._expected.pop(answer, None)
        if not isinstance(note, answer):
            raise WorkerFailed(f"unexpected {note}")
        return note

    def kill(self) -> None:
        """Kill the process now, as ``kill -9`` does."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(self._process.pid, signal.SIGKILL)

    async def stop(self) -> None:
        """Ask the process to end, kill it if it does not, and wait until it has."""
        try:
            if self._process.stdin is not None:
                self._process.stdin.close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_STOP_GRACE_S):
                    await self._process.wait()
        finally:
            self.kill()
            # Short: a killed process ends at once.
            await asyncio.shield(self._process.wait())
            await asyncio.wait({self._reader})

    async def _read_forever(self) -> None:
        stdout, stderr = self._process.stdout, self._process.stderr
        if stdout is None or stderr is None:
            raise ValueError("a worker is read through pipes")
        listener = asyncio.create_task(self._listen_to(stderr))
        try:
            while line := await stdout.readline():
                self._take(decode_note(line))
        finally:
            await asyncio.wait({listener})
            await self._process.wait()
            self._fail(self._ended())

    async def _listen_to(self, stderr: asyncio.StreamReader) -> None:
        while words := await stderr.read(_LAST_WORDS):
            self._last_words = (self._last_words + words)[-_LAST_WORDS:]

    def _take(self, note: Note) -> None:
        if isinstance(note, Failed):
            self._fail(WorkerFailed(note.error))
        elif isinstance(note, Doing | Computed | Landed | Sampled):
            self.progress(note)
        else:
            expected = self._expected.get(type(note))
            if expected is not None and not expected.done():
                expected.set_result(note)

    def _fail(self, error: Exception) -> None:
        for expected in self._expected.values():
            if not expected.done():
                expected.set_exception(error)

    def _ended(self) -> WorkerEnded:
        status = self._process.returncode
        words = self._last_words.decode("utf-8", "replace").strip()
        return WorkerEnded(f"process {self.pid} ended with status {status}\n{words}")


def _environment() -> dict[str, str]:
    quiet = {
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "TQDM_DISABLE": "1",
        # Idle compute threads must not spin beside the other process's.
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    return {**os.environ, **quiet}
