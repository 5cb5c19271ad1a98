from __future__ import annotations

import asyncio
import functools

from asynckv.abc import KVTransferResults
from asynckv.connectors.transfers import Transfers


async def nothing() -> None:
    pass


async def fails() -> None:
    raise ValueError("no")


async def for_ever() -> None:
    await asyncio.get_running_loop().create_future()


async def ended(transfers: Transfers, count: int = 1) -> None:
    done = asyncio.Event()
    left = count

    def one_ended() -> None:
        nonlocal left
        left -= 1
        if not left:
            done.set()

    transfers.call_when_ended(one_ended)
    await done.wait()


async def test_each_end_is_told_once_with_its_reason() -> None:
    transfers = Transfers()
    transfers.begin("good", "recv", nothing, [1])
    transfers.begin("bad", "recv", fails, [2, 3])
    transfers.begin("sent", "send", fails)
    await ended(transfers, 3)
    results = transfers.results()
    assert results.finished_recving == {"good", "bad"}
    assert results.failed_recving == {"bad"}
    assert results.invalid_block_ids == {2, 3}
    assert results.failed_sending == results.finished_sending == {"sent"}
    assert results.reasons["bad"] == "ValueError: no"
    assert not transfers.results()


async def test_one_that_could_not_begin_is_told_too() -> None:
    transfers = Transfers()
    told: list[KVTransferResults] = []
    transfers.call_when_ended(lambda: told.append(transfers.results()))
    transfers.refuse("r", "recv", [1, 2], "no such peer")
    assert told[0].finished_recving == told[0].failed_recving == {"r"}
    assert told[0].invalid_block_ids == {1, 2}
    assert told[0].reasons == {"r": "no such peer"}


async def test_a_cancelled_one_is_told_when_it_is_quiet() -> None:
    transfers, quiet = Transfers(), asyncio.Event()

    async def stubborn() -> None:
        try:
            await for_ever()
        finally:
            await quiet.wait()

    transfers.begin("r", "recv", stubborn, [1])
    await asyncio.sleep(0)
    transfers.cancel("r", "recv")
    await asyncio.sleep(0)
    assert not transfers.results()
    quiet.set()
    await ended(transfers)
    assert transfers.results().reasons == {"r": "cancelled"}


async def test_what_takes_too_long_is_given_up() -> None:
    transfers = Transfers()
    slow = transfers.begin("slow", "send", for_ever)
    fast = transfers.begin("fast", "send", nothing)
    assert slow is not None and fast is not None
    for life in (slow, fast):
        transfers.fail_after(life, 0.01)
    await ended(transfers, 2)
    results = transfers.results()
    assert results.failed_sending == {"slow"}
    assert "longer than 0.01 s" in results.reasons["slow"]


async def test_of_those_that_failed_it_is_said_which_found_no_room() -> None:
    transfers = Transfers()
    for name, is_full in (("full", True), ("slow", False)):
        life = transfers.begin(name, "send", for_ever)
        assert life is not None
        transfers.fail_after(life, 0.01, lacks_room=functools.partial(bool, is_full))
    transfers.refuse("refused", "send", (), "no room", lacks_room=True)
    transfers.refuse("unknown", "send", (), "no such peer")
    await ended(transfers, 2)
    results = transfers.results()
    assert results.failed_sending == {"full", "slow", "refused", "unknown"}
    assert results.full_sending == {"full", "refused"}


async def test_a_request_has_one_transfer_of_a_way() -> None:
    transfers = Transfers()
    assert transfers.begin("r", "recv", for_ever) is not None
    assert transfers.begin("r", "recv", for_ever) is None
    assert transfers.count("recv") == 1
    await transfers.aclose()
    assert transfers.results().failed_recving == {"r"}


async def test_closing_ends_what_nobody_is_told_of_too() -> None:
    transfers = Transfers()
    transfers.begin_unreported(for_ever, "other")
    transfers.begin_unreported(fails, "failing")
    waiting = asyncio.create_task(transfers.wait_others())
    await asyncio.sleep(0)
    await transfers.aclose()
    await waiting
    transfers.begin_unreported(for_ever, "late")
    assert transfers.others == 0


async def test_of_what_may_be_given_up_the_oldest_is() -> None:
    transfers, done = Transfers(), list[int]()

    async def wait(number: int) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            done.append(number)

    transfers.begin_unreported(functools.partial(wait, -1), "one that is needed")
    for number in range(5):
        await asyncio.sleep(0)
        run = functools.partial(wait, number)
        transfers.begin_unreported(run, "one of five", at_most=2)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert (done, transfers.others) == ([0, 1, 2], 3)
    await transfers.aclose()
