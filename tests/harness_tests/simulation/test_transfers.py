"""Both machines of a transfer against each other: every seed keeps the promises."""

from __future__ import annotations

import collections
from collections.abc import Callable

import pytest

from asynckv.protocol.transfer import ReceiveState, SendState, Verdict
from asynckv.protocol.transfer_frames import Sent
from harness.simulation.transfers import tell_transfer

SEEDS = 2000


def test_every_seed_keeps_the_promises_of_a_transfer() -> None:
    stories = [tell_transfer(seed) for seed in range(SEEDS)]
    seen = collections.Counter[str]()
    for story in stories:
        seen["whole"] += story.is_whole
        seen["lost"] += story.receiver.is_lost
        seen["lost and whole"] += story.receiver.is_lost and story.is_whole
        seen["stopped"] += story.receiver.is_stopped
        seen["differed"] += bool(story.differed)
    assert seen["whole"] > SEEDS // 2
    assert min(seen.values()) > SEEDS // 100, seen


def test_one_seed_is_one_story() -> None:
    first, second = tell_transfer(7), tell_transfer(7)
    assert first.told == second.told and first.memory == second.memory


def believes_all(patch: pytest.MonkeyPatch) -> None:
    compare = ReceiveState.compare

    def believe(self: ReceiveState, part: int, landed: bytes, sent: bytes) -> Verdict:
        return compare(self, part, sent, sent)

    patch.setattr(ReceiveState, "compare", believe)


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
    [believes_all, tells_again, hears_who_is_gone, says_all_of_it, sends_nothing_anew],
)
def test_what_breaks_a_promise_is_noticed(
    mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    with pytest.raises(Exception):  # noqa: B017 - whatever is noticed
        for seed in range(SEEDS):
            tell_transfer(seed)
