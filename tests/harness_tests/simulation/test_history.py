"""What a run notices: other bytes, streams that end early, what stands still."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import torch

from asynckv.abc import KVEntry
from asynckv.buffers.entries.leases import Matcher
from asynckv.buffers.lookup import LookupBuffer
from asynckv.tensors.blocks import KVMemory
from asynckv.testing.blocked import until_blocked
from harness.simulation.calls import Calls
from harness.simulation.contents import (
    Contents,
    Library,
    Wanted,
    by_field,
    scribble,
    wrong_bytes,
)
from harness.simulation.history import History
from harness.simulation.machines import Machines
from harness.simulation.nodes import Process
from harness.simulation.stays import WaitingSelects
from harness.simulation.watch import ANSWERED, Life, Watch


class Lucky(random.Random):
    """Nothing that may fail does."""

    def random(self) -> float:
        return 0.99


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


class Forgetful(LookupBuffer):
    """A stream that ends before its end."""

    @asynccontextmanager
    async def open_drop_select(
        self, *args: Any, into: Mapping[str, KVMemory] | None = None, **options: Any
    ) -> AsyncIterator[Any]:
        async with super().open_drop_select(*args, **options) as stream:
            yield _Cut(stream, await stream.wait_for("extras.number"))


class _Cut:
    def __init__(self, stream: Any, number: torch.Tensor) -> None:
        self.attempt, self.matched_tokens = stream.attempt, stream.matched_tokens
        self._number = number

    async def wait_for(self, name: str) -> torch.Tensor:
        return self._number

    async def __aiter__(self) -> AsyncIterator[tuple[str, torch.Tensor]]:
        yield "extras.number", self._number


@pytest.mark.parametrize(
    ("buffer", "size", "verbs", "outcomes", "wrong"),
    [
        (LookupBuffer, "1MiB", "insert peek borrow taken", "ok ok ok ok", ""),
        (LookupBuffer, "1MiB", "write read taken", "ok ok ok", ""),
        (LookupBuffer, "1KiB", "insert", "EntryTooLarge", ""),
        (Careless, "1MiB", "insert take", "ok ok", "other bytes"),
        (Forgetful, "1MiB", "insert read", None, "a stream ended before its end"),
    ],
)
def test_a_call_is_blamed_for_what_it_got_and_for_nothing_else(
    machines: Machines,
    buffer: type[LookupBuffer],
    size: str,
    verbs: str,
    outcomes: str | None,
    wrong: str,
) -> None:
    history = History()
    contents = history.library.new(random.Random(3))
    wanted = Wanted(contents.key)

    async def main(process: Process) -> None:
        calls = Calls(process, buffer(size), history, Lucky(1))
        for verb in verbs.split():
            is_insert = verb in ("insert", "write", "taken", "withdraw")
            about: Any = (contents, None) if is_insert else (None, wanted)
            call = history.begin(process, verb, *about)  # type: ignore[arg-type]
            into: list[dict[str, torch.Tensor]] = [{}] if verb == "take" else []
            await getattr(calls, verb)(call, about[0] or about[1], *into)
        calls.look_at_memory()

    machines.add("one").start(main)
    machines.world.run(lambda: False, 100)
    ended = " ".join(call.outcome for call in history.calls)
    assert outcomes is None or ended == outcomes
    assert wrong in "".join(history.wrong) and bool(wrong) == bool(history.wrong)


@pytest.fixture
def library() -> Library:
    chance, library = random.Random(1), Library()
    for _ in range(30):
        library.new(chance)
    return library


def entry_of(contents: Contents) -> KVEntry:
    return KVEntry(
        input_tokens=torch.tensor(contents.tokens),
        roi=None if contents.roi is None else torch.tensor(contents.roi),
        entry_id=contents.entry_id or "chosen by the buffer",
        **by_field(contents.tensors()),
    )


def test_what_was_inserted_is_recognised_and_any_other_byte_too(
    library: Library,
) -> None:
    for contents in library.all:
        entry = entry_of(contents)
        assert library.wrong_entry(entry) == (contents, "")
        assert isinstance(entry.hidden, torch.Tensor)
        if entry.hidden.numel():
            entry.hidden[-1] ^= 1
            assert "hidden has other bytes" in library.wrong_entry(entry)[1]


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"input_tokens": torch.tensor([99])}, "other tokens"),
        ({"hidden": None}, "has the tensors"),
        ({"extras": {}}, ""),
    ],
    ids=["tokens", "a tensor", "its number"],
)
def test_other_tokens_and_missing_tensors_are_noticed(
    library: Library, change: dict[str, Any], wrong: str
) -> None:
    changed = msgspec.structs.replace(entry_of(library.all[0]), **change)
    found, why = library.wrong_entry(changed)
    assert wrong in why and (found is None) == (not wrong)


def test_memory_of_another_kind_and_scribbled_memory_are_noticed(
    library: Library,
) -> None:
    contents = library.all[0]
    tensors = contents.tensors()
    scribble(tensors)
    assert "number" in wrong_bytes(contents, "extras.number", tensors["extras.number"])
    assert "hidden is torch.float32" in wrong_bytes(contents, "hidden", torch.ones(3))


@pytest.mark.parametrize(
    ("wanted", "matched"),
    [
        (Wanted(), 0),
        (Wanted((1,)), 1),
        (Wanted((1, 2, 3, 4)), 3),
        (Wanted((1, 3)), None),
        (Wanted((1,), match="exact"), None),
        (Wanted((1, 2, 3), match="exact"), 3),
        (Wanted((1,), min_matched_tokens=2), None),
        (Wanted(entry_id="e7"), 0),
        (Wanted((1,), entry_id="e8"), None),
    ],
    ids=str,
)
def test_the_rules_of_matching(wanted: Wanted, matched: int | None) -> None:
    contents = Contents(7, "e7", (1, 9, 2, 3), (1, 0, 1, 1), {})
    assert wanted.matched(contents) == matched


async def test_who_waits_beside_its_match_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with LookupBuffer("1MiB", drain_s=0) as buffer:
        waiting = WaitingSelects(buffer)
        select = asyncio.ensure_future(buffer.drop_select([1, 2]))
        await until_blocked(select)
        assert waiting.beside_their_match() == {}
        with monkeypatch.context() as patch:
            patch.setattr(Matcher, "next_for", lambda self, entry: None)
            await buffer.insert([1], None, None, None, None, entry_id="e1")
        assert list(waiting.beside_their_match().values()) == ["e1"]
        select.cancel()


class Watched:
    """A watch over one buffer in one node, in which there is one entry."""

    def __init__(self, machines: Machines) -> None:
        self.history, self.machines = History(), machines
        self.watch = Watch(machines.world, self.history)
        self.node = machines.add("server")
        self.node.start(self.serve)
        self.run(1)

    async def serve(self, process: Process) -> None:
        self.buffer = LookupBuffer(1000)
        self.watch.lives.append(Life(process, self.buffer, 0.0))
        await self.buffer.insert([1, 2], None, None, None, None, entry_id="e1")
        await asyncio.sleep(10_000)

    def run(self, seconds: float) -> None:
        world = self.machines.world
        world.run(lambda: False, world.now + seconds)

    def take_all(self) -> None:
        with self.node.inside() as process:
            assert process.loop.finish(self.buffer.withdraw("e1"))

    def overfill(self) -> None:
        self.buffer._arena.used_bytes = 2000

    def hang(self) -> None:
        process = Process(self.machines.add("client1"), 1)
        self.history.begin(process, "take", wanted=Wanted((1,)))
        self.history.begin(process, "peek", wanted=Wanted((1,)))


@pytest.fixture
def watched(machines: Machines) -> Watched:
    return Watched(machines)


@pytest.mark.parametrize(
    ("happens", "look", "complaint"),
    [
        (Watched.overfill, lambda w: w.watch.look_on(), "out of bounds"),
        (None, lambda w: w.watch.look_at_rest(), "nothing is left, but"),
        (
            Watched.hang,
            lambda w: w.watch.look_at_waits(ANSWERED),
            "hung: call 2 peek [1]",
        ),
        (
            None,
            lambda w: w.watch.look_behind(w.node),
            "server left a task: Watched.serve",
        ),
    ],
    ids=["too many bytes", "bytes of nothing", "a call that hangs", "a task"],
)
def test_what_must_not_be_is_complained_of(
    watched: Watched,
    happens: Callable[[Watched], None] | None,
    look: Callable[[Watched], None],
    complaint: str,
) -> None:
    if happens is not None:
        happens(watched)
    look(watched)
    watched.run(0.1)
    (told,) = watched.watch.complaints
    assert told.startswith(complaint)


def test_nothing_is_complained_of_while_all_is_well_or_when_all_was_taken(
    machines: Machines, watched: Watched
) -> None:
    watched.watch.look_on()
    watched.watch.look_for_matches()
    watched.run(10)
    assert "nothing is left" in watched.watch.charges()[0]
    watched.take_all()
    contents = watched.history.library.new(machines.world.chance("x"), streaming=True)
    call = watched.history.begin(Process(watched.node, 2), "insert", contents)
    watched.history.end(call, "ok", "e1")
    watched.watch.look_at_rest()
    assert watched.watch.reasons == {1: "withdrawn"}
    assert watched.watch.charges() == watched.watch.complaints == []
