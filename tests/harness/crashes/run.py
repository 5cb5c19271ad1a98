"""Runs of real processes under load, and the verdict on what they leave.

The buffer lives in this process and outlives them all.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any, Final

from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.serve import Server, serve
from asynckv.security.tls import TLS
from asynckv.testing.blocked import until
from harness.crashes.account import Account, Findings
from harness.crashes.contents import is_right
from harness.crashes.crew import Crew
from harness.crashes.footprint import Footprint, count_threads
from harness.crashes.witness import watch_acknowledgements
from harness.crashes.workshop import open_workshop

__all__ = ("judge", "kill_workers", "leave_under_load", "new_buffer", "soak")

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
