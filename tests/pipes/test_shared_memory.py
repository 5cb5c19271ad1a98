"""Pipes between two processes of one host: each reads what the other sends in place."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from asynckv.errors import ChecksumError, EndOfStream, PeerLost, PipeBroken
from asynckv.links.fd_socket import has_fd_sockets
from asynckv.links.options import Digest
from asynckv.pipes import shared_memory as pipe_sharing
from asynckv.pipes.endpoints import listen_pipe, open_pipe
from asynckv.pipes.pipe import Pipe
from asynckv.pipes.shared_memory import MapSharing
from asynckv.protocol.frames import Push
from asynckv.protocol.values import Place
from asynckv.sharing.exporter import place_of
from asynckv.tensors.views import tensor_over
from asynckv.testing.blocked import until, until_blocked
from asynckv.testing.expectations import is_same, noise
from asynckv.testing.pairs import open_pipe_pair
from asynckv.testing.pipe_checks import (
    LARGE,
    PIPE_BYTES,
    PIPE_CHECKS,
    PipeCheck,
    receive_many,
    send_many,
)
from asynckv.transfers.source import HostSource
from asynckv.types import TensorSpec

pytestmark = pytest.mark.skipif(not has_fd_sockets(), reason="nothing to map here")

SPEC = TensorSpec((LARGE,), "uint8")
PLACE = Place(((0, 2 * LARGE),), 0, 1)


@pytest.fixture
async def pair() -> AsyncIterator[tuple[Pipe, Pipe]]:
    async with open_pipe_pair("map") as pair:
        yield pair


def sharing_of(pipe: Pipe) -> MapSharing:
    sharing = pipe._sends._mapping
    assert sharing is not None
    return sharing


def shown_by(pipe: Pipe) -> int:
    """How many tensors it has shown to be read where they lie."""
    importer = sharing_of(pipe)._importer
    return 0 if importer is None else importer._last_number


async def files_and_maps() -> tuple[int, int]:
    return await asyncio.to_thread(_files_and_maps)


async def until_as(before: tuple[int, int]) -> None:
    """Wait until no more is open, or mapped, than there was."""
    async with asyncio.timeout(10):
        while await files_and_maps() != before:
            pass


def _files_and_maps() -> tuple[int, int]:
    """How many descriptors of memory files and sockets are open, and maps of such."""
    links = [str(path.resolve()) for path in Path("/proc/self/fd").iterdir()]
    fds = [link for link in links if "memfd:" in link or "socket:" in link]
    maps = Path("/proc/self/maps").read_text().splitlines()
    return len(fds), sum("memfd:" in line for line in maps)


class Held:
    """Reads of ``pipe`` wait until they are let go; then they fail, if so wanted."""

    def __init__(self, pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
        self.has_begun = asyncio.Event()
        self.error: Exception | None = None
        self._may_go = asyncio.Event()
        sharing = sharing_of(pipe)
        self._read = sharing.read
        monkeypatch.setattr(sharing, "read", self._hold)

    def release(self, error: Exception | None = None) -> None:
        self.error = error
        self._may_go.set()

    async def _hold(self, place: Place, digest: bytes, target: memoryview) -> None:
        self.has_begun.set()
        await self._may_go.wait()
        if self.error is not None:
            raise self.error
        await self._read(place, digest, target)


@pytest.mark.both_loops
@pytest.mark.parametrize("check", PIPE_CHECKS, ids=lambda check: check.__name__)
async def test_a_pipe_keeps_what_every_pipe_keeps(check: PipeCheck) -> None:
    async with open_pipe_pair("map") as (near, far):
        await check(near, far)


async def test_both_sides_are_read_where_they_have_it(pair: tuple[Pipe, Pipe]) -> None:
    for sender, receiver in (pair, pair[::-1]):
        await sender.send_tensor(noise(LARGE, 1))
        assert is_same(await receiver.recv_tensor(), noise(LARGE, 1))
        into = torch.empty(LARGE, dtype=torch.uint8)
        await sender.send_tensor(noise(LARGE, 2))
        assert await receiver.recv_tensor(into) is into
        assert is_same(into, noise(LARGE, 2))
        assert shown_by(sender) == 2


async def test_what_is_received_is_the_receivers_own(pair: tuple[Pipe, Pipe]) -> None:
    near, far = pair
    await near.send_tensor(noise(LARGE, 1))
    found = await far.recv_tensor()
    assert found is not None
    await asyncio.gather(send_many(near, 20), receive_many(far, 20))
    assert is_same(found, noise(LARGE, 1))
    found.zero_()


async def test_what_is_wanted_into_memory_is_copied_once(
    pair: tuple[Pipe, Pipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far = pair
    targets: list[memoryview] = []
    sharing = sharing_of(far)
    read = sharing.read

    async def noted(place: Place, digest: bytes, target: memoryview) -> None:
        targets.append(target)
        await read(place, digest, target)

    monkeypatch.setattr(sharing, "read", noted)
    into = torch.empty(LARGE, dtype=torch.uint8)
    receiving = asyncio.create_task(far.recv_tensor(into))
    await until_blocked(receiving)
    await near.send_tensor(noise(LARGE, 1))
    assert await receiving is into and len(targets) == 1
    assert tensor_over(targets[0], SPEC).data_ptr() == into.data_ptr()


async def test_a_flush_returns_though_nobody_receives(pair: tuple[Pipe, Pipe]) -> None:
    near, far = pair
    await send_many(near, 4)
    await near.flush()
    assert not near.statistics().in_flight_bytes
    await receive_many(far, 4)


async def test_small_tensors_ride_and_what_is_lent_is_copied(
    pair: tuple[Pipe, Pipe],
) -> None:
    near, far = pair
    await near.send_tensor(noise(64, 1))
    assert is_same(await far.recv_tensor(), noise(64, 1)) and not shown_by(near)
    await near.send_tensor(noise(LARGE, 1), copy=False)
    assert is_same(await far.recv_tensor(), noise(LARGE, 1)) and shown_by(near) == 1


async def test_a_tensor_above_the_bound_goes_by_lanes(pair: tuple[Pipe, Pipe]) -> None:
    near, far = pair
    receiving = asyncio.create_task(far.recv_tensor())
    await near.send_tensor(noise(9 * PIPE_BYTES, 1))
    assert is_same(await receiving, noise(9 * PIPE_BYTES, 1))
    assert not shown_by(near) and near.transport == "map"


async def test_an_url_that_asks_for_lanes_gets_them() -> None:
    for query, asked in (("?payload=inline", ""), ("", "?payload=inline")):
        async with (
            listen_pipe(f"tcp://127.0.0.1:0{query}") as listener,
            open_pipe(listener.url.partition("?")[0] + asked) as near,
            await listener.accept() as far,
        ):
            await near.send_tensor(noise(LARGE, 1))
            assert is_same(await far.recv_tensor(), noise(LARGE, 1))
            assert near.transport == far.transport == "inline"


@pytest.mark.parametrize(
    ("ours", "theirs", "kind"),
    [
        ("auto", "auto", "edges"),
        ("full", "auto", "full"),
        ("off", "edges", "edges"),
        ("off", "off", "off"),
    ],
)
async def test_the_stricter_digest_is_compared(
    ours: Digest, theirs: Digest, kind: str
) -> None:
    async with (
        listen_pipe("tcp://127.0.0.1:0", digest=theirs) as listener,
        open_pipe(listener.url, digest=ours) as near,
        await listener.accept() as far,
    ):
        await until(lambda: near.transport == far.transport == "map")
        assert sharing_of(near).digest == sharing_of(far).digest == kind
        await asyncio.gather(send_many(near, 2), receive_many(far, 2))
        assert shown_by(near) == 2


@pytest.mark.parametrize("is_into", [False, True])
@pytest.mark.parametrize(
    ("digest", "place"), [("auto", 0), ("auto", LARGE - 1), ("full", LARGE // 2)]
)
async def test_other_bytes_than_were_sent_are_noticed(
    monkeypatch: pytest.MonkeyPatch, digest: Digest, place: int, is_into: bool
) -> None:
    async with open_pipe_pair("map", digest=digest) as (near, far):
        held = Held(far, monkeypatch)
        await near.send_tensor(noise(LARGE, 1))
        into = torch.empty(LARGE, dtype=torch.uint8) if is_into else None
        receiving = asyncio.create_task(far.recv_tensor(into))
        await held.has_begun.wait()
        (parcel,) = near._outbound._pushed
        assert isinstance(parcel.source, HostSource)
        memory = parcel.source.host()
        assert isinstance(memory, memoryview)
        memory[place] ^= 1
        held.release()
        with pytest.raises(ChecksumError):
            await receiving
        with pytest.raises(PipeBroken):
            await near.flush()


@pytest.mark.parametrize("is_into", [False, True])
async def test_what_cannot_be_read_comes_by_lanes_in_its_place(
    pair: tuple[Pipe, Pipe],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    is_into: bool,
) -> None:
    near, far = pair
    held = Held(far, monkeypatch)
    await send_many(near, 3)
    into = torch.empty(LARGE, dtype=torch.uint8) if is_into else None
    receiving = asyncio.create_task(far.recv_tensor(into))
    await held.has_begun.wait()
    error = PeerLost("no more mappings")
    if is_into:
        sharing_of(far).lose(error)
    held.release(error)
    assert is_same(await receiving, noise(LARGE, 0))
    for seed in (1, 2):
        assert is_same(await far.recv_tensor(), noise(LARGE, seed))
    await until(lambda: near.transport == far.transport == "inline")
    await asyncio.gather(send_many(near, 2), receive_many(far, 2))
    await until(lambda: "goes by lanes from here on" in caplog.text)
    assert shown_by(near) == 3


@pytest.mark.parametrize("side", [0, 1])
async def test_what_is_under_way_when_sharing_ends_comes_once(
    pair: tuple[Pipe, Pipe], side: int
) -> None:
    near, far = pair
    sending = asyncio.create_task(send_many(near, 12))
    assert is_same(await far.recv_tensor(), noise(LARGE, 0))
    sharing_of(pair[side]).lose("a test")
    for seed in range(1, 12):
        assert is_same(await far.recv_tensor(), noise(LARGE, seed))
    await sending
    await near.flush()
    assert near.transport == "inline"


async def test_memory_that_is_still_read_is_nobody_elses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with open_pipe_pair("map") as (near, far):
        held = Held(far, monkeypatch)
        await near.send_tensor(noise(LARGE, 1))
        importer = sharing_of(near)._importer
        await held.has_begun.wait()
        assert importer is not None and importer.pinned_regions == 1
        near.abort()
        assert importer.pinned_regions == 1 and importer._connection is not None
        with pytest.raises(PeerLost):
            await far.recv_tensor()
        far.abort()
        await until(lambda: importer._connection is None)
        assert not importer.pinned_regions


async def test_a_cancelled_receive_leaves_the_tensor_in_the_stream(
    pair: tuple[Pipe, Pipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far = pair
    into = torch.empty(LARGE, dtype=torch.uint8)
    receiving = asyncio.create_task(far.recv_tensor(into))
    held = Held(far, monkeypatch)
    await until_blocked(receiving)
    await near.send_tensor(noise(LARGE, 1))
    await held.has_begun.wait()
    receiving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await receiving
    into.zero_()
    held.release()
    assert is_same(await far.recv_tensor(), noise(LARGE, 1))
    assert not into.any()


async def test_a_closed_pipe_has_nothing_mapped_or_open_and_shares_nothing_more() -> (
    None
):
    before = await files_and_maps()
    async with open_pipe_pair("map") as (near, far):
        await asyncio.gather(send_many(near, 4), receive_many(far, 4))
        sharings = [sharing_of(pipe) for pipe in (near, far)]
        assert all(sharing.is_open for sharing in sharings)
        await asyncio.gather(near.aclose(), far.aclose())
        assert not any(sharing.is_open for sharing in sharings)
        assert (await files_and_maps())[1] <= before[1]


@pytest.mark.parametrize("is_aborted", [False, True])
async def test_nothing_is_left_mapped_or_open(is_aborted: bool) -> None:
    before = await files_and_maps()
    async with open_pipe_pair("map") as (near, far):
        await asyncio.gather(send_many(near, 4), receive_many(far, 4))
        await asyncio.gather(send_many(far, 4), receive_many(near, 4))
        assert (await files_and_maps())[1] > before[1]
        if is_aborted:
            near.abort()
            far.abort()
    del near, far
    await until_as(before)


def beyond(place: Place) -> Place:
    return Place(((2**40, 2 * LARGE),), 0, place.generation + 1)


def again(place: Place) -> Place:
    return place


@pytest.mark.parametrize("changed", [beyond, again])
async def test_a_place_that_makes_no_sense_ends_the_link(
    monkeypatch: pytest.MonkeyPatch, changed: Callable[[Place], Place]
) -> None:
    async with open_pipe_pair("map") as (near, far):
        Held(far, monkeypatch)
        await near.send_tensor(noise(LARGE, 1))
        sharing = sharing_of(near)
        show = sharing.show

        def lie(*what: Any) -> tuple[Place, bytes]:
            assert show(*what) is not None
            return changed(first), b""

        (parcel,) = near._outbound._pushed
        assert parcel.source is not None and parcel.source.region is not None
        first = place_of(parcel.source.region) or PLACE
        monkeypatch.setattr(sharing, "show", lie)
        await near.send_tensor(noise(LARGE, 2))
        with pytest.raises(PipeBroken, match="RemoteProtocolError|protocol|tensor"):
            await near.flush()
        with pytest.raises(PeerLost):
            await far.recv_tensor()


async def test_what_is_mapped_of_nobody_ends_the_link() -> None:
    async with open_pipe_pair("tcp") as (near, far):
        near._sends._stream.send(Push(1, spec=SPEC, place=PLACE))
        with pytest.raises(PeerLost):
            await far.recv_tensor()
        near.abort()


async def refuse(*args: object) -> None:
    raise OSError("no more files")


async def test_what_cannot_be_mapped_goes_by_lanes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "asynckv.pipes")
    monkeypatch.setattr(pipe_sharing, "import_file", refuse)
    async with (
        listen_pipe("tcp://127.0.0.1:0") as listener,
        open_pipe(listener.url) as near,
        await listener.accept() as far,
    ):
        await until(lambda: caplog.text.count("goes by lanes") == 2)
        await near.send_tensor(noise(LARGE, 1))
        assert is_same(await far.recv_tensor(), noise(LARGE, 1))
        assert near.transport == far.transport == "inline"


async def test_a_peer_on_another_host_is_not_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def elsewhere(*args: object) -> None:
        raise ValueError("it is on another host")

    monkeypatch.setattr(pipe_sharing, "check_same_host", elsewhere)
    async with (
        listen_pipe("tcp://127.0.0.1:0") as listener,
        open_pipe(listener.url) as near,
        await listener.accept() as far,
    ):
        await near.send_tensor(noise(LARGE, 1))
        assert is_same(await far.recv_tensor(), noise(LARGE, 1))
        assert near._sends._mapping is not None and not near._sends._mapping._tasks
        assert far._sends._handshake is None


async def test_a_pipe_that_nobody_accepts_ends() -> None:
    async with listen_pipe("tcp://127.0.0.1:0") as listener:
        async with open_pipe(listener.url) as near:
            await asyncio.sleep(0)
            near.abort()
    assert near.transport == "inline"


async def test_a_pipe_that_is_closed_meanwhile_maps_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    has_come = asyncio.Event()
    before = await files_and_maps()

    async def late(mappable: Any) -> None:
        has_come.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(pipe_sharing, "import_file", late)
    async with (
        listen_pipe("tcp://127.0.0.1:0") as listener,
        open_pipe(listener.url) as near,
        await listener.accept() as far,
    ):
        await has_come.wait()
        near.abort()
        with pytest.raises((PeerLost, EndOfStream)):
            await far.recv_tensor()
    del near, far
    await until_as(before)
