"""A peer, and its lookup buffer."""

from __future__ import annotations

import asyncio
import collections
import sys
import threading
from functools import partial
from types import FrameType

import pytest
import torch

from asynckv import (
    ConfigError,
    IncompatiblePeer,
    LookupBuffer,
    PeerLost,
    Server,
    StoreBuffer,
    WrongLoop,
    serve,
)
from asynckv.buffers.remote.peer import Peer, connect
from asynckv.links.options import Digest
from asynckv.testing import (
    CancelMode,
    Outcome,
    sweep_cancellation,
    until,
    until_blocked,
    use_across_tasks,
)
from asynckv.testing.lookup_checks.values import cancelled
from asynckv.testing.pairs import SCHEMES, Peers, Scheme, new_url
from asynckv.transfers.source import source_of
from harness.children import line_of
from harness.forks import ForkServer

MIB = 2**20

_OTHER = """
import asyncio, contextlib, sys, torch, asynckv

async def main():
    spec = asynckv.TensorSpec((2**20,), "uint8")
    async with contextlib.AsyncExitStack() as stack:
        enter = stack.enter_async_context
        lookup = (await enter(asynckv.connect(sys.argv[1]))).lookup
        await anext(await enter(lookup.open_drop_select([1])))
        await enter(lookup.drop_select([2]))
        specs = {"0.key": spec, "1.key": spec}
        writer = await enter(lookup.open_insert([3], None, specs))
        await writer.put("0.key", torch.ones(2**20, dtype=torch.uint8))
        print("in the middle", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.multiprocess
async def test_a_killed_peer_gives_what_it_has_to_the_next_and_leaves_nothing(
    forks: ForkServer, peers: Peers, local: LookupBuffer
) -> None:
    key = {str(n): torch.full((MIB,), n, dtype=torch.uint8) for n in range(2)}
    for token in (1, 2):
        await local.insert([token], None, key, None, None)
    async with forks.running(_OTHER, peers.server.url) as other:
        assert await line_of(other) == "in the middle"
        assert local.statistics().entries == 3
    for token in (1, 2):
        async with peers.consumer.lookup.open_drop_select([token]) as stream:
            found = {name: tensor async for name, tensor in stream}
        assert stream.attempt == 2 and torch.equal(found["1.key"], key["1"])
    await until(lambda: not local.statistics().entries)
    assert local.statistics().used_bytes == 0


async def test_a_block_within_a_block_does_not_wait_for_the_outer_ones_bytes(
    local: LookupBuffer,
) -> None:
    async with (
        serve("mem://", lookup=local) as server,
        connect(server.url, max_bytes="5MiB") as peer,
    ):
        for n in (1, 2):
            await local.insert([n], None, torch.ones(3 * MIB // 4), None, None)
        async with (
            asyncio.timeout(5),
            peer.lookup.drop_select([1]),
            peer.lookup.drop_select([2]),
        ):
            assert peer.lookup.statistics().used_bytes == 0


async def test_names_and_numbers_that_no_frame_holds_are_refused(
    peers: Peers,
) -> None:
    lookup, name = peers.producer.lookup, "x" * 257
    with pytest.raises(ValueError, match="256"):
        await lookup.insert([1], None, None, None, None, entry_id=name)
    with pytest.raises(ValueError, match="deliveries"):
        await lookup.insert([1], None, None, None, None, deliveries=2**40)
    with pytest.raises(ValueError, match="256"):
        await lookup.drop_select(entry_id=name)
    with pytest.raises(ValueError, match="min_matched"):
        await lookup.drop_select([1], min_matched_tokens=2**40)
    with pytest.raises(KeyError):
        await lookup.taken(name)
    assert not await lookup.withdraw(name) and peers.producer.is_connected


async def test_statistics_tell_what_is_under_way(
    peers: Peers, local: LookupBuffer
) -> None:
    select = asyncio.create_task(peers.consumer.lookup.drop_select([1]))
    await until(lambda: local.statistics().waiting_selects == 1)
    assert peers.consumer.lookup.statistics().waiting_selects == 1
    await peers.consumer.lookup.insert([1], None, torch.ones(MIB), None, None)
    await select
    now = peers.consumer.lookup.statistics()
    assert (now.waiting_selects, now.waiting_inserts, now.used_bytes) == (0, 0, 0)
    await peers.consumer.lookup.aclose()
    assert not peers.consumer.lookup.statistics().is_connected


@pytest.mark.parametrize("nbytes", [100, MIB])
@pytest.mark.parametrize("verb", ["take", "borrow", "stream"])
async def test_cancelled_anywhere_the_budget_is_exact_and_nothing_is_leaked(
    peers: Peers, local: LookupBuffer, verb: str, nbytes: int
) -> None:
    async def check(k: int, mode: CancelMode, outcome: Outcome[None]) -> None:
        await peers.consumer.lookup.peek([1])
        assert peers.consumer.budget.used_bytes == 0
        payload = (await peers.consumer.link()).payload
        assert not payload._table.is_waiting  # type: ignore[attr-defined]
        assert local.statistics().leased == 0

    async def before() -> None:
        if not local.statistics().entries:
            await local.insert([1], None, torch.ones(nbytes), None, None)

    modes: tuple[CancelMode, ...] = ("task", "scope", "completion")
    operation = partial(_use, peers.consumer, verb)
    await sweep_cancellation(operation, check, before=before, modes=modes)


async def _use(peer: Peer, verb: str) -> None:
    if verb == "take":
        await peer.lookup.drop_select([1])
    elif verb == "borrow":
        async with peer.lookup.drop_select([1]):
            await peer.lookup.peek([1])
    else:
        async with peer.lookup.open_drop_select([1]) as stream:
            await stream.wait_for("key")


async def test_remote_waits_are_logged_with_who_bytes_and_where(
    peers: Peers, local: LookupBuffer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "asynckv.observability.waits")
    selecting = asyncio.ensure_future(peers.consumer.lookup.drop_select([1, 2]))
    await until(lambda: local.statistics().waiting_selects == 1)
    tensor = torch.zeros(5, dtype=torch.uint8)
    await peers.producer.lookup.insert(
        [1, 2], None, tensor, None, None, entry_id="mine"
    )
    await selecting
    url = peers.server.url
    waits = caplog.text
    assert "drop_select of 2 tokens waits for a match; it ends with an" in waits
    assert f"insert of mine (21 bytes) waits for room in the buffer at {url}" in waits


def of_many_sizes() -> dict[str, torch.Tensor]:
    sizes = [0, 1, 5000, 16 * 1024, 16 * 1024 + 1, 70_000]
    return {
        str(n): torch.full((sizes[n % 6],), n % 251, dtype=torch.uint8)
        for n in range(300)
    }


@pytest.mark.parametrize("url", ["mem://riders", "tcp://127.0.0.1:0"])
@pytest.mark.parametrize("digest", ["full", "off"])
async def test_parts_of_all_sizes_arrive_each_by_its_way(
    url: str, digest: Digest
) -> None:
    keys = of_many_sizes()
    into = {f"{name}.key": torch.zeros_like(keys[name]) for name in ("2", "5", "201")}
    async with (
        LookupBuffer("64MiB", drain_s=0) as local,
        serve(url, lookup=local) as server,
        connect(f"{server.url}?payload=inline", digest=digest) as peer,
    ):
        await peer.lookup.insert([1], None, keys, None, None)
        entry = await peer.lookup.drop_select([1], into=into)
        assert isinstance(entry.key, dict)
        assert all(torch.equal(entry.key[name], keys[name]) for name in keys)
        assert entry.key["201"] is into["201.key"]


async def test_a_cancelled_insert_of_many_small_parts_reads_its_memory_no_more(
    peers: Peers, local: LookupBuffer
) -> None:
    keys = {str(n): torch.ones(16 * 1024, dtype=torch.uint8) for n in range(300)}
    insert = asyncio.create_task(
        peers.producer.lookup.insert([1], None, keys, None, None)
    )
    await until(lambda: local.statistics().used_bytes > 0)
    insert.cancel()
    await asyncio.wait({insert})
    assert insert.cancelled() or not insert.exception()
    await until(lambda: local.statistics().used_bytes == 0)


@pytest.mark.both_loops
@pytest.mark.parametrize("scheme", SCHEMES)
async def test_a_peer_tells_who_it_is_and_how_payload_moves(
    local: LookupBuffer, scheme: Scheme
) -> None:
    url = new_url(scheme)
    async with serve(url, lookup=local, identity="me", role="producer") as server:
        async with connect(server.url) as peer:
            assert (peer.identity, peer.role) == ("me", "producer")
            assert peer.transport == ("mem" if scheme == "mem" else "inline")
            assert peer.incarnation == server.identity.incarnation
            assert peer.is_connected


async def test_one_task_may_enter_what_another_leaves(local: LookupBuffer) -> None:
    async def use(server: Server) -> None:
        await use_across_tasks(connect(server.url), lambda peer: peer.lookup.peek([1]))

    await use_across_tasks(serve("tcp://127.0.0.1:0", lookup=local), use)


async def test_a_peer_that_was_not_entered_says_so() -> None:
    peer = connect("mem://nowhere")
    for name in ("identity", "transport", "role", "incarnation"):
        with pytest.raises(RuntimeError, match="async with connect"):
            getattr(peer, name)
    with pytest.raises(RuntimeError, match="async with connect"):
        await peer.lookup.drop_select([1])
    with pytest.raises(RuntimeError, match="async with connect"):
        await peer.store.get("name")


async def test_a_peer_is_shown_with_how_it_is_connected(local: LookupBuffer) -> None:
    async with serve("mem://a", lookup=local, identity="me") as server:
        peer = connect(server.url)
        assert repr(peer) == "<Peer at mem://a, not entered yet>"
        async with peer:
            assert repr(peer) == "<Peer at mem://a, connected to me by mem>"
            assert repr(peer.lookup) == f"<RemoteLookupBuffer of {peer!r}>"
            assert repr(peer.store) == f"<RemoteStoreBuffer of {peer!r}>"
        assert repr(peer) == "<Peer at mem://a, not connected>"


async def test_nobody_there_is_a_lost_peer() -> None:
    with pytest.raises(PeerLost):
        async with connect("mem://nowhere"):
            pass


async def test_another_loop_is_refused(peers: Peers) -> None:
    future: asyncio.Future[BaseException | None]
    loop = asyncio.get_running_loop()
    future = loop.create_future()

    def run() -> None:
        found: BaseException | None = None
        try:
            asyncio.run(peers.consumer.lookup.peek([1]))
        except WrongLoop as exc:
            found = exc
        loop.call_soon_threadsafe(future.set_result, found)

    threading.Thread(target=run).start()
    assert isinstance(await future, WrongLoop)


async def test_a_fingerprint_that_differs_is_named() -> None:
    async with (
        LookupBuffer(fingerprint={"model": "a"}, drain_s=0) as local,
        serve("mem://", lookup=local) as server,
    ):
        with pytest.raises(IncompatiblePeer) as caught:
            async with connect(server.url, fingerprint={"model": "b"}):
                pass
        assert caught.value.field == "model"


async def test_one_fingerprint_is_warned_of_once_a_side_where_entries_are_looked_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with (
        LookupBuffer(drain_s=0) as local,
        serve("mem://", lookup=local) as server,
        connect(server.url, fingerprint="m") as peer,
    ):
        for _ in range(2):
            await peer.lookup.peek([1])
    said = [line for line in caplog.messages if "only one side" in line]
    assert len(said) == 2


async def test_a_store_keeps_the_values_of_each_fingerprint_and_warns_of_none(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with StoreBuffer() as local, serve("mem://", store=local) as server:
        async with (
            connect(server.url, fingerprint="m") as first,
            connect(server.url, fingerprint="m") as second,
        ):
            await first.store.put("a", torch.ones(1))
            assert await second.store.contains(["a"]) == (True,)
    assert not caplog.messages


def test_what_cannot_be_kept_is_refused() -> None:
    with pytest.raises(ConfigError, match="TLS"):
        connect("mem://x", tls=object())  # type: ignore[arg-type]


async def test_a_peer_that_was_never_entered_can_be_closed() -> None:
    peer = connect("mem://nowhere")
    await peer.aclose()
    with pytest.raises(RuntimeError, match="entered before"):
        await peer.__aenter__()
    peer.lookup.abort()


async def test_leaving_ends_what_waits(peers: Peers, local: LookupBuffer) -> None:
    call = asyncio.create_task(peers.consumer.lookup.drop_select([1]))
    await until(lambda: local.statistics().waiting_selects == 1)
    await peers.consumer.aclose()
    with pytest.raises(PeerLost, match="closed on this side"):
        await call
    await until(lambda: local.statistics().waiting_selects == 0)
    with pytest.raises(RuntimeError, match="connect again"):
        await peers.consumer.__aenter__()


@pytest.mark.parametrize("end", ["abort", "aclose"])
async def test_leaving_ends_an_insert_that_waits_for_room(
    peers: Peers, local: LookupBuffer, end: str
) -> None:
    await local.insert([1], None, torch.ones(3 * MIB // 2), None, None)
    insert = peers.producer.lookup.insert([2], None, torch.ones(MIB), None, None)
    call = asyncio.create_task(insert)
    await until(lambda: local.statistics().waiting_inserts == 1)
    if end == "abort":
        peers.producer.abort()
    else:
        await peers.producer.aclose()
    with pytest.raises(PeerLost, match="on this side"):
        await call


async def test_leaving_ends_an_insert_of_which_half_is_copied(peers: Peers) -> None:
    layers = {f"{n}": torch.ones(MIB, 2).t() for n in range(40)}
    insert = peers.producer.lookup.insert([2], None, layers, None, None, entry_id="a")
    call = asyncio.create_task(insert)
    await until_blocked(call)
    peers.producer.abort()
    with pytest.raises(PeerLost, match="on this side"):
        await call


async def test_what_cannot_be_copied_for_a_live_peer_is_no_loss_of_it(
    peers: Peers,
) -> None:
    rows = torch.zeros(1024, 1024)
    peers.producer.pool.close()
    with pytest.raises(RuntimeError, match="copy pool is closed"):
        await peers.producer.lookup.insert([1], None, rows.t(), None, None)
    assert peers.producer.is_connected


async def test_leaving_returns_what_is_leased(
    peers: Peers, local: LookupBuffer
) -> None:
    await local.insert([1], None, torch.ones(3), None, None)
    held = peers.consumer.lookup.drop_select([1])
    await held.__aenter__()
    await peers.consumer.aclose()
    await until(lambda: local.statistics().leased == 0)
    with pytest.raises(Exception, match="given back"):
        await held.__aexit__(None, None, None)


async def test_a_cancelled_leaving_leaves_nothing_open(local: LookupBuffer) -> None:
    async with serve("tcp://127.0.0.1:0", lookup=local) as server:
        peer = await connect(server.url).__aenter__()
        closing = asyncio.create_task(peer.aclose())
        await asyncio.sleep(0)
        await cancelled(closing)
        assert not peer.is_connected
        await until(lambda: not server.peers)


async def test_what_is_inserted_while_its_server_is_away_waits_for_the_next_one(
    local: LookupBuffer,
) -> None:
    first = serve("mem://away", lookup=local)
    async with first, connect("mem://away") as peer:
        first.abort()
        await until(lambda: not peer.is_connected)
        task = asyncio.create_task(
            peer.lookup.insert([1], None, torch.ones(MIB), None, None)
        )
        await until_blocked(task)
        async with serve("mem://away", lookup=local):
            await task
            assert local.statistics().entries == 1


async def test_others_have_their_turn_while_many_tensors_are_looked_at(
    peers: Peers,
) -> None:
    asked, turn = collections.Counter[int](), 0

    def note(frame: FrameType, event: str, arg: object) -> None:
        if event == "call" and frame.f_code is source_of.__code__:
            asked[turn] += 1

    inserting = asyncio.create_task(
        peers.producer.lookup.insert([1], None, _layers(300), None, None)
    )
    sys.setprofile(note)
    while not inserting.done():
        turn += 1
        await asyncio.sleep(0)
    sys.setprofile(None)
    await inserting
    assert asked.total() == 300 and max(asked.values()) <= 64


def _layers(count: int) -> dict[str, torch.Tensor]:
    return {
        str(n): torch.full((1024,), n % 256, dtype=torch.uint8) for n in range(count)
    }
