"""The workers of one run, and what befalls them."""

from __future__ import annotations

import asyncio
import random
import signal
from typing import Any

from harness.crashes.account import Account
from harness.crashes.orders import Order, Role
from harness.crashes.workshop import Workshop

__all__ = ("Crew",)


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
