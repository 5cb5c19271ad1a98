"""The checkers can fail: each fault put into the package is found in a few seeds."""

from __future__ import annotations

import asyncio
import collections
import itertools
from collections.abc import Callable
from typing import Any, Final

import pytest

from asynckv.buffers.entries.entries import Lease, StoredEntry, Waiter
from asynckv.buffers.entries.leases import Leases, Matcher
from asynckv.buffers.entries.ledger import Ledger
from asynckv.buffers.entries.prefix_index import PrefixIndex
from asynckv.buffers.entries.table import EntryTable
from asynckv.protocol.transfer import ReceiveState, SendState, Verdict
from asynckv.protocol.transfer_frames import Sent
from asynckv.tensors.arena import Arena
from asynckv.transfers.delivery import ReceiveBudget
from asynckv.transports.inline import InlineTransport
from asynckv.waits.waiting import FairQueue
from harness.simulation.transfers import tell_transfer
from harness.simulation.verdict import simulate

MAX_SEEDS: Final = 120


Mutation = Callable[[pytest.MonkeyPatch], None]


def a_give_back_forgets(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Leases, "_go_on", lambda self, entry: None)


def an_acknowledgement_leaves_the_entry(patch: pytest.MonkeyPatch) -> None:
    acknowledge = Leases.acknowledge

    def acknowledge_less(self: Leases, lease: Lease) -> None:
        lease.entry.deliveries_left += 1
        acknowledge(self, lease)

    patch.setattr(Leases, "acknowledge", acknowledge_less)


def a_stale_lease_counts(patch: pytest.MonkeyPatch) -> None:
    end = Leases._end

    def end_and_stay_valid(self: Leases, lease: Lease) -> None:
        if lease.token in lease.entry.leases:
            end(self, lease)
        lease.is_valid = True

    patch.setattr(Leases, "_end", end_and_stay_valid)


def a_cancelled_select_keeps_its_lease(patch: pytest.MonkeyPatch) -> None:
    def forget(self: Leases, waiter: Waiter) -> None:
        waiter.is_forgotten = True
        self._matcher.dequeue(waiter)

    patch.setattr(Leases, "forget", forget)


def nobody_is_told_of_changes(patch: pytest.MonkeyPatch) -> None:
    async def notify(self: FairQueue[Any]) -> None:
        pass

    patch.setattr(FairQueue, "_notify", notify)


def every_third_match_is_missed(patch: pytest.MonkeyPatch) -> None:
    next_for, count = Matcher.next_for, itertools.count(1)

    def miss(self: Matcher, entry: StoredEntry) -> Any:
        return None if next(count) % 3 == 0 else next_for(self, entry)

    patch.setattr(Matcher, "next_for", miss)


def one_token_is_enough(patch: pytest.MonkeyPatch) -> None:
    best = PrefixIndex.best

    def best_of_first(self: PrefixIndex[Any], key: bytes, **options: Any) -> Any:
        return best(self, key[:8], **options)

    patch.setattr(PrefixIndex, "best", best_of_first)


def a_resent_insert_is_new(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EntryTable, "known_digest", lambda self, entry_id: None)


def room_is_not_given_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Arena, "free", lambda self, regions: None)


def a_receive_bound_is_given_back_twice(patch: pytest.MonkeyPatch) -> None:
    release = ReceiveBudget.release

    def release_twice(self: ReceiveBudget, nbytes: int) -> None:
        release(self, nbytes)
        release(self, nbytes)

    patch.setattr(ReceiveBudget, "release", release_twice)


def payload_is_not_verified(patch: pytest.MonkeyPatch) -> None:
    compare = ReceiveState.compare

    def believe(self: ReceiveState, part: int, landed: bytes, sent: bytes) -> Any:
        return compare(self, part, sent, sent)

    patch.setattr(ReceiveState, "compare", believe)


def memory_is_not_quiet_after_a_cancel(patch: pytest.MonkeyPatch) -> None:
    async def quiesce(self: InlineTransport, transfer: int) -> None:
        pass

    patch.setattr(InlineTransport, "quiesce", quiesce)
    patch.setattr(InlineTransport, "stop", lambda self, transfer: None)


def a_ttl_is_over_at_once(patch: pytest.MonkeyPatch) -> None:
    make_ready = EntryTable.make_ready

    def make_ready_for_no_time(self: EntryTable, entry: StoredEntry) -> None:
        make_ready(self, entry)
        if entry.expires_at is not None:
            entry.expires_at = asyncio.get_running_loop().time()
            self._expiry.add(entry.expires_at, entry.entry_id)

    patch.setattr(EntryTable, "make_ready", make_ready_for_no_time)


def a_ttl_is_never_over(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EntryTable, "expire", lambda self, entry: False)


def a_withdrawal_takes_nothing(patch: pytest.MonkeyPatch) -> None:
    def withdraw(self: Ledger, entry_id: str) -> bool:
        return entry_id in self.table.entries

    patch.setattr(Ledger, "withdraw", withdraw)


QUICK: Final[tuple[Mutation, ...]] = (
    a_give_back_forgets,
    one_token_is_enough,
    a_receive_bound_is_given_back_twice,
)


SLOW: Final[tuple[Mutation, ...]] = (
    a_ttl_is_over_at_once,
    a_withdrawal_takes_nothing,
    an_acknowledgement_leaves_the_entry,
    a_stale_lease_counts,
    a_cancelled_select_keeps_its_lease,
    nobody_is_told_of_changes,
    every_third_match_is_missed,
    a_resent_insert_is_new,
    a_ttl_is_never_over,
    room_is_not_given_back,
    payload_is_not_verified,
    memory_is_not_quiet_after_a_cancel,
)


MUTATIONS: Final = (
    *QUICK,
    *(pytest.param(mutation, marks=pytest.mark.chaos) for mutation in SLOW),
)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mutate", MUTATIONS)
def test_a_fault_in_the_package_is_found_within_a_few_seeds(
    mutate: Mutation, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        mutate(patch)
        seeds = range(1000, 1000 + MAX_SEEDS)
        found = next((seed for seed in seeds if simulate(seed).broken), None)
    assert found is not None
    assert simulate(found).broken == ()


SEEDS = 2000


def test_every_seed_keeps_the_promises_of_a_transfer() -> None:
    seen = collections.Counter[str]()
    for story in map(tell_transfer, range(SEEDS)):
        seen["whole"] += story.is_whole
        seen["lost"] += story.receiver.is_lost
        seen["lost and whole"] += story.receiver.is_lost and story.is_whole
        seen["stopped"] += story.receiver.is_stopped
        seen["differed"] += bool(story.differed)
    assert seen["whole"] > SEEDS // 2
    assert min(seen.values()) > SEEDS // 100, seen
    assert tell_transfer(7).told == tell_transfer(7).told


def tells_again(patch: pytest.MonkeyPatch) -> None:
    compare = ReceiveState.compare

    def tell(self: ReceiveState, part: int, landed: bytes, sent: bytes) -> Verdict:
        verdict = compare(self, part, landed, sent)
        return "verified" if verdict == "again" else verdict

    patch.setattr(ReceiveState, "compare", tell)


def hears_who_is_gone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ReceiveState, "stop", lambda self: None)


def says_all_of_it(patch: pytest.MonkeyPatch) -> None:
    def sent(self: SendState, part: int, digest: bytes) -> Sent:
        return Sent(self.transfer, part, digest, "full", self.route)

    patch.setattr(SendState, "sent", sent)


def sends_nothing_anew(patch: pytest.MonkeyPatch) -> None:
    on_grant = SendState.on_grant

    def grant_once(self: SendState, grant: object) -> object:
        return None if self.is_granted else on_grant(self, grant)  # type: ignore[arg-type]

    patch.setattr(SendState, "on_grant", grant_once)


@pytest.mark.parametrize(
    "mutate",
    [
        payload_is_not_verified,
        tells_again,
        hears_who_is_gone,
        says_all_of_it,
        sends_nothing_anew,
    ],
)
def test_a_fault_in_a_transfer_is_found_within_a_few_seeds(
    mutate: Mutation, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    with pytest.raises(Exception):  # noqa: B017 - whatever is noticed
        for seed in range(SEEDS):
            tell_transfer(seed)
