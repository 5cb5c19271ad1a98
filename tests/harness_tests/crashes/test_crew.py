from __future__ import annotations

from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.serve import serve
from harness.crashes.account import Account
from harness.crashes.crew import Crew
from harness.crashes.workshop import open_workshop


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
