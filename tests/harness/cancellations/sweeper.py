"""Scenarios, and the sweeper that cancels them: first everywhere, then at random."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from types import CodeType, ModuleType
from typing import Any, Final, Literal, ParamSpec, TypeAlias, TypeVar

from asynckv.testing.cancellation import CancelMode, Outcome, Round

__all__ = (
    "GROUNDS",
    "HUGE",
    "LARGE",
    "MODES",
    "OVER_LINKS",
    "SMALL",
    "Cancel",
    "Kind",
    "Scenario",
    "Sweeper",
    "scenario",
    "scenarios_of",
    "ticks",
)

Kind: TypeAlias = Literal["local", "mem", "tcp", "unix", "tls", "map"]
OVER_LINKS: Final[tuple[Kind, ...]] = ("mem", "tcp", "unix", "tls")
"""Every way to reach the buffers; ``map`` is tcp, but for what is selected."""
GROUNDS: Final[tuple[Kind, ...]] = ("local", *OVER_LINKS)
"""The buffers themselves, too."""

SMALL: Final = 512
"""Rides in a frame."""
LARGE: Final = 72 * 1024
"""Goes over the lanes, and is copied in a thread."""
HUGE: Final = 5 * 2**20
"""Is copied, and moved over a lane, in more than one chunk."""

MODES: Final[tuple[CancelMode, ...]] = (
    *("task", "scope", "timeout"),
    *("again", "completion"),
)
_MAX_TICKS: Final = 6
_TIMEOUT_S: Final = 30.0

_P = ParamSpec("_P")
_T = TypeVar("_T")


async def ticks(count: int) -> None:
    """Let the event loop go round so many times."""
    for _ in range(count):
        await asyncio.sleep(0)


class Cancel:
    """One round of a sweep: awaited once, with the call that is cancelled in it."""

    def __init__(self, round_: Round, pause: Callable[[], Awaitable[None]]) -> None:
        self.outcome: Outcome[Any] = Outcome(cancelled=False)
        self._round = round_
        self._pause = pause

    @property
    def has_begun(self) -> bool:
        """Whether the call was to make a step before it was cancelled."""
        return self._round.k > 0

    async def __call__(
        self,
        call: Callable[_P, Coroutine[Any, Any, _T]],
        *args: _P.args,
        **options: _P.kwargs,
    ) -> Outcome[_T]:
        async def check(k: int, mode: CancelMode, outcome: Outcome[_T]) -> None:
            self.outcome = outcome

        return await self._round.run(lambda: call(*args, **options), check, self._pause)


class Sweeper:
    """Cancels calls, and counts.

    Without ``chance`` each call is cancelled at each suspension by each of
    ``MODES``, and once not at all. With it, ``rounds_each`` times, by one of them
    at some suspension that was seen before and some ticks after it, and whoever
    acts beside the call does so some ticks later.

    ``cancelled`` counts the rounds that ended by their cancellation; ``places``
    holds the code of each coroutine that was suspended when it was cancelled, and
    ``suspensions`` how many there are, by the name of the call.
    """

    def __init__(self) -> None:
        self.chance: random.Random | None = None
        self.rounds_each = 10
        self.rounds = 0
        self.cancelled = 0
        self.places: set[CodeType] = set()
        self.suspensions: dict[str, int] = {}
        self._name = self._now = ""
        self._ground: Any = None
        self._round: Round | None = None
        self._limit = asyncio.timeout(None)

    async def pause(self) -> None:
        """Wait for some ticks, none in the first sweep."""
        if self.chance is not None:
            await ticks(self.chance.randrange(_MAX_TICKS))

    @contextlib.asynccontextmanager
    async def named(self, name: str, ground: Any = None) -> AsyncIterator[None]:
        """Sweep calls of that name; errors get a note with the call and the round.

        The ``ground`` is quiet in the end.

        :raises TimeoutError: a round does not end
        """
        self._name = self._now = name
        self._ground = ground
        self._limit = asyncio.timeout(None)
        try:
            async with self._limit:
                yield
                if ground is not None:
                    await ground.check_quiet()
        except BaseException as exc:
            exc.add_note(f"{self._now}, {self._round}")
            raise

    async def sweep(
        self, way: str = "", *, is_open: bool = False
    ) -> AsyncIterator[Cancel]:
        """Yield for each round what cancels a call; the loop's body sets up and checks.

        ``way`` tells several calls of one scenario apart. After each round the ground
        is quiet, unless something ``is_open`` there around the loop.

        :raises AssertionError: something is left
        """
        self._now = name = f"{self._name} {way}".rstrip()
        for round_ in self._chosen(name):
            self._round, cancel = round_, Cancel(round_, self.pause)
            if self._name:
                now_s = asyncio.get_running_loop().time()
                self._limit.reschedule(now_s + 3 * _TIMEOUT_S)
            yield cancel
            if self._ground is not None and not is_open:
                await self._ground.check_quiet()
            self.rounds += 1
            self.cancelled += cancel.outcome.cancelled
            self.places.update(round_.places)
            if round_.mode != "again":  # it may go round and round while cancelled
                known = self.suspensions.get(name, 0)
                self.suspensions[name] = max(known, round_.suspensions)

    def _chosen(self, name: str) -> Iterator[Round]:
        if self.chance is None:
            for mode in MODES:
                for k in itertools.count(0 if mode == "task" else 1):
                    round_ = Round(mode, k, timeout_s=_TIMEOUT_S)
                    yield round_
                    if k > round_.suspensions:
                        break
        elif suspensions := self.suspensions.get(name, 0):  # else it is all one step
            for _ in range(self.rounds_each):
                mode, k = self.chance.choice(MODES), self.chance.randint(1, suspensions)
                late = self.chance.choice((0, 0, self.chance.randrange(_MAX_TICKS)))
                yield Round(mode, k, ticks=late, timeout_s=_TIMEOUT_S)


@dataclasses.dataclass(frozen=True)
class Scenario:
    """``function`` sweeps calls that ``covers`` names, with tensors of each size.

    ``kinds`` are the grounds where it makes sense. What ``is_costly`` is cancelled
    at random moments less often.
    """

    function: Callable[..., Awaitable[None]]
    covers: tuple[str, ...] = ()
    kinds: tuple[Kind, ...] = GROUNDS
    sizes: tuple[int, ...] = (SMALL, LARGE)
    is_costly: bool = False

    @property
    def name(self) -> str:
        """What is to hold, as a name."""
        return getattr(self.function, "__name__", "")

    async def run(self, ground: Any, sweeper: Sweeper, *nbytes: int) -> None:
        """Sweep it there.

        :raises BaseException: a promise was broken; its notes name call and round
        """
        name = " ".join((self.name, *map(str, nbytes)))
        async with sweeper.named(name, ground):
            await self.function(ground, sweeper, *nbytes)


def scenario(
    *covers: str, **options: Any
) -> Callable[[Callable[..., Awaitable[None]]], Scenario]:
    """Make a scenario of a function that takes a ground, a sweeper and a size."""
    return lambda function: Scenario(function, covers, **options)


def scenarios_of(*modules: ModuleType) -> tuple[Scenario, ...]:
    """Return what is swept in these modules, in order."""
    return tuple(
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, Scenario) and value.function.__module__ == module.__name__
    )
