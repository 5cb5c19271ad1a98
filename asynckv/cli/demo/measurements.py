"""What each process measures of itself: loop lag, memory, positions, token times.

One clock for all: ``time.monotonic`` is the same in every process of a machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = (
    "LayerClock",
    "LoopLag",
    "PositionCounter",
    "TokenClock",
    "resident_bytes",
    "ticking",
)


def resident_bytes() -> int:
    """Return the memory this process holds, without the pages of files.

    Shared memory counts, since a buffer's arena may live there. 0 where the
    system does not tell.
    """
    status = Path("/proc/self/status")
    if not status.exists():
        return 0
    lines = (line.split() for line in status.read_text("ascii").splitlines())
    kinds = ("RssAnon:", "RssShmem:")
    return sum(int(words[1]) * 1024 for words in lines if words[0] in kinds)


@contextlib.asynccontextmanager
async def ticking(every_s: float, tick: Callable[[], None]) -> AsyncIterator[None]:
    """Call ``tick`` every ``every_s`` seconds for as long as the block runs."""

    async def run() -> None:
        while True:
            tick()
            await asyncio.sleep(every_s)

    task = asyncio.create_task(run(), name="ticker of the demo")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


class LoopLag:
    """How late the event loop ran what it should have run in time."""

    def __init__(self, every_s: float = 0.002) -> None:
        self.worst_s = 0.0
        self._every_s = every_s
        self._due_s = float("inf")

    def watch(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Measure for as long as the block runs."""
        self._due_s = float("inf")
        return ticking(self._every_s, self._tick)

    def _tick(self) -> None:
        now = time.monotonic()
        self.worst_s = max(self.worst_s, now - self._due_s)
        self._due_s = now + self._every_s


class PositionCounter:
    """Counts the positions that a model really computes, forward by forward."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self.forwards: list[int] = []

    @contextlib.contextmanager
    def counting(self) -> Iterator[list[int]]:
        """Yield the list that holds one number of positions a forward."""
        forwards = self.forwards = []

        def note(module: object, arguments: tuple[torch.Tensor, ...]) -> None:
            forwards.append(int(arguments[0].shape[-1]))

        embedding = self._model.get_input_embeddings()  # type: ignore[operator]
        handle = embedding.register_forward_pre_hook(note)
        try:
            yield forwards
        finally:
            handle.remove()


class LayerClock:
    """Notes when each decoder layer of a model computes, from the forward's thread.

    ``settle`` waits there for what was only begun: a GPU is given layers ahead.
    """

    def __init__(
        self, layers: torch.nn.ModuleList, settle: Callable[[], None] = lambda: None
    ) -> None:
        self._layers = layers
        self._settle = settle
        self.spans: list[tuple[float, float]] = []

    @contextlib.contextmanager
    def timing(self, computed: Callable[[int], None]) -> Iterator[None]:
        """Fill ``spans``; ``computed(index)`` is called in the forward's thread."""
        spans = self.spans = []
        began: list[float] = []

        def begin(*_: object) -> None:
            began.append(time.monotonic())

        def end(*_: object) -> None:
            self._settle()
            spans.append((began.pop(), time.monotonic()))
            computed(len(spans) - 1)

        handles = [layer.register_forward_pre_hook(begin) for layer in self._layers]
        handles += [layer.register_forward_hook(end) for layer in self._layers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


class TokenClock:
    """A streamer for ``generate``: notes when each new token was there.

    ``came`` is called with how many there are, in the generating thread.
    """

    def __init__(self, came: Callable[[int], None] = lambda _: None) -> None:
        self.times: list[float] = []
        self._came = came
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt first, then one token at a time."""
        if self._prompt_seen:
            self.times.append(time.monotonic())
            self._came(len(self.times))
        self._prompt_seen = True

    def end(self) -> None:
        """Nothing to do."""
