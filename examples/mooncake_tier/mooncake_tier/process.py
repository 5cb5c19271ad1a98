"""Mooncake's client in a process of its own, and the memory that it shares with us.

The client blocks; it holds the GIL while it connects; it goes on reading and writing
memory after everybody has lost patience; and it may take its process down. Here that
is its own process: killed, it has let go of everything.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import mmap
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from asynckv.errors import ConfigError
from mooncake_tier.client import NO_ANSWER, OUT_OF_TIME, Place

__all__ = ("SLOTS", "ClientProcess", "Slot")

logger = logging.getLogger(__name__)

SLOTS: Final = 4
"""So many calls move bytes at a time."""
_NO_ANSWER: Final = frozenset({NO_ANSWER, OUT_OF_TIME})
_START_S: Final = 10.0
_LONGEST_ANSWER_NBYTES: Final = 16 * 2**20
_PROGRAM: Final = Path(__file__).with_name("client.py")

Slot = tuple[int, memoryview]
"""A part of the shared memory: where it begins there, and its bytes."""


class ClientProcess:
    """A process that was started; :meth:`open` waits for its client."""

    def __init__(self, place: Place, process: Process, staging: mmap.mmap) -> None:
        self.has_ended = False
        self._place = place
        self._process = process
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[Sequence[int]]] = {}
        self._started = self._expect()
        self._reader = asyncio.create_task(self._read(), name="reader of Mooncake")
        each = place.staging_nbytes // SLOTS
        self._slots: asyncio.LifoQueue[Slot] = asyncio.LifoQueue()
        for start in range(0, each * SLOTS, each):
            self._slots.put_nowait((start, memoryview(staging)[start : start + each]))

    @classmethod
    async def start(cls, place: Place) -> ClientProcess:
        """Start the process. It belongs to who gets it, who is to :meth:`kill` it."""
        shared = os.memfd_create("mooncake staging")
        try:
            os.ftruncate(shared, place.staging_nbytes)
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, str(_PROGRAM)),
                *(msgspec.json.encode(place).decode(), str(shared)),
                stdin=PIPE,
                stdout=PIPE,
                pass_fds=[shared],
                limit=_LONGEST_ANSWER_NBYTES,
                # Of each call that fails the wheel writes several lines.
                stderr=None if logger.isEnabledFor(logging.DEBUG) else DEVNULL,
            )
            return cls(place, process, mmap.mmap(shared, place.staging_nbytes))
        finally:
            os.close(shared)

    async def open(self) -> None:
        """Wait until the client is connected, for ten seconds at most.

        :raises ConfigError: it is not installed
        :raises OSError: it cannot connect
        """
        number, started = self._started
        try:
            async with asyncio.timeout(_START_S):
                (status,) = await self._answer(number, started)
        except RuntimeError as exc:
            raise ConfigError(
                f"Mooncake's client cannot be used: {exc}",
                hint="python -m pip install mooncake-transfer-engine-non-cuda; "
                "on Debian it needs libibverbs1, too",
            ) from None
        if status:
            raise OSError(f"the client answers {status}")

    async def ask(
        self,
        what: str,
        keys: Sequence[str],
        places: Sequence[int] = (),
        sizes: Sequence[int] = (),
    ) -> Sequence[int]:
        """Return the client's code for each key. That may take for ever.

        :raises OSError: the process has ended, or has no answer from the master
        :raises RuntimeError: the client says something else than a code
        """
        if self.has_ended:
            raise ConnectionResetError("Mooncake's client has ended")
        number, answered = self._expect()
        line = msgspec.json.encode((number, what, keys, places, sizes))
        if self._process.stdin is not None:
            self._process.stdin.write(line + b"\n")
        codes = await self._answer(number, answered)
        if not _NO_ANSWER.isdisjoint(codes):
            raise ConnectionResetError("the master does not answer")
        return codes

    @contextlib.asynccontextmanager
    async def slot(self) -> AsyncIterator[Slot]:
        """Have a part of the shared memory, when there is one."""
        slot = await self._slots.get()
        try:
            yield slot
        finally:
            self._slots.put_nowait(slot)

    @property
    def is_full(self) -> bool:
        """Is there no slot? Then some of them may be held by what hangs."""
        return self._slots.empty()

    def kill(self) -> None:
        """End it, and every call. Never waits."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def aclose(self) -> None:
        """Kill it, and wait until it is gone."""
        self.kill()
        await asyncio.wait({self._reader})

    def _expect(self) -> tuple[int, asyncio.Future[Sequence[int]]]:
        number = next(self._numbers)
        answered = asyncio.get_running_loop().create_future()
        self._asked[number] = answered
        return number, answered

    async def _answer(
        self, number: int, answered: asyncio.Future[Sequence[int]]
    ) -> Sequence[int]:
        try:
            return await answered
        finally:
            self._asked.pop(number, None)

    async def _read_answers(self) -> None:
        decoder = msgspec.json.Decoder(tuple[int, list[int] | str])
        if self._process.stdout is None:
            return
        async for line in self._process.stdout:
            number, codes = decoder.decode(line)
            answered = self._asked.get(number)
            if answered is None or answered.done():
                continue
            if isinstance(codes, str):
                answered.set_exception(RuntimeError(codes))
            else:
                answered.set_result(codes)

    async def _read(self) -> None:
        try:
            await self._read_answers()
        except (msgspec.MsgspecError, ValueError):
            logger.warning("Mooncake's client says what is no answer: it is ended")
            self.kill()
        # Not before it is gone: until then it may write to what it shares.
        await self._process.wait()
        self.has_ended = True
        for answered in self._asked.values():
            if not answered.done():
                answered.set_exception(ConnectionResetError("Mooncake's client ended"))
