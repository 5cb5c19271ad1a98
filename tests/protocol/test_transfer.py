"""Both machines of a transfer: what counts, in whatever order it comes."""

from __future__ import annotations

import copy
import itertools
from typing import Any, Final, Literal

import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from asynckv.errors import RemoteProtocolError
from asynckv.protocol.transfer import (
    NEVER_OFFERED,
    STILL_LEAVING,
    ReceiveState,
    SendState,
    Verdict,
)
from asynckv.protocol.transfer_frames import Eager, Grant, RouteName, Sent
from harness.simulation.transfers import tell_transfer

EVERY: Final[tuple[RouteName, ...]] = ("link", "nccl", "cuda_ipc")


def inside(state: SendState | ReceiveState) -> dict[str, Any]:
    """Everything that a state holds, to be compared."""
    return {name: copy.copy(getattr(state, name)) for name in state.__slots__}


def refuses(state: ReceiveState, frame: Sent | Eager, why: str) -> None:
    """The frame makes no sense, and changes nothing."""
    before = inside(state)
    with pytest.raises(RemoteProtocolError, match=why):
        if isinstance(frame, Sent):
            state.on_sent(frame)
        else:
            state.on_eager(frame, 4)
    assert inside(state) == before


# what is sent


def holding(count: int = 0, *, routes: tuple[RouteName, ...] = EVERY) -> SendState:
    """A transfer that is offered, with parts that are there."""
    state = SendState(4, routes)
    for part in range(count):
        assert not state.add(part)
    return state


def test_what_is_there_leaves_when_it_is_granted() -> None:
    state = holding(2)
    assert (state.transfer, state.route) == (4, "link")
    assert not state.is_granted and not state.is_stopped
    assert state.on_grant(Grant(4)) == [0, 1]
    assert state.is_granted and not state.is_stopped


def test_what_is_there_later_leaves_at_once() -> None:
    state = holding()
    assert state.on_grant(Grant(4)) == []
    assert state.add(0)
    assert state.sent(0, b"digest") == Sent(4, 0, b"digest")


def test_each_part_is_said_once_a_grant_and_none_that_does_not_leave() -> None:
    state = holding(1)
    assert state.sent(0, b"digest") is None
    assert state.on_grant(Grant(4)) == [0]
    assert state.sent(1, b"digest") is None
    assert state.sent(0, b"digest") == Sent(4, 0, b"digest", "full", "link", None)
    assert state.sent(0, b"digest") is None


def test_what_is_said_names_its_route_and_where_it_lies() -> None:
    state = holding(1)
    assert state.on_grant(Grant(4, "cuda_ipc")) == [0]
    assert state.route == "cuda_ipc"
    said = Sent(4, 0, b"edges", "edges", "cuda_ipc", 4096)
    assert state.sent(0, b"edges", "edges", 4096) == said


@pytest.mark.parametrize("route", ["nccl", "cuda_ipc"])
def test_what_a_route_has_lost_leaves_anew_but_for_what_left_beside_it(
    route: RouteName,
) -> None:
    state = holding(3)
    assert state.on_grant(Grant(4, route)) == [0, 1, 2]
    state.left(1)
    assert state.sent(1, b"") is None
    assert state.sent(0, b"digest") is not None
    assert state.on_grant(Grant(4)) == [0, 2]
    assert state.route == "link"
    assert state.sent(1, b"") is None
    assert state.sent(2, b"") is not None and state.sent(0, b"") is not None


def test_what_left_beside_a_route_has_not_left_beside_the_next() -> None:
    state = holding(2)
    assert state.on_grant(Grant(4, "nccl")) == [0, 1]
    state.left(1)
    assert state.on_grant(Grant(4)) == [0]
    assert state.sent(0, b"digest") is not None
    assert state.on_grant(Grant(4, "nccl")) == [0, 1]
    assert state.on_grant(Grant(4)) == [0, 1]


def test_what_was_granted_by_the_link_leaves_anew_whole() -> None:
    state = holding(2)
    for _ in range(2):
        assert state.on_grant(Grant(4)) == [0, 1]
        state.left(1)
        assert state.sent(0, b"digest") is not None
    assert state.on_grant(Grant(4, "nccl")) == [0, 1]


@pytest.mark.parametrize("route", EVERY)
def test_what_still_leaves_by_the_link_is_not_granted_once_more(
    route: RouteName,
) -> None:
    state = holding(2)
    assert state.on_grant(Grant(4)) == [0, 1]
    assert state.sent(0, b"digest") is not None
    before = inside(state)
    with pytest.raises(RemoteProtocolError, match=f"^{STILL_LEAVING}"):
        state.on_grant(Grant(4, route))
    assert inside(state) == before


@pytest.mark.parametrize(("transfer", "raises"), [(3, False), (4, False), (5, True)])
def test_a_grant_of_what_has_ended_is_ignored_and_one_of_nothing_refused(
    transfer: int, raises: bool
) -> None:
    state = holding(1)
    state.stop()
    if raises:
        with pytest.raises(RemoteProtocolError, match=NEVER_OFFERED):
            state.on_grant(Grant(transfer))
    else:
        assert state.on_grant(Grant(transfer)) is None
    assert NEVER_OFFERED == "a grant of what was never offered"


def test_a_grant_of_another_transfer_changes_nothing() -> None:
    state = holding(1)
    before = inside(state)
    assert state.on_grant(Grant(3)) is None
    with pytest.raises(RemoteProtocolError, match=f"^{NEVER_OFFERED}"):
        state.on_grant(Grant(5))
    assert inside(state) == before


@pytest.mark.parametrize("routes", [("link",), ("link", "nccl")])
def test_only_what_was_offered_is_granted(routes: tuple[RouteName, ...]) -> None:
    state = holding(1, routes=routes)
    before = inside(state)
    with pytest.raises(RemoteProtocolError, match="^a grant of memory that nothing"):
        state.on_grant(Grant(4, "cuda_ipc"))
    assert inside(state) == before


@pytest.mark.parametrize("routes", [*itertools.product(EVERY[1:], repeat=2)])
def test_the_memory_of_a_gpu_is_granted_once(
    routes: tuple[RouteName, RouteName],
) -> None:
    state = holding(1)
    state.on_grant(Grant(4, routes[0]))
    before = inside(state)
    with pytest.raises(RemoteProtocolError, match="^a second grant of a GPU's memory"):
        state.on_grant(Grant(4, routes[1]))
    assert inside(state) == before


def test_what_is_stopped_neither_leaves_nor_is_said() -> None:
    state = holding(2)
    state.on_grant(Grant(4))
    state.stop()
    assert state.is_stopped
    assert state.sent(0, b"digest") is None and not state.add(2)
    assert state.on_grant(Grant(4)) is None
    assert not inside(state)["_parts"] and not inside(state)["_leaving"]


# what is received


def granted(
    *sizes: int, route: RouteName = "link", confirms: bool = False, eager: int = -1
) -> ReceiveState:
    state = ReceiveState(4, sizes, max_eager_nbytes=eager, confirms=confirms)
    assert state.grant(route) == Grant(4, route)
    return state


def test_what_is_small_comes_eagerly_and_all_else_by_the_route() -> None:
    state = ReceiveState(4, (8, 4, 5, 0), max_eager_nbytes=4)
    assert (state.transfer, state.eager, state.large) == (4, {1: 4, 3: 0}, [0, 2])
    assert not state.landing and not state.routed and not state.has_come
    assert state.grant("cuda_ipc", "off") == Grant(4, "cuda_ipc", "off")
    assert (state.route, state.routed, state.landing) == ("cuda_ipc", {0, 2}, set())
    state = ReceiveState(4, (8, 0))
    assert state.grant() == Grant(4, "link", "full")
    assert (state.route, state.routed, state.landing) == ("link", set(), {0, 1})


def test_what_has_no_parts_has_come() -> None:
    assert ReceiveState(4, ()).has_come


def test_what_is_received_comes_by_the_link_unless_another_route_is_granted() -> None:
    state = ReceiveState(4, (8,))
    assert state.route == "link"
    assert state.grant("nccl") == Grant(4, "nccl", "full")
    assert state.came(0, b"digest") == "verified" and state.has_come


EVENTS: Final = [(kind, part) for kind in ("landed", "sent") for part in range(3)]


def test_a_part_counts_once_both_have_happened_in_any_order() -> None:
    for order in itertools.permutations(EVENTS):
        state, seen = granted(8, 8, 8), list[int]()
        for kind, part in order:
            if kind == "landed":
                verdict = state.landed(part, b"of %d" % part)
            else:
                verdict = state.on_sent(Sent(4, part, b"of %d" % part))
            assert verdict == ("verified" if part in seen else "waits")
            seen.append(part)
            assert state.has_come is (len(seen) == 6)
        assert state.verified == {part: b"of %d" % part for part in range(3)}
        assert not state.landing


@pytest.mark.parametrize("is_first", [False, True])
def test_other_bytes_than_were_sent_are_no_part(is_first: bool) -> None:
    state = granted(8)
    if is_first:
        assert state.landed(0, b"here") == "waits"
        assert state.on_sent(Sent(4, 0, b"sent")) == "differs"
    else:
        assert state.on_sent(Sent(4, 0, b"sent")) == "waits"
        assert state.landed(0, b"here") == "differs"
    assert not state.verified and not state.has_come


def test_what_was_sent_is_not_sent_again() -> None:
    state = granted(8, 8)
    refuses(state, Sent(4, 2), "^a Sent for part 2 makes no sense")
    state.on_sent(Sent(4, 0))
    refuses(state, Sent(4, 0), "^a Sent for part 0 makes no sense")
    state.landed(0, b"")
    refuses(state, Sent(4, 0), "^a Sent for part 0 makes no sense")
    assert state.landed(0, b"") == "waits" and state.landed(2, b"") == "waits"


def test_nothing_is_sent_before_it_was_granted() -> None:
    refuses(ReceiveState(4, (8,)), Sent(4, 0), "makes no sense")


@pytest.mark.parametrize("frame", [Sent(5, 0), Eager(5, (1,), (b"d",))])
def test_parts_of_a_transfer_that_was_never_offered_are_refused(
    frame: Sent | Eager,
) -> None:
    state = granted(8, 4, eager=4)
    refuses(state, frame, "^a part of what was never offered")
    state.stop()
    refuses(state, frame, "^a part of what was never offered")


def test_what_a_transfer_before_has_left_behind_is_ignored() -> None:
    state = granted(8, 4, eager=4)
    before = inside(state)
    assert (
        state.on_sent(Sent(3, 0)) == "waits" and state.on_eager(Eager(3, (1,)), 4) == []
    )
    assert inside(state) == before


def test_small_parts_are_returned_with_sizes_and_digests_once() -> None:
    state = granted(8, 4, 3, eager=4)
    frame = Eager(4, (2, 1), (b"two", b"one"))
    assert state.on_eager(frame, 7) == [(2, 3, b"two"), (1, 4, b"one")]
    assert not state.eager and not state.verified
    refuses(state, frame, r"^parts \(2, 1\) came eagerly, not all awaited")
    assert state.compare(2, b"two", b"two") == "verified"
    assert state.compare(1, b"one", b"two") == "differs"
    assert state.verified == {2: b"two"}


def test_small_parts_may_come_without_digests() -> None:
    state = granted(4, eager=4)
    assert state.on_eager(Eager(4, (0,)), 4) == [(0, 4, b"")]


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        (Eager(4, (0,), (b"d",)), "not all awaited"),
        (Eager(4, (1, 1)), "not all awaited"),
        (Eager(4, (1, 0)), "not all awaited"),
        (Eager(4, (1,), (b"d", b"d")), "^Eager parts that are not what was offered"),
        (Eager(4, (1, 2), (b"d",)), "^Eager parts that are not what was offered"),
        (Eager(4, (1, 2)), "^Eager parts that are not what was offered"),
        (Eager(4, (2,)), "^Eager parts that are not what was offered"),
    ],
    ids=repr,
)
def test_small_parts_that_make_no_sense_are_refused(frame: Eager, why: str) -> None:
    refuses(granted(8, 4, 3, eager=4), frame, why)


def test_what_a_route_has_compared_is_verified_once() -> None:
    state = granted(8, 8, route="nccl")
    assert state.on_sent(Sent(4, 0, b"digest", route="nccl")) == "read"
    assert state.came(0, b"digest") == "verified" and state.routed == {1}
    assert state.came(0, b"digest") == "waits"
    assert state.verified == {0: b"digest"} and not state.has_come
    assert state.came(1, b"other") == "verified" and state.has_come


@pytest.mark.parametrize(
    ("route", "said"), [*itertools.permutations(EVERY, 2)], ids=str
)
def test_a_part_that_is_sent_otherwise_than_was_granted_is_refused(
    route: RouteName, said: RouteName
) -> None:
    why = "makes no sense" if said == "link" else f"^a part by {said} was not asked for"
    refuses(granted(8, route=route), Sent(4, 0, route=said), why)


def test_what_the_peer_confirms_counts_when_it_has() -> None:
    state = granted(8, route="nccl", confirms=True)
    assert state.came(0, b"digest") == "confirm"
    assert not state.has_come and not state.verified and not state.routed
    assert state.came(0, b"digest") == "waits"
    assert state.on_sent(Sent(4, 0, route="nccl")) == "verified"
    assert state.has_come and state.verified == {0: b"digest"}
    assert state.on_sent(Sent(4, 0, route="nccl")) == "read"


def test_what_the_link_brings_needs_no_confirmation() -> None:
    state = granted(8, confirms=True)
    state.landed(0, b"digest")
    assert state.on_sent(Sent(4, 0, b"digest")) == "verified"


def test_a_lost_route_tells_nothing_more_and_all_comes_by_the_link() -> None:
    state = granted(8, 8, route="nccl")
    assert not state.is_lost and state.came(0, b"digest") == "verified"
    state.lose()
    assert state.is_lost and state.came(1, b"late") == "waits"
    assert state.on_sent(Sent(4, 1, route="nccl")) == "waits"
    assert state.grant() == Grant(4) and state.landing == {0, 1}
    assert state.on_sent(Sent(4, 1, route="nccl")) == "waits"  # late
    for part, verdict in ((0, "again"), (1, "verified")):
        assert state.landed(part, b"anew") == "waits"
        assert state.on_sent(Sent(4, part, b"anew")) == verdict
    assert state.has_come and state.verified == {0: b"digest", 1: b"anew"}


def test_what_was_not_confirmed_when_its_route_was_lost_comes_once_more() -> None:
    state = granted(8, route="nccl", confirms=True)
    state.came(0, b"digest")
    state.lose()
    state.grant()
    assert state.on_sent(Sent(4, 0, route="nccl")) == "waits"  # it had crossed that
    assert not state.verified
    assert state.on_sent(Sent(4, 0, b"anew")) == "waits"
    assert state.landed(0, b"anew") == "verified" and state.verified == {0: b"anew"}


@pytest.mark.parametrize("route", ["link", "nccl"])
def test_what_is_stopped_tells_nothing_more(route: RouteName) -> None:
    state = granted(8, 4, eager=4, route=route)
    state.on_sent(Sent(4, 0, b"digest", route=route))
    state.stop()
    assert state.is_stopped
    assert state.landed(0, b"digest") == "waits" and state.came(0, b"") == "waits"
    assert state.on_sent(Sent(4, 0, b"digest", route=route)) == "waits"
    assert state.on_eager(Eager(4, (1,)), 4) == [] and not state.verified
    assert not state.eager and not state.routed
    # Its transport is not quiet yet: whoever stops has to know.
    assert state.landing == ({0} if route == "link" else set())


# both, and any order at all


@given(seed=st.integers())
def test_both_sides_keep_the_promises_whatever_happens(seed: int) -> None:
    tell_transfer(seed)


Part: Final = st.integers(0, 3)
Digest: Final = st.sampled_from((b"sent", b"other"))


class Receiving(RuleBasedStateMachine):
    """Anything may be said and land, at any time: what counts are equal bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.state = ReceiveState(4, (8, 4, 8), max_eager_nbytes=4)
        self.state.grant("nccl")
        self.told = dict[int, bytes]()
        self.sent: dict[int, bytes] = {}
        self.landed: dict[int, bytes] = {}

    def note(self, part: int, verdict: Verdict, digest: bytes) -> None:
        if verdict == "verified":
            assert not self.state.is_stopped and part not in self.told
            self.told[part] = digest

    @rule(part=Part, digest=Digest)
    def land(self, part: int, digest: bytes) -> None:
        if part in self.state.landing and not self.state.is_stopped:
            self.landed[part] = digest
        verdict = self.state.landed(part, digest)
        self.note(part, verdict, digest)
        if verdict in ("verified", "again"):
            assert self.sent[part] == digest

    @rule(part=Part, digest=Digest, transfer=st.integers(3, 5))
    def send(self, part: int, digest: bytes, transfer: int) -> None:
        before = inside(self.state)
        try:
            verdict = self.state.on_sent(Sent(transfer, part, digest))
        except RemoteProtocolError:
            assert inside(self.state) == before
            return
        if transfer != 4 or self.state.is_stopped:
            assert verdict == "waits" and inside(self.state) == before
            return
        self.sent[part] = digest
        self.note(part, verdict, digest)
        if verdict in ("verified", "again"):
            assert self.landed[part] == digest

    @rule(parts=st.lists(Part, max_size=2), digest=Digest)
    def send_eagerly(self, parts: list[int], digest: bytes) -> None:
        before = inside(self.state)
        frame = Eager(4, tuple(parts), (digest,) * len(parts))
        try:
            found = self.state.on_eager(frame, 4 * len(parts))
        except RemoteProtocolError:
            assert inside(self.state) == before
            return
        for part, nbytes, sent in found:
            assert (part, nbytes, sent) == (1, 4, digest)
            self.note(part, self.state.compare(part, b"sent", sent), b"sent")

    @rule(part=Part)
    def come(self, part: int) -> None:
        verdict = self.state.came(part, b"compared")
        assert verdict == "waits" or not self.state.is_lost
        self.note(part, verdict, b"compared")

    @precondition(lambda self: not self.state.is_lost)
    @rule()
    def lose(self) -> None:
        self.state.lose()
        assert self.state.grant() == Grant(4)
        self.sent.clear()

    @rule(how=st.sampled_from(("stop", "go on", "go on", "go on")))
    def stop(self, how: Literal["stop", "go on"]) -> None:
        if how == "stop":
            self.state.stop()

    @invariant()
    def what_was_told_stays_so(self) -> None:
        assert self.state.verified == self.told
        assert self.state.has_come is (len(self.told) == 3)


TestReceiving = Receiving.TestCase
TestReceiving.settings = settings(deadline=None)
