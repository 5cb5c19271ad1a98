from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import torch

from asynckv.abc import KVEntry
from asynckv.buffers.lookup import LookupBuffer
from asynckv.tensors.blocks import KVMemory
from harness.simulation.calls import Calls
from harness.simulation.contents import Contents, Wanted
from harness.simulation.history import History
from harness.simulation.machines import Machines
from harness.simulation.nodes import Process


class Lucky(random.Random):
    """Nothing that may fail does."""

    def random(self) -> float:
        return 0.99


class Bench:
    """Calls of a local buffer, in a node that runs one function."""

    def __init__(self, machines: Machines) -> None:
        self.machines = machines
        self.history = History()

    def run(self, make: Callable[[], LookupBuffer], *verbs: str) -> list[str]:
        """Insert an entry, then make calls of it; return how they ended."""
        contents = self.history.library.new(random.Random(3))
        wanted = Wanted(contents.key)

        async def main(process: Process) -> None:
            calls = Calls(process, make(), self.history, Lucky(1))
            for verb in verbs:
                is_insert = verb in ("insert", "write", "taken", "withdraw")
                about: Any = contents if is_insert else wanted
                call = self.history.begin(
                    process,
                    verb,  # type: ignore[arg-type]
                    contents if is_insert else None,
                    None if is_insert else wanted,
                )
                into: list[dict[str, torch.Tensor]] = [{}] if verb == "take" else []
                await getattr(calls, verb)(call, about, *into)
            calls.look_at_memory()

        self.machines.add("one").start(main)
        self.machines.world.run(lambda: False, 100)
        return [call.outcome for call in self.history.calls]


class Careless(LookupBuffer):
    """Hands out an entry with one byte changed."""

    def drop_select(self, *args: Any, **options: Any) -> Any:
        select = super().drop_select(*args, **options)

        async def change() -> KVEntry:
            entry: KVEntry = await select
            assert isinstance(entry.hidden, torch.Tensor)
            entry.hidden[0] ^= 1
            return entry

        return change()


def test_calls_that_keep_the_promises_are_not_blamed(machines: Machines) -> None:
    bench = Bench(machines)
    verbs = ("insert", "peek", "borrow", "taken")
    assert bench.run(lambda: LookupBuffer("1MiB"), *verbs) == ["ok"] * 4
    assert bench.history.wrong == []


def test_a_stream_is_written_and_read(machines: Machines) -> None:
    bench = Bench(machines)
    verbs = ("write", "read", "taken")
    assert bench.run(lambda: LookupBuffer("1MiB"), *verbs) == ["ok"] * 3
    assert bench.history.wrong == []


def test_a_wrong_byte_is_blamed_on_its_call(machines: Machines) -> None:
    bench = Bench(machines)
    assert bench.run(lambda: Careless("1MiB"), "insert", "take") == ["ok", "ok"]
    assert "other bytes" in bench.history.wrong[0]


def test_how_a_call_failed_is_recorded(machines: Machines) -> None:
    bench = Bench(machines)
    assert bench.run(lambda: LookupBuffer("1KiB"), "insert") == ["EntryTooLarge"]


class Forgetful(LookupBuffer):
    """A stream that ends before its end."""

    @asynccontextmanager
    async def open_drop_select(
        self, *args: Any, into: Mapping[str, KVMemory] | None = None, **options: Any
    ) -> AsyncIterator[Any]:
        async with super().open_drop_select(*args, **options) as stream:
            number = await stream.wait_for("extras.number")
            yield _Cut(stream, number)


class _Cut:
    def __init__(self, stream: Any, number: torch.Tensor) -> None:
        self.attempt, self.matched_tokens = stream.attempt, stream.matched_tokens
        self._number = number

    async def wait_for(self, name: str) -> torch.Tensor:
        return self._number

    async def __aiter__(self) -> AsyncIterator[tuple[str, torch.Tensor]]:
        yield "extras.number", self._number


def test_a_stream_that_ends_too_early_is_blamed(machines: Machines) -> None:
    bench = Bench(machines)
    bench.run(lambda: Forgetful("1MiB"), "insert", "read")
    assert "a stream ended before its end" in bench.history.wrong[0]


def test_contents_are_compared_with_what_the_call_asked_for(machines: Machines) -> None:
    history = History()
    contents = Contents(1, "e1", (1, 2), None, {})
    calls = Calls(
        Process(machines.add("one"), 1), LookupBuffer(), history, random.Random(1)
    )
    call = history.begin(calls._process, "take", wanted=Wanted((9,)))
    calls._has(call, contents, 1, 1)
    assert "does not match" in history.wrong[0]
