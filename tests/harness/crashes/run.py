"""Runs of real processes under load, and the verdict on what they leave.

The buffer lives in this process and outlives them all.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import dataclasses
import gc
import os
import random
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Final

from asynckv.buffers.entries.entries import Lease
from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.serve import Server, serve
from asynckv.security.tls import TLS
from asynckv.testing.blocked import until
from harness.crashes.account import Account, Findings
from harness.crashes.workers import Order, Role, is_right
from harness.crashes.workshop import Workshop, open_workshop

__all__ = (
    "Crew",
    "Footprint",
    "count_threads",
    "judge",
    "kill_workers",
    "leave_under_load",
    "new_buffer",
    "soak",
    "watch_acknowledgements",
)


_BUFFER_BYTES: Final = 8 * 2**20
_CALM_PAUSE_S: Final = 1.0
_FIRST_ENTRIES: Final = 50
_QUIET_S: Final = 10.0


async def kill_workers(
    url: str,
    kills: int,
    seed: int = 0,
    *,
    couples: int = 2,
    tls: TLS | None = None,
) -> Findings:
    """Let producers and consumers work at a buffer here, and kill them one by one.

    Each is forked anew at once, under its old name with a new incarnation, and
    a producer begins with what it does not know to be in. Which one is killed,
    and when, follows from ``seed``; what the machine does meanwhile does not.
    """
    account = Account()
    async with (
        new_buffer(account) as buffer,
        serve(url, lookup=buffer, tls=tls) as server,
        _crew_at(server, account, seed, tls) as crew,
    ):
        await crew.hire_couples(couples)
        while account.kills < kills:
            await crew.kill_one()
        await crew.dismiss()
        return await judge(buffer, account)


async def leave_under_load(
    url: str, seed: int = 0, *, couples: int = 2, steps: int = 30
) -> Findings:
    """Let a server leave while producers and consumers work at it."""
    account = Account(server_leaves=True)
    async with new_buffer(account) as buffer:
        server = serve(url, lookup=buffer)
        await server.__aenter__()
        try:
            async with _crew_at(server, account, seed, None) as crew:
                await crew.hire_couples(couples)
                await crew.steps(steps)
                await server.aclose()
                await crew.dismiss()
                return await judge(buffer, account)
        finally:
            await server.aclose()


async def soak(
    url: str, seconds: float, seed: int = 0, *, couples: int = 2
) -> tuple[Findings, Footprint, Footprint]:
    """Work for so long, with a death now and then: findings, and what was in use.

    The footprints were taken while nobody worked: after a tenth of the time, and
    some entries at least (else what is made by the first of them has grown), and
    at the end.
    """
    account = Account()
    async with (
        new_buffer(account) as buffer,
        serve(url, lookup=buffer) as server,
        _crew_at(server, account, seed, None) as crew,
    ):
        early = await _work_for(seconds / 10, crew, couples, buffer)
        late = await _work_for(seconds * 9 / 10, crew, couples, buffer)
        return await judge(buffer, account), early, late


async def _work_for(
    seconds: float, crew: Crew, couples: int, buffer: LookupBuffer
) -> Footprint:
    await crew.hire_couples(couples)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline or _count_remembered(buffer) < _FIRST_ENTRIES:
        await crew.kill_one(_CALM_PAUSE_S)
    await crew.dismiss()
    await until(lambda: _is_quiet(buffer), timeout_s=_QUIET_S)
    with contextlib.suppress(TimeoutError):  # then they are counted
        await until(lambda: not count_threads(), timeout_s=_QUIET_S)
    return Footprint.now(buffer)


def _count_remembered(buffer: LookupBuffer) -> int:
    return len(buffer.ledger.table.tombstones)


def new_buffer(account: Account) -> LookupBuffer:
    """Return a buffer whose acknowledgements ``account`` hears of."""
    buffer = LookupBuffer(_BUFFER_BYTES, max_deliver=10**9, drain_s=0)
    watch_acknowledgements(buffer, account.hear_acknowledged)
    return buffer


@contextlib.asynccontextmanager
async def _crew_at(
    server: Server, account: Account, seed: int, tls: TLS | None
) -> AsyncIterator[Crew]:
    options: dict[str, Any] = {}
    if tls is not None:  # orders hold plain values
        certificate, key, ca = tls.paths
        options["tls"] = {"certificate": certificate, "key": key, "ca": ca}
    async with open_workshop(account.hear) as workshop:
        yield Crew(workshop, account, server.url, seed, options)


async def judge(buffer: LookupBuffer, account: Account) -> Findings:
    """Drain what is left when nobody works any more, and close the account."""
    await until(lambda: _is_quiet(buffer), timeout_s=_QUIET_S)
    before_drain = buffer.statistics()
    left = []
    while buffer.statistics().entries:
        entry = await asyncio.wait_for(buffer.drop_select(), _QUIET_S)
        if not is_right(entry.entry_id, entry):
            account.find(f"wrong bytes in {entry.entry_id}, left in the buffer")
        left.append(entry.entry_id)
    if now := buffer.statistics().used_bytes:
        account.find(f"{now} bytes in use by nothing")
    return account.close(left, before_drain)


def _is_quiet(buffer: LookupBuffer) -> bool:
    now = buffer.statistics()
    if now.leased or now.waiting_inserts or now.waiting_selects:
        return False
    # A stream whose writer was killed stays until the buffer learns of it.
    return all(entry.complete for entry in buffer.ledger.table.entries.values())


_PAGES = 1


@dataclasses.dataclass(frozen=True)
class Footprint:
    """Counts at one moment, of this process and of one buffer.

    ``resident_bytes`` are without what malloc keeps for later, where it can be
    told not to. ``remembered`` entries have left: a buffer knows the last of them,
    so many and so long, to answer who asks again.
    """

    tasks: int
    threads: int
    descriptors: int
    resident_bytes: int
    leased: int
    waiting: int
    remembered: int

    @classmethod
    def now(cls, buffer: LookupBuffer) -> Footprint:
        """Look. Blocks for the garbage collector."""
        gc.collect()
        if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
            trim(0)
        state = buffer.statistics()
        pages = int(Path("/proc/self/statm").read_text().split()[_PAGES])
        return cls(
            tasks=len(asyncio.all_tasks()),
            threads=count_threads(),
            descriptors=len(os.listdir("/proc/self/fd")),
            resident_bytes=pages * os.sysconf("SC_PAGE_SIZE"),
            leased=state.leased,
            waiting=state.waiting_inserts + state.waiting_selects,
            remembered=len(buffer.ledger.table.tombstones),
        )


def count_threads() -> int:
    """Return how many of asynckv's threads run. Those that copy end when idle."""
    return sum(t.name.startswith("asynckv") for t in threading.enumerate())


def watch_acknowledgements(
    buffer: LookupBuffer, hear: Callable[[str, str], None]
) -> None:
    """Call ``hear(entry_id, consumer)`` for each that counts from now on.

    What its consumers say of themselves is compared with it: an entry that was
    acknowledged for one that was dead before it could have done so is lost.
    """
    leases = buffer.ledger.leases
    acknowledge = leases.acknowledge

    def acknowledge_and_tell(lease: Lease) -> None:
        acknowledge(lease)
        hear(lease.entry.entry_id, lease.holder.consumer)

    vars(leases)["acknowledge"] = acknowledge_and_tell


class Crew:
    """Workers by name: who is killed is forked anew, and goes on where it was."""

    def __init__(
        self,
        workshop: Workshop,
        account: Account,
        url: str,
        seed: int,
        options: dict[str, Any],
    ) -> None:
        self._workshop = workshop
        self._account = account
        self._url = url
        self._options = options
        self._chance = random.Random(seed)
        self._workers: dict[str, tuple[Role, int]] = {}

    async def hire_couples(self, count: int) -> None:
        """Start as many producers, and as many consumers."""
        for number in range(count):
            await self.hire("producer", f"producer_{number}")
            await self.hire("consumer", f"consumer_{number}")

    async def hire(self, role: Role, name: str) -> None:
        """Start one worker, or its next incarnation."""
        order = Order(
            role=role,
            name=name,
            url=self._url,
            seed=self._chance.getrandbits(32),
            first=self._account.next_number(name),
            options=self._options,
        )
        self._workers[name] = (role, await self._workshop.start(order))

    async def kill_one(self, longest_pause_s: float = 0.02) -> None:
        """Kill one of them, at a random moment of its work, and start it anew."""
        name = self._chance.choice(sorted(self._workers))
        role, pid = self._workers[name]
        await self._workshop.steps(pid, self._chance.randint(1, 6))
        await asyncio.sleep(self._chance.uniform(0, longest_pause_s))
        await self._workshop.signal(pid, signal.SIGKILL)
        await self.hire(role, name)

    async def steps(self, count: int) -> None:
        """Wait until each has made ``count`` reports, or is gone."""
        for _, pid in self._workers.values():
            await self._workshop.steps(pid, count)

    async def dismiss(self) -> None:
        """Kill them all."""
        for _, pid in self._workers.values():
            await self._workshop.signal(pid, signal.SIGKILL)
