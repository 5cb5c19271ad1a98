from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Final, cast

import pytest
import torch

from asynckv.abc import KVLookupBuffer, PayloadTransport
from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.remote.peer import connect
from asynckv.buffers.serve import serve
from asynckv.errors import RemoteProtocolError
from asynckv.links.link import OWN_WORK_S, STALL_S, Progress
from harness.simulation.machines import Machines, open_machines
from harness.simulation.nodes import Process

_ENTRY_BYTES: Final = 400_000


class Landing:
    """A transport as far as progress is concerned."""

    def __init__(self) -> None:
        self.nbytes: dict[int, int] = {}

    def landed_bytes(self, transfer: int) -> int:
        return self.nbytes.get(transfer, 0)


class Watched:
    """The progress of one link, in virtual time."""

    def __init__(self, machines: Machines) -> None:
        self.landing = Landing()
        self.errors: list[RemoteProtocolError] = []
        self.node = machines.add("one")
        self._world = machines.world
        self.node.start(self._watch)
        self.run(1)

    async def _watch(self, process: Process) -> None:
        transport = cast(PayloadTransport, self.landing)
        self.progress = Progress(transport, self.errors.append)
        await asyncio.sleep(10_000)

    def expect(self, *transfers: int) -> None:
        with self.node.inside():
            for transfer in transfers:
                self.progress.expect(transfer)

    @contextlib.contextmanager
    def working(self, transfer: int) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            with self.node.inside():
                stack.enter_context(self.progress.working(transfer))
            yield

    def run(self, seconds: float) -> int:
        """Let time pass; return how often a stall was told."""
        self._world.run(lambda: False, self._world.now + seconds)
        return len(self.errors)


@pytest.fixture
def watched() -> Iterator[Watched]:
    with open_machines(seed=1) as machines:
        yield Watched(machines)


def test_bytes_that_do_not_come_are_told_once(watched: Watched) -> None:
    watched.expect(1, 3)
    assert watched.run(29) == 0
    assert watched.run(1000) == 1
    assert "stood still for 30 s" in str(watched.errors[0])


def test_a_stall_is_told_35_s_after_the_last_byte_at_most(watched: Watched) -> None:
    watched.expect(1)
    watched.run(11)
    watched.landing.nbytes[1] = 1
    assert watched.run(29.5) == 0
    assert watched.run(5.5) == 1


def test_a_byte_of_any_of_them_is_progress(watched: Watched) -> None:
    watched.expect(1, 3)
    for count in range(1, 10):
        watched.landing.nbytes[3] = count
        assert watched.run(20) == 0
    assert watched.run(20) == 1


@pytest.mark.parametrize(
    ("happens", "lasts_s"),
    [
        (lambda watched: watched.expect(3), 0),
        (lambda watched: watched.progress.note(1), 0),
        (lambda watched: watched.node.freeze(100), 100),
    ],
    ids=["another is expected", "some came by another way", "this loop was late"],
)
def test_nobody_is_judged_for_a_while_after(
    watched: Watched, happens: Callable[[Watched], None], lasts_s: float
) -> None:
    watched.expect(1)
    watched.run(28)
    happens(watched)
    assert watched.run(lasts_s + 29) == 0
    assert watched.run(10) == 1


def test_what_has_landed_is_not_watched(watched: Watched) -> None:
    watched.expect(1)
    watched.progress.forget(1)
    assert watched.run(100) == 0


def test_time_in_which_nothing_was_expected_does_not_count(watched: Watched) -> None:
    watched.expect(1)
    watched.run(4)
    watched.progress.forget(1)
    watched.run(1000)
    watched.expect(3)
    assert watched.run(29) == 0


def test_what_this_side_is_at_work_at_is_not_judged(watched: Watched) -> None:
    watched.expect(1)
    with watched.working(1):
        assert watched.run(200) == 0
    assert watched.run(24) == 0
    assert watched.run(11) == 1


def test_what_others_owe_is_judged_meanwhile(watched: Watched) -> None:
    watched.expect(1, 3)
    with watched.working(1), watched.working(1):
        assert watched.run(36) == 1


def test_work_that_hangs_is_judged_too(watched: Watched) -> None:
    watched.expect(1)
    with watched.working(1):
        assert watched.run(OWN_WORK_S + 20) == 0
        assert watched.run(20) == 1


def test_it_says_at_what_this_side_is_at_work(watched: Watched) -> None:
    with watched.working(1):
        with watched.node.inside():
            assert watched.progress.is_working(1)
            assert not watched.progress.is_working(3)
        watched.run(OWN_WORK_S)
        with watched.node.inside():
            assert not watched.progress.is_working(1)


def test_a_part_never_sent_of_what_is_worked_at_is_told(watched: Watched) -> None:
    watched.expect(1)
    watched.run(29)
    with watched.working(1):
        assert watched.run(OWN_WORK_S) == 0
        assert watched.run(35) == 1


def test_what_is_stopped_is_not_watched(watched: Watched) -> None:
    watched.expect(1)
    watched.progress.stop()
    assert watched.run(100) == 0


class Transfers:
    """A client that takes large entries from a server without a pause."""

    def __init__(self, machines: Machines) -> None:
        self.machines = machines
        self.taken = 0
        self.longest_s = 0.0
        self.server, self.client = machines.add("server"), machines.add("client")
        self.server.start(self._serve)
        self.client.start(self._take_all)

    def run(self, seconds: float) -> int:
        """Let time pass; return how many entries were taken meanwhile."""
        before, world = self.taken, self.machines.world
        world.run(lambda: False, world.now + seconds)
        return self.taken - before

    async def _serve(self, process: Process) -> None:
        buffer = LookupBuffer(8 * _ENTRY_BYTES)
        url = f"tcp://{process.host}:7000"
        async with buffer, serve(url, lookup=buffer, lanes=2):
            for number in itertools.count():
                entry = torch.zeros(_ENTRY_BYTES, dtype=torch.uint8)
                await buffer.insert([number], None, entry, None, None)

    async def _take_all(self, process: Process) -> None:
        async with (
            connect(f"tcp://{self.server.host}:7000", lanes=2) as peer,
            asyncio.TaskGroup() as group,
        ):
            for _ in range(2):
                group.create_task(self._take(process, peer.lookup))

    async def _take(self, process: Process, lookup: KVLookupBuffer) -> None:
        while True:
            begun_s = process.time()
            await lookup.drop_select(None, None)
            self.longest_s = max(self.longest_s, process.time() - begun_s)
            self.taken += 1


@pytest.mark.trust
def test_a_lane_that_is_cut_is_noticed_while_others_carry_on() -> None:
    with open_machines(seed=1) as machines:
        transfers = Transfers(machines)
        assert transfers.run(30) > 20
        *_, lane = machines.network.between(
            transfers.client.host, transfers.server.host
        )
        lane.cut(dialler=False, acceptor=False)
        assert transfers.run(100) > 20
        # Whoever waited on that lane went on too.
        assert STALL_S - 1 < transfers.longest_s < STALL_S + 5
