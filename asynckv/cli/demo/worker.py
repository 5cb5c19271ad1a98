"""A worker's side of the demo: its model's thread, orders in, notes out, and its end.

What each process measures of itself: loop lag, memory, positions, token times. One
clock for all: ``time.monotonic`` is the same in every process of a machine.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import copy
import dataclasses
import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch

from asynckv.cli.demo.messages import Failed, Note, Order, decode_order, encode_line
from asynckv.cli.demo.models import HOST, Place
from asynckv.waits.waiting import OwnTasks

if TYPE_CHECKING:  # it takes seconds to import
    from transformers import DynamicCache, PreTrainedModel

__all__ = (
    "MAX_NEW_TOKENS",
    "Continuation",
    "Engine",
    "LoopLag",
    "Recording",
    "Stage",
    "TokenClock",
    "by_layer",
    "counting_positions",
    "resident_bytes",
    "ticking",
    "timing_layers",
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


@contextlib.contextmanager
def counting_positions(model: torch.nn.Module) -> Iterator[list[int]]:
    """Yield how many positions the model really computes, one number a forward."""
    forwards: list[int] = []

    def note(module: object, arguments: tuple[torch.Tensor, ...]) -> None:
        forwards.append(int(arguments[0].shape[-1]))

    embedding = model.get_input_embeddings()  # type: ignore[operator]
    handle = embedding.register_forward_pre_hook(note)
    try:
        yield forwards
    finally:
        handle.remove()


@contextlib.contextmanager
def timing_layers(
    layers: torch.nn.ModuleList,
    computed: Callable[[int], None],
    settle: Callable[[], None] = lambda: None,
) -> Iterator[list[tuple[float, float]]]:
    """Yield when each decoder layer of a model computes, from the forward's thread.

    ``computed(index)`` is called there. Before it ``settle`` waits for what was only
    begun: a GPU is given layers ahead.
    """
    spans: list[tuple[float, float]] = []
    began: list[float] = []

    def begin(*_: object) -> None:
        began.append(time.monotonic())

    def end(*_: object) -> None:
        settle()
        spans.append((began.pop(), time.monotonic()))
        computed(len(spans) - 1)

    handles = [layer.register_forward_pre_hook(begin) for layer in layers]
    handles += [layer.register_forward_hook(end) for layer in layers]
    try:
        yield spans
    finally:
        for handle in handles:
            handle.remove()


def by_layer(times_s: dict[int, float], layers: int) -> tuple[float, ...]:
    """Return a time for each layer.

    One that shares another one's cache never travels: it gets the earliest.
    """
    earliest_s = min(times_s.values())
    return tuple(times_s.get(layer, earliest_s) for layer in range(layers))


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


MAX_NEW_TOKENS = 48

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class Continuation:
    """What a generation gave, and what it computed for it."""

    tokens: tuple[int, ...]
    token_times_s: tuple[float, ...]
    prompt_positions: int


class Engine:
    """One model and one prompt, computed in one thread at a time.

    ``place`` is where the model is; ``prompt`` is in host memory.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        prompt: tuple[int, ...],
        place: Place = HOST,
    ) -> None:
        torch.set_num_threads(os.cpu_count() or 1)
        self.model = model
        self.place = place
        self.prompt = torch.tensor([prompt], dtype=torch.int64)
        self.layers = _decoder_layers(model)
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "demo compute")

    def for_prompt(self, prompt: tuple[int, ...]) -> Self:
        """Return the same engine, and thread, with another prompt."""
        other = copy.copy(self)
        other.prompt = torch.tensor([prompt], dtype=torch.int64)
        return other

    async def compute(self, call: Callable[[], _T]) -> _T:
        """Run ``call`` in the computing thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    def close(self) -> None:
        """Let the thread end by itself; what it computes is not waited for."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def prefill(self, cache: DynamicCache) -> None:
        """Compute the prompt into ``cache``. Blocks."""
        inputs = self.prompt.to(self.model.device)
        with torch.inference_mode():
            self.model(inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
        self.place.settle()

    def generate(
        self,
        streamer: TokenClock,
        max_new_tokens: int = MAX_NEW_TOKENS,
        **options: Any,
    ) -> Any:
        """Compute the prompt and go on greedily. Blocks."""
        inputs = self.prompt.to(self.model.device)
        generate: Any = self.model.generate
        return generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            **self.options(streamer, max_new_tokens),
            **options,
        )

    def options(
        self, streamer: TokenClock, max_new_tokens: int = MAX_NEW_TOKENS
    ) -> dict[str, Any]:
        """What all acts give to ``generate``."""
        return {
            "do_sample": False,
            "max_new_tokens": max_new_tokens,
            "streamer": streamer,
        }

    @contextlib.contextmanager
    def recording(
        self, came: Callable[[int], None] = lambda _: None
    ) -> Iterator[Recording]:
        """Count positions and note token times for as long as the block runs.

        ``came`` is called with how many tokens there are, in the computing thread.
        """
        with counting_positions(self.model) as forwards:
            yield Recording(forwards, TokenClock(came))

    def timing(
        self, computed: Callable[[int], None]
    ) -> contextlib.AbstractContextManager[list[tuple[float, float]]]:
        """As :func:`timing_layers`, of this model, whose GPU is waited for."""
        return timing_layers(self.layers, computed, self.place.settle)

    def continuation(
        self, recording: Recording, sequences: torch.Tensor
    ) -> Continuation:
        """Sum up one generation.

        Every forward after the first computes one position, of a new token.
        """
        new = sequences[0, self.prompt.shape[1] :].tolist()
        return Continuation(
            tokens=tuple(int(token) for token in new),
            token_times_s=tuple(recording.clock.times),
            prompt_positions=sum(recording.forwards) - (len(new) - 1),
        )


@dataclasses.dataclass(frozen=True)
class Recording:
    """What is measured while one generation runs."""

    forwards: list[int]
    clock: TokenClock


def _decoder_layers(model: PreTrainedModel) -> torch.nn.ModuleList:
    count = model.config.get_text_config().num_hidden_layers
    for module in model.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == count:
            return module
    raise ValueError(f"{type(model).__name__} has no list of {count} decoder layers")


_LIMIT = 1 << 24
_EXIT_GRACE_S = 1.0


class Stage:
    """Where a worker gets its orders and says what became of them.

    It takes the standard output for itself: whatever else prints goes to the
    standard error.
    """

    def __init__(self) -> None:
        self._output = os.dup(sys.stdout.fileno())
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        self._lock = threading.Lock()

    def send(self, note: Note) -> None:
        """Write one note; any thread may, and the parent reads at once."""
        line = encode_line(note)
        with self._lock:
            os.write(self._output, line)

    async def orders(self) -> AsyncIterator[Order]:
        """Yield what the parent asks for, until it hangs up."""
        reader = asyncio.StreamReader(limit=_LIMIT)
        protocol = asyncio.StreamReaderProtocol(reader)
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(lambda: protocol, sys.stdin)
        try:
            while line := await reader.readline():
                yield decode_order(line)
        finally:
            transport.close()

    async def perform(self, do: Callable[[Order], Awaitable[Note]]) -> None:
        """Carry out each order in a task of its own, until the parent hangs up.

        What is under way then is cancelled; a forward pass that does not end
        within a second is cut off with the process.
        """
        under_way = OwnTasks()
        async for order in self.orders():
            under_way.own(self._perform_one(do, order), "order of the demo")
        deadline = threading.Timer(_EXIT_GRACE_S, os._exit, (0,))
        deadline.daemon = True
        deadline.start()
        await under_way.quiesce()

    async def _perform_one(
        self, do: Callable[[Order], Awaitable[Note]], order: Order
    ) -> None:
        try:
            note = await do(order)
        except Exception as exc:  # noqa: BLE001 - the parent is told, and ends the run
            note = Failed(f"{type(exc).__name__}: {exc}")
        self.send(note)
