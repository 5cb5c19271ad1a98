"""Runs a seed from beginning to end and judges it."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator

from harness.simulation.checker import judge
from harness.simulation.machines import open_machines
from harness.simulation.scenario import Scenario
from harness.simulation.world import Spinning, Story, World

__all__ = ("Verdict", "simulate")

logger = logging.getLogger("asynckv")


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What came of one seed. ``broken`` is empty if every promise was kept."""

    seed: int
    broken: tuple[str, ...]
    story: Story
    calls: int
    faults: int
    seconds: float
    """How long it took, in virtual time."""

    @property
    def events(self) -> int:
        """How many slices, faults, begins and ends of calls there were."""
        return self.story.events

    def __str__(self) -> str:
        result = "kept" if not self.broken else f"{len(self.broken)} BROKEN"
        return (
            f"seed {self.seed}: {result}; {self.events} events, {self.calls} calls, "
            f"{self.faults} faults in {self.seconds:.0f} s; {self.story.digest()}"
        )


def simulate(seed: int, *, min_events: int = 2000) -> Verdict:
    """Run one seed; the same seed gives the same story, byte for byte.

    An event loop that runs in this thread stands still meanwhile.
    """
    with _listening() as listener, open_machines(seed) as machines:
        scenario = Scenario(machines, min_events)
        listener.world = machines.world
        _run(scenario)
        broken = [*scenario.watch.complaints, *listener.heard]
        broken += [*machines.faults(), *judge(scenario)]
    return Verdict(
        seed,
        tuple(broken),
        machines.world.story,
        len(scenario.history.calls),
        sum(scenario.troubles.kinds.values()),
        machines.world.now,
    )


def _run(scenario: Scenario) -> None:
    try:
        scenario.run()
    except Spinning as exc:
        scenario.watch.complain(f"hung: {exc}")


@contextlib.contextmanager
def _listening() -> Iterator[_Listener]:
    """Take the package's log; what it calls its own fault is a complaint."""
    listener = _Listener()
    before = logger.level, logger.propagate
    logger.addHandler(listener)
    logger.setLevel(logging.WARNING)
    logger.propagate = False
    try:
        yield listener
    finally:
        logger.removeHandler(listener)
        logger.setLevel(before[0])
        logger.propagate = before[1]


class _Listener(logging.Handler):
    """Keeps the errors that the code of living nodes logs."""

    def __init__(self) -> None:
        super().__init__()
        self.world: World | None = None
        self.heard: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        process = None if self.world is None else self.world.current
        if record.levelno < logging.ERROR or process is None or process.is_gone:
            return
        text = f"{process.node.name} logged: {record.getMessage()}"
        if record.exc_info and record.exc_info[1] is not None:
            text += f": {record.exc_info[1]!r}"
        self.heard.append(text)
