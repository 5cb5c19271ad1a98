from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import msgspec
import pytest

from asynckv.buffers.entries.entries import Lease
from asynckv.buffers.entries.leases import Leases
from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.serve import serve
from asynckv.testing.blocked import until, until_blocked
from asynckv.types import TensorSpec
from harness.crashes.account import Account, Findings
from harness.crashes.run import Crew, Footprint, judge, new_buffer
from harness.crashes.workers import Order, Report
from harness.crashes.workshop import open_workshop


@pytest.fixture
async def local() -> AsyncIterator[LookupBuffer]:
    async with LookupBuffer("8MiB", drain_s=0) as buffer:
        yield buffer


async def test_who_is_killed_goes_on_where_it_was(local: LookupBuffer) -> None:
    account = Account()
    async with (
        serve("tcp://127.0.0.1:0", lookup=local) as server,
        open_workshop(account.hear) as workshop,
    ):
        crew = Crew(workshop, account, server.url, 1, {})
        await crew.hire("producer", "p")
        for _ in range(2):
            await crew.steps(3)
            await crew.kill_one()
        await crew.steps(3)
        await crew.dismiss()
    begun = account.begun["p"]
    assert account.kills == 3
    assert local.statistics().inserted in (begun, begun + 1)


async def test_it_counts_what_is_in_use(local: LookupBuffer) -> None:
    before = Footprint.now(local)
    waiting = asyncio.create_task(local.drop_select([1]))
    await until_blocked(waiting)
    now = Footprint.now(local)
    waiting.cancel()
    assert (now.tasks - before.tasks, now.waiting) == (1, 1)
    assert now.resident_bytes > 2**20 and now.descriptors > 2


async def test_the_verdict_waits_for_streams_of_the_dead_to_end() -> None:
    async with new_buffer(Account()) as buffer:
        specs = {"key": TensorSpec((4,), "uint8")}
        writing = buffer.open_insert(None, None, specs, entry_id="p-0")
        await writing.__aenter__()
        judging = asyncio.create_task(judge(buffer, Account()))
        for _ in range(100):
            await asyncio.sleep(0)
        assert not judging.done() and buffer.statistics().waiting_selects == 0
        await writing.__aexit__(OSError, OSError("its process was killed"), None)
        assert (await judging).wrongs == ()


def acknowledge_what_the_dead_had(patch: pytest.MonkeyPatch) -> None:
    give_back = Leases.give_back

    def give_back_or_lose(self: Leases, lease: Lease, *, reached: bool) -> None:
        if lease.reached and lease.is_valid:
            self.acknowledge(lease)
        else:
            give_back(self, lease, reached=reached)

    patch.setattr(Leases, "give_back", give_back_or_lose)


async def kill_in_its_body(seed: int) -> Findings:
    account = Account()
    async with (
        new_buffer(account) as buffer,
        serve("tcp://127.0.0.1:0", lookup=buffer) as server,
        open_workshop(account.hear) as workshop,
    ):
        producer = await workshop.start(Order("producer", "p", server.url, seed))
        consumer = await workshop.start(
            Order("consumer", "c", server.url, seed, longest_use_s=3600.0)
        )
        await until(lambda: told_last(account, consumer) == "got", timeout_s=60)
        # It says so before the frame leaves by which the buffer learns of it.
        await until(lambda: has_reached_somebody(buffer))
        for pid in (consumer, producer):
            await workshop.signal(pid, signal.SIGKILL)
        return await judge(buffer, account)


def has_reached_somebody(buffer: LookupBuffer) -> bool:
    entries = buffer.ledger.table.entries.values()
    return any(lease.reached for entry in entries for lease in entry.leases.values())


def told_last(account: Account, pid: int) -> str:
    return account.last[pid].word if pid in account.last else ""


@pytest.mark.trust
async def test_what_a_killed_one_had_in_its_body_is_given_back_or_found_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = await kill_in_its_body(seed=3)
    assert (found.kills, found.unseen, found.wrongs) == (2, 0, ())
    acknowledge_what_the_dead_had(monkeypatch)
    (wrong,) = (await kill_in_its_body(seed=3)).wrongs
    assert wrong.startswith("lost: p-")


def test_a_report_is_short_enough_to_be_written_whole() -> None:
    report = Report(2**22, "begun", "producer_99-" + "9" * 12, 10**12)
    assert len(msgspec.json.encode(report)) < 512


async def test_leaving_kills_who_still_works_and_who_fails_is_reported(
    local: LookupBuffer, capfd: pytest.CaptureFixture[str]
) -> None:
    told: list[Report] = []
    async with serve("tcp://127.0.0.1:0", lookup=local) as server:
        async with open_workshop(told.append) as workshop:
            pid = await workshop.start(Order("consumer", "c", server.url, seed=1))
            await workshop.steps(pid, 1)
            nowhere = Order("producer", "p", "unix:///nowhere/at/all", seed=1)
            failing = await workshop.start(nowhere)
            await workshop.steps(failing, 1)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    ends = {one.pid: one.number >> 8 for one in told if one.word == "gone"}
    assert ends[failing] == 1 and "PeerLost" in capfd.readouterr().err
