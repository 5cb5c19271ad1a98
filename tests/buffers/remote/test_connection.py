"""Links that are cut, and what goes on at the next one."""

from __future__ import annotations

import asyncio
import itertools
import math
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

import pytest
import torch

from asynckv import LookupBuffer, Peer, Server, connect, serve
from asynckv.buffers.remote import connection
from asynckv.buffers.remote.connection import Backoff, ask
from asynckv.errors import AsyncKVError, PeerLost, PeerRestarted, RemoteProtocolError
from asynckv.links.link import Link, LinkStream
from asynckv.links.listen import listen
from asynckv.protocol.frames import (
    Accepted,
    Cancel,
    Cancelled,
    Failure,
    Frame,
    OpeningFrame,
    Peek,
    Result,
    Retract,
)
from asynckv.testing import until
from asynckv.testing.lookup_checks.values import started
from asynckv.testing.pairs import Peers
from harness.buffer_fixtures import CutWhen
from harness.link_pairs import Answer, ScriptedService, name_of

FarLink = Callable[[Server, Peer], Link]


async def test_waiting_calls_go_on_after_a_cut(
    peers: Peers, local: LookupBuffer
) -> None:
    lookup = peers.consumer.lookup
    calls = [asyncio.create_task(lookup.drop_select([n])) for n in (1, 2)]
    await until(lambda: local.statistics().waiting_selects == 2)
    (await peers.consumer.link()).abort()
    await until(lambda: not peers.consumer.is_connected)
    await local.insert([2], None, torch.ones(3), None, None)
    assert (await calls[1]).matched_tokens == 1
    await until(lambda: local.statistics().waiting_selects == 1)
    calls[0].cancel()
    await until(lambda: local.statistics().waiting_selects == 0)


async def test_a_dial_that_fails_as_nobody_thought_of_is_tried_again(
    peers: Peers,
    local: LookupBuffer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    waiting = asyncio.create_task(peers.consumer.lookup.drop_select([1]))
    await until(lambda: local.statistics().waiting_selects == 1)

    async def fail_once(*args: Any, **kwargs: Any) -> Link:
        monkeypatch.undo()
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(peers.consumer, "_new_link", fail_once)
    (await peers.consumer.link()).abort()
    await until(lambda: not peers.consumer.is_connected)
    await local.insert([1], None, torch.ones(3), None, None)
    async with asyncio.timeout(10):
        assert (await waiting).matched_tokens == 1
    assert "could not be dialled" in caplog.text


async def test_a_lost_link_and_the_next_one_are_logged_as_warnings(
    peers: Peers, caplog: pytest.LogCaptureFixture
) -> None:
    (await peers.consumer.link()).abort()
    await until(lambda: not peers.consumer.is_connected)
    await peers.consumer.link()
    said = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    url = peers.server.url
    assert f"the link to {url} was lost; dialling again" in said
    assert f"connected again to {url}" in said


async def test_a_peer_that_says_goodbye_is_not_called_again(
    local: LookupBuffer,
) -> None:
    async with serve("mem://", lookup=local) as server:
        async with connect(server.url) as peer:
            call = await started(peer.lookup.drop_select([1]))
            await server.aclose()
            with pytest.raises(PeerLost, match="goodbye"):
                await call
            with pytest.raises(PeerLost, match="goodbye"):
                await peer.lookup.peek([1])


async def test_a_peer_that_does_not_come_back_in_time_is_lost(
    local: LookupBuffer,
) -> None:
    async with serve("mem://", lookup=local) as server:
        async with connect(server.url, reconnect_s=0.05) as peer:
            calls = [
                asyncio.create_task(peer.lookup.insert([1], None, key, None, None))
                for key in (torch.ones(8 * 2**20), torch.ones(2**19))
            ]
            select = asyncio.create_task(peer.lookup.drop_select([7]))
            await until(lambda: local.statistics().waiting_selects == 1)
            server.abort()
            with pytest.raises(PeerLost, match="could not be reached again"):
                await select
            await asyncio.gather(*calls, return_exceptions=True)


@pytest.fixture
async def restarted() -> AsyncIterator[tuple[LookupBuffer, LookupBuffer]]:
    async with LookupBuffer("8MiB", drain_s=0) as old, LookupBuffer(drain_s=0) as new:
        yield old, new


async def test_a_waiting_select_goes_on_at_a_server_that_came_back_empty(
    restarted: tuple[LookupBuffer, LookupBuffer],
) -> None:
    old, new = restarted
    async with serve("mem://", lookup=old) as first, connect(first.url) as peer:
        call = asyncio.create_task(peer.lookup.drop_select([1]))
        await until(lambda: old.statistics().waiting_selects == 1)
        first.abort()
        async with serve(first.url, lookup=new):
            await new.insert([1], None, None, None, None, entry_id="new")
            assert (await call).entry_id == "new"


async def test_an_insert_that_waits_for_room_goes_on_at_a_server_that_came_back_empty(
    restarted: tuple[LookupBuffer, LookupBuffer],
) -> None:
    old, new = restarted
    await old.insert([7], None, torch.ones(2**21 - 100), None, None)
    async with serve("mem://", lookup=old) as first, connect(first.url) as peer:
        insert = peer.lookup.insert([1], None, torch.ones(2**20), None, None)
        call = asyncio.create_task(insert)
        await until(lambda: old.statistics().waiting_inserts == 1)
        first.abort()
        async with serve(first.url, lookup=new):
            entry_id = await call
            assert (await new.drop_select([1])).entry_id == entry_id


@pytest.mark.parametrize("nbytes", [10, 2**20])
async def test_an_insert_that_a_server_without_its_memory_may_have_had_is_told(
    restarted: tuple[LookupBuffer, LookupBuffer],
    cut_when: CutWhen,
    far_link: FarLink,
    nbytes: int,
) -> None:
    old, new = restarted
    async with serve("mem://", lookup=old) as first, connect(first.url) as peer:
        ended = asyncio.Event()

        def end() -> None:
            first.abort()
            ended.set()

        cut_when(far_link(first, peer), Accepted, end)
        call = asyncio.create_task(
            peer.lookup.insert([1], None, torch.ones(nbytes), None, None)
        )
        await ended.wait()
        async with serve(first.url, lookup=new):
            with pytest.raises(PeerRestarted):
                await call
            assert not new.statistics().inserted


async def test_a_server_that_came_back_as_another_refuses(local: LookupBuffer) -> None:
    async with LookupBuffer(fingerprint="b", drain_s=0) as other:
        async with (
            serve("mem://", lookup=local) as first,
            connect(first.url, fingerprint="a") as peer,
        ):
            call = asyncio.create_task(peer.lookup.drop_select([1]))
            await until(lambda: local.statistics().waiting_selects == 1)
            first.abort()
            async with serve(first.url, lookup=other):
                with pytest.raises(PeerLost, match="refuses this peer now"):
                    await call


@asynccontextmanager
async def scripted(
    answer: Answer, *, reconnect_s: float = 60
) -> AsyncIterator[tuple[ScriptedService, Peer]]:
    """A server that answers as it is told, and a peer of it."""
    service, identity = ScriptedService(answer), name_of("far")
    listener = await listen("mem://", identity=identity, service_for=lambda _: service)
    async with connect(listener.url, reconnect_s=reconnect_s) as peer:
        yield service, peer
    await listener.aclose()


def saying(*frames: Frame) -> Answer:
    def answer(stream: LinkStream, frame: OpeningFrame, body: bytes) -> None:
        for one in frames:
            stream.send(one)

    return answer


async def test_the_answer_is_returned() -> None:
    async with scripted(saying(Result(7))) as (service, peer):
        assert await ask(peer, Peek(has_key=True), b"8 bytes.") == Result(7)
        assert service.asked[0][1:] == (Peek(has_key=True), b"8 bytes.")


async def test_a_peer_that_does_not_answer_in_time_is_told_so() -> None:
    async with scripted(saying()) as (service, peer):
        with pytest.raises(TimeoutError):
            await ask(peer, Peek(has_key=False), deadline_s=0.01)
        hearer = service.hearers[0]
        await until(lambda: bool(hearer.frames))
        assert hearer.frames == [(Cancel(), b"")]


async def test_a_cancelled_question_is_withdrawn() -> None:
    async with scripted(saying()) as (service, peer):
        task = await started(ask(peer, Peek(has_key=False)))
        task.cancel()
        await until(lambda: service.hearers[0].frames == [(Cancel(), b"")])
        assert task.cancelled()


async def test_it_is_asked_again_after_a_reconnect() -> None:
    async with scripted(saying()) as (service, peer):
        task = asyncio.create_task(ask(peer, Peek(has_key=False)))
        await until(lambda: len(service.asked) == 1)
        service.answer = saying(Result(3))
        service.asked[0][0].link.abort()
        assert await task == Result(3)


def hang_up(stream: LinkStream, frame: OpeningFrame, body: bytes) -> None:
    stream.link.abort()


async def test_its_deadline_counts_from_the_call_however_often_the_link_is_cut() -> (
    None
):
    async with scripted(hang_up, reconnect_s=0.2) as (service, peer):
        with pytest.raises(TimeoutError):
            await ask(peer, Peek(has_key=False), deadline_s=0.01)
        assert len(service.asked) > 1


def hang_up_first(times: int) -> Answer:
    left = itertools.count(1)

    def answer(stream: LinkStream, frame: OpeningFrame, body: bytes) -> None:
        if next(left) <= times:
            stream.link.abort()
        else:
            stream.send(Result(3))

    return answer


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Each pause before a link is made again, which is not waited for."""
    found, next_s = list[float](), Backoff.next_pause_s

    def next_pause_s(backoff: Backoff) -> float:
        found.append(next_s(backoff))
        return 0

    monkeypatch.setattr(Backoff, "next_pause_s", next_pause_s)
    return found


async def test_links_that_answer_nothing_are_made_more_and_more_seldom(
    pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scripted(hang_up_first(7)) as (_, peer):
        assert await ask(peer, Peek(has_key=False)) == Result(3)
        assert len(pauses) == 7  # one before each link but the first
        assert pauses[0] == 0 and pauses[6] >= 0.5
        monkeypatch.setattr(connection, "STEADY_S", 0)  # it is as old as that
        (await peer.link()).abort()
        assert await ask(peer, Peek(has_key=False)) == Result(3)
        assert pauses[7:] == [0]  # that link had answered


async def test_two_peers_of_one_name_end_each_others_links_more_and_more_seldom(
    local: LookupBuffer, pauses: list[float]
) -> None:
    async with serve("mem://", lookup=local) as server:
        async with (
            connect(server.url, identity="me") as one,
            connect(server.url, identity="me") as other,
        ):
            while len(pauses) < 14:
                await asyncio.gather(one.lookup.peek([1]), other.lookup.peek([1]))
    assert max(pauses) >= 0.4


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"reconnect_s": None}, TypeError),
        ({"reconnect_s": "30"}, TypeError),
        ({"reconnect_s": -1}, ValueError),
        ({"reconnect_s": math.nan}, ValueError),
        ({"fingerprint": 5}, TypeError),
        ({"max_bytes": "much"}, ValueError),
    ],
)
def test_an_option_that_is_wrong_is_refused_at_once(
    options: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error, match="reconnect_s is|fingerprint is|is not a size"):
        connect("mem://", **options)


async def test_the_time_to_reconnect_is_checked_when_it_is_changed(
    peers: Peers,
) -> None:
    peers.consumer.reconnect_s = math.inf
    with pytest.raises(ValueError, match="reconnect_s is"):
        peers.consumer.reconnect_s = math.nan
    assert peers.consumer.reconnect_s == math.inf


async def test_the_largest_number_is_no_bound(local: LookupBuffer) -> None:
    async with serve("tcp://127.0.0.1:0", lookup=local) as server:
        async with connect(server.url, max_bytes=sys.maxsize) as peer:
            await local.insert([1], None, torch.ones(2**18), None, None)
            entry = await peer.lookup.drop_select([1])
            assert isinstance(entry.key, torch.Tensor) and entry.key.numel() == 2**18


async def test_who_waits_hears_of_a_loss_though_something_fails_then(
    peers: Peers, local: LookupBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = asyncio.create_task(peers.consumer.lookup.drop_select([1]))
    await until(lambda: local.statistics().waiting_selects == 1)

    def fail(record: object) -> bool:
        raise RuntimeError("this log cannot be written")

    monkeypatch.setattr(connection.logger, "filters", [fail])
    (await peers.consumer.link()).abort()
    async with asyncio.timeout(10):
        with pytest.raises(PeerLost):
            await waiting


def test_the_first_attempt_is_made_at_once_and_the_pauses_grow() -> None:
    backoff = Backoff()
    pauses = [backoff.next_pause_s() for _ in range(8)]
    longest = [0.0, 0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    for pause_s, longest_s in zip(pauses, longest, strict=True):
        assert longest_s / 2 <= pause_s <= longest_s


def test_after_something_of_use_it_begins_anew() -> None:
    backoff = Backoff()
    for _ in range(3):
        backoff.next_pause_s()
    backoff.reset()
    assert backoff.next_pause_s() == 0
    assert 0 < backoff.next_pause_s() <= 0.05


VERBS: Final[Mapping[str, Callable[[Peer], Awaitable[Any]]]] = {
    "peek": lambda peer: peer.lookup.peek([1]),
    "insert": lambda peer: peer.lookup.insert([1], None, None, None, None),
    "drop_select": lambda peer: peer.lookup.drop_select([1]),
    "get": lambda peer: peer.store.get("key"),
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    ("last", "kind"),
    [
        (Failure("KeyError", "who?"), KeyError),
        (Failure("PeerLost", "another peer"), PeerLost),
        (Cancelled(), AsyncKVError),
    ],
)
async def test_a_failure_is_raised_and_not_asked_again(
    verb: str, last: Frame, kind: type[Exception]
) -> None:
    async with scripted(saying(last)) as (service, peer):
        with pytest.raises(kind, match=getattr(last, "message", None)):
            await VERBS[verb](peer)
        assert len(service.asked) == 1 and peer.is_connected


@pytest.mark.parametrize(
    ("verb", "wrong"),
    [
        ("peek", Retract(1)),
        ("peek", Accepted()),
        ("insert", Result(1)),
        ("drop_select", Accepted()),
        ("drop_select", Result()),
        ("get", Accepted()),
    ],
)
async def test_an_answer_of_another_kind_breaks_the_link(
    verb: str, wrong: Frame
) -> None:
    async with scripted(saying(wrong), reconnect_s=0) as (_, peer):
        with pytest.raises(RemoteProtocolError, match="belongs here"):
            await VERBS[verb](peer)
        await until(lambda: not peer.is_connected)
