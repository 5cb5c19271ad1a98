"""Kill producers and consumers in mid-transfer, and judge what is left.

The buffer lives in this process and outlives them all.
"""

from __future__ import annotations

import asyncio
import random
import signal
from typing import Any, Final

from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.serve import serve
from asynckv.testing.blocked import until
from asynckv.testing.crashes.account import Account, Findings
from asynckv.testing.crashes.contents import is_right
from asynckv.testing.crashes.orders import Order, Role
from asynckv.testing.crashes.workshop import Workshop, open_workshop

__all__ = ("kill_workers",)

_BUFFER_BYTES: Final = 8 * 2**20
_LONGEST_PAUSE_S: Final = 0.02


async def kill_workers(
    url: str,
    kills: int,
    seed: int = 0,
    *,
    couples: int = 2,
    serve_options: dict[str, Any] | None = None,
    connect_options: dict[str, Any] | None = None,
) -> Findings:
    """Let producers and consumers work at a buffer here, and kill them one by one.

    Each is forked anew at once, under its old name with a new incarnation, and
    a producer begins with what it does not know to be in. Which one is killed,
    and when, follows from ``seed``; what the machine does meanwhile does not.
    """
    account = Account()
    buffer = LookupBuffer(_BUFFER_BYTES, max_deliver=10**9, drain_s=0)
    async with (
        buffer,
        serve(url, lookup=buffer, **(serve_options or {})) as server,
        open_workshop(account.hear) as workshop,
    ):
        crew = _Crew(workshop, account, server.url, seed, connect_options or {})
        for number in range(couples):
            await crew.hire("producer", f"producer_{number}")
            await crew.hire("consumer", f"consumer_{number}")
        while account.kills < kills:
            await crew.kill_one()
        await crew.dismiss()
        await until(lambda: _is_quiet(buffer), timeout_s=10)
        before_drain = buffer.statistics()
        return account.close(await _drain(buffer, account), before_drain)


class _Crew:
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

    async def hire(self, role: Role, name: str) -> None:
        order = Order(
            role=role,
            name=name,
            url=self._url,
            seed=self._chance.getrandbits(32),
            first=self._account.next_number(name),
            options=self._options,
        )
        self._workers[name] = (role, await self._workshop.start(order))

    async def kill_one(self) -> None:
        name = self._chance.choice(sorted(self._workers))
        role, pid = self._workers[name]
        await self._workshop.steps(pid, self._chance.randint(1, 6))
        await asyncio.sleep(self._chance.uniform(0, _LONGEST_PAUSE_S))
        await self._workshop.signal(pid, signal.SIGKILL)
        await self.hire(role, name)

    async def dismiss(self) -> None:
        for _, pid in self._workers.values():
            await self._workshop.signal(pid, signal.SIGKILL)


def _is_quiet(buffer: LookupBuffer) -> bool:
    now = buffer.statistics()
    return not (now.leased or now.waiting_inserts or now.waiting_selects)


async def _drain(buffer: LookupBuffer, account: Account) -> list[str]:
    left = []
    while buffer.statistics().entries:
        entry = await asyncio.wait_for(buffer.drop_select(), 5)
        if not is_right(entry.entry_id, entry):
            account.find(f"wrong bytes in {entry.entry_id}, left in the buffer")
        left.append(entry.entry_id)
    if now := buffer.statistics().used_bytes:
        account.find(f"{now} bytes in use by nothing")
    return left
