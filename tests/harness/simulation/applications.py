"""Simulated applications: they think and call, and are cut short at any moment."""

from __future__ import annotations

import asyncio
import random
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any, Final

import anyio
import torch

from asynckv.abc import KVLookupBuffer
from asynckv.tensors.views import empty_tensor
from harness.simulation.calls import Calls
from harness.simulation.contents import Contents, Wanted
from harness.simulation.history import Call, History, Verb
from harness.simulation.nodes import Process

__all__ = (
    "Application",
    "interrupt",
)

_WEIGHTS: Final[dict[Verb, float]] = {
    "insert": 10,
    "write": 3,
    "take": 7,
    "borrow": 5,
    "read": 3,
    "peek": 1,
    "taken": 1,
    "withdraw": 0.7,
}
_SELECT_S: Final = 5.0
_INSERT_S: Final = 12.0


class Application:
    """One task that makes call after call until ``is_over()``."""

    def __init__(
        self,
        process: Process,
        lookup: KVLookupBuffer,
        history: History,
        chance: random.Random,
        *,
        is_over: Callable[[], bool],
        think_s: float,
    ) -> None:
        self._process = process
        self._history = history
        self._chance = chance
        self._is_over = is_over
        self._think_s = think_s
        self._calls = Calls(process, lookup, history, chance)

    @property
    def is_lost(self) -> bool:
        """The peer is gone for good: there is nothing more to call."""
        return self._calls.is_lost

    async def run(self) -> None:
        """Think and call, think and call."""
        does: dict[Verb, Callable[[], Awaitable[None]]] = {
            "insert": self._insert,
            "write": self._write,
            "take": self._take,
            "borrow": self._borrow,
            "read": self._read,
            "peek": self._peek,
            "taken": self._taken,
            "withdraw": self._withdraw,
        }
        verbs, weights = list(_WEIGHTS), list(_WEIGHTS.values())
        while not self._is_over() and not self.is_lost:
            await asyncio.sleep(self._chance.expovariate(1 / self._think_s))
            if self._is_over():
                break
            (verb,) = self._chance.choices(verbs, weights)
            await does[verb]()
            self._calls.look_at_memory()

    async def take_all(self) -> None:
        """Await any entry, again and again."""
        while not self.is_lost:
            call = self._begin("take", wanted=Wanted())
            await self._calls.take(call, Wanted(), {})

    async def _insert(self) -> None:
        contents = self._known() if self._chance.random() < 0.1 else None
        if contents is None:
            contents = self._history.library.new(self._chance)
        call = self._begin("insert", contents)
        await self._make(call, self._calls.insert(call, contents), _INSERT_S)

    async def _write(self) -> None:
        contents = self._history.library.new(self._chance, streaming=True)
        call = self._begin("write", contents)
        await self._make(call, self._calls.write(call, contents), _INSERT_S)

    async def _take(self) -> None:
        wanted = self._draw_wanted()
        call = self._begin("take", wanted=wanted)
        into = self._draw_into(wanted)
        await self._make(call, self._calls.take(call, wanted, into), _SELECT_S)

    async def _borrow(self) -> None:
        wanted = self._draw_wanted()
        call = self._begin("borrow", wanted=wanted)
        await self._make(call, self._calls.borrow(call, wanted), _SELECT_S)

    async def _read(self) -> None:
        wanted = self._draw_wanted()
        call = self._begin("read", wanted=wanted)
        await self._make(call, self._calls.read(call, wanted), _SELECT_S)

    async def _peek(self) -> None:
        wanted = Wanted(self._draw_tokens())
        call = self._begin("peek", wanted=wanted)
        await self._make(call, self._calls.peek(call, wanted), _INSERT_S)

    async def _taken(self) -> None:
        if (contents := self._known()) is not None:
            call = self._begin("taken", contents)
            await self._make(call, self._calls.taken(call, contents), _SELECT_S)

    async def _withdraw(self) -> None:
        if (contents := self._known()) is not None:
            call = self._begin("withdraw", contents)
            await self._make(call, self._calls.withdraw(call, contents), _INSERT_S)

    def _begin(
        self,
        verb: Verb,
        contents: Contents | None = None,
        wanted: Wanted | None = None,
    ) -> Call:
        return self._history.begin(self._process, verb, contents, wanted)

    async def _make(
        self, call: Call, making: Coroutine[Any, Any, None], longest_s: float
    ) -> None:
        """Make a call, perhaps not to its end."""
        call.making = making
        patience_s = longest_s * self._chance.random()
        try:
            await interrupt(making, self._chance, patience_s=patience_s)
        finally:
            if not call.has_begun:  # it was cancelled before
                self._history.end(call, "cancelled")

    def _known(self) -> Contents | None:
        recent = [c for c in self._history.library.all[-12:] if c.entry_id]
        return self._chance.choice(recent) if recent else None

    def _draw_tokens(self) -> tuple[int, ...]:
        recent = self._history.library.all[-8:]
        if not recent:
            return (1, 10)
        key = self._chance.choice(recent).key
        if self._chance.random() < 0.3:
            return (*key, 7, 8)
        return key[: self._chance.randint(1, len(key))]

    def _draw_wanted(self) -> Wanted:
        dice = self._chance.random()
        if dice < 0.2:
            return Wanted()
        if dice < 0.4 and (contents := self._known()) is not None:
            return Wanted(entry_id=contents.entry_id)
        if dice < 0.5:
            return Wanted(self._draw_tokens(), match="exact")
        if dice < 0.6:
            return Wanted(self._draw_tokens(), min_matched_tokens=2)
        return Wanted(self._draw_tokens())

    def _draw_into(self, wanted: Wanted) -> dict[str, torch.Tensor]:
        if wanted.entry_id is None or self._chance.random() < 0.5:
            return {}
        contents = self._history.library.find_by_id(wanted.entry_id)
        if contents is None:
            return {}
        return {name: empty_tensor(spec) for name, spec in contents.specs.items()}


_SHARE: Final = 0.3
_PATIENT: Final = 0.95
_DELAYS_S: Final = (0.0, 0.00002, 0.001, 0.01, 0.1, 1.0, 6.0)
_MAX_SUSPENSION: Final = 12


async def interrupt(
    call: Coroutine[Any, Any, None], chance: random.Random, *, patience_s: float
) -> None:
    """Run ``call`` in a task of its own, and perhaps cancel it at some moment.

    ``call`` hears of it as a ``CancelledError``. Waits until it has ended, which
    mostly is after ``patience_s`` at the latest.
    """
    way = chance.choice(("task", "scope", "timeout", "suspension", "completion"))
    if chance.random() >= _SHARE:
        way = ""
    if not way and chance.random() < _PATIENT:
        call = _in_timeout(call, patience_s)
    delay_s = 2 * chance.random() * chance.choice(_DELAYS_S)
    if way == "scope":
        call = _in_scope(call, delay_s)
    elif way == "timeout":
        call = _in_timeout(call, delay_s)
    elif way in ("suspension", "completion"):
        at = chance.randint(1, _MAX_SUSPENSION)
        call = _cancelled_at(call, at, at_completion=way == "completion")
    task = asyncio.create_task(call, name="a call")
    if way == "task":
        asyncio.get_running_loop().call_later(delay_s, task.cancel)
    try:
        await asyncio.wait({task})
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait({task})
        raise
    if not task.cancelled():
        task.result()


async def _in_scope(call: Coroutine[Any, Any, None], delay_s: float) -> None:
    with anyio.move_on_after(delay_s):
        await call


async def _in_timeout(call: Coroutine[Any, Any, None], delay_s: float) -> None:
    try:
        async with asyncio.timeout(delay_s):
            await call
    except TimeoutError:
        pass


async def _cancelled_at(
    call: Coroutine[Any, Any, None], at: int, *, at_completion: bool
) -> None:
    await _counted(call, at, at_completion)


@types.coroutine
def _counted(
    call: Coroutine[Any, Any, None], at: int, at_completion: bool
) -> Generator[Any, Any, None]:
    """Cancel the task at its suspension number ``at``, or when that one ends."""
    task, count = asyncio.current_task(), 0
    error: BaseException | None = None
    while True:
        try:
            awaited = call.send(None) if error is None else call.throw(error)
        except StopIteration:
            return
        count += 1
        if count == at and task is not None:
            if at_completion and isinstance(awaited, asyncio.Future):
                awaited.add_done_callback(lambda _: task.cancel())
            else:
                task.cancel()
        error = None
        try:
            yield awaited
        except GeneratorExit:
            call.close()
            raise
        except BaseException as exc:  # noqa: BLE001 - thrown in where it belongs
            error = exc
