"""What a peer has exported, opened and closed: nothing is left of what fails."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import os
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec
import pytest

from asynckv.devices.growth import Growth
from asynckv.devices.imports import ImportedAllocation, in_thread
from asynckv.errors import GPUFailed, RemoteProtocolError
from asynckv.links.fd_socket import fetch_file, has_fd_sockets
from asynckv.protocol.transfer_frames import Exposed
from asynckv.sharing import imports
from asynckv.sharing.exporter import Exporter, Importer
from asynckv.sharing.imports import import_gpu
from asynckv.sharing.peer_imports import check_same_host
from asynckv.testing.blocked import until
from harness.fake_devices import FakeDevice, fake_device_of
from harness.fake_gpus import FakeGpus
from harness.link_pairs import LinkPair, linked

pytestmark = pytest.mark.skipif(not has_fd_sockets(), reason="no sockets for handles")

MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Both:
    """What is shown, and a process that opens it, with memory of its own."""

    link: LinkPair
    importer: Importer
    exposed: Exposed
    theirs: FakeDevice
    own: Growth

    @property
    def opened(self) -> int:
        return len(self.theirs.process.cuda._opened)

    def open(self) -> Any:
        pages = self.own.device_pages
        assert pages is not None
        return import_gpu(self.exposed, pages.allocation)


@pytest.fixture
async def both(gpus: FakeGpus) -> AsyncIterator[Both]:
    ours, theirs = (fake_device_of(gpus.process()) for _ in range(2))
    shown, own = (Growth(MIB, device=gpu.device) for gpu in (ours, theirs))
    await asyncio.gather(shown.open(), own.open())
    sharing = Exporter(shown.arena, lambda: None, shown.drop_soon)
    async with linked() as link:
        importer = sharing.export(link.far, "edges", ours.process.cuda.uuid(0))
        yield Both(link, importer, importer.exposed, theirs, own)
    sharing.close()
    await sharing.aclose()
    await shown.aclose()
    await own.aclose()


@contextlib.contextmanager
def copied_sockets() -> Iterator[None]:
    """Keep a copy of each socket that memory comes by, as a fork does."""
    with contextlib.ExitStack() as copies, pytest.MonkeyPatch.context() as patch:

        async def fetch(*where: Any) -> tuple[socket.socket, int]:
            sock, fd = await fetch_file(*where)
            for kept in (sock, sock.dup()):
                copies.enter_context(kept)
            return sock, fd

        patch.setattr(imports, "fetch_file", fetch)
        yield


async def test_it_is_open_until_it_is_closed_which_the_owner_hears(both: Both) -> None:
    export, nonce = await both.open()
    assert both.importer.verify(nonce) and both.opened == 1
    in_thread(export.close)
    await until(lambda: not both.importer.is_connected)
    assert not both.opened


async def test_the_owner_hears_it_though_a_forked_child_has_the_socket(
    both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    export, nonce = await both.open()
    with socket.socket(fileno=os.dup(export.sock.fileno())):  # as a child has it
        with monkeypatch.context() as child:
            child.setattr(os, "getpid", lambda: -1)
            export.close()
        assert both.importer.verify(nonce) and both.opened == 1
        await asyncio.to_thread(export.close)
        await until(lambda: both.importer._connection is None)
    assert not both.opened


async def test_a_forked_child_hangs_up_for_nobody_where_an_opening_ends(
    both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ended_in_child(*what: Any) -> Any:
        await until(lambda: both.importer._connection is not None)
        with monkeypatch.context() as child:
            child.setattr(os, "getpid", lambda: -1)
            what[-1]()
        raise GPUFailed("not here")

    monkeypatch.setattr(imports, "open_allocation", ended_in_child)
    with copied_sockets():
        with pytest.raises(GPUFailed, match="not here"):
            await both.open()
        for _ in range(20):
            await asyncio.sleep(0)
        assert both.importer._connection is not None
    await until(lambda: both.importer._connection is None)


async def test_what_cannot_be_opened_is_hung_up(
    both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*anything: object) -> Any:
        raise GPUFailed("not here")

    monkeypatch.setattr(both.theirs.process.cuda, "open_memory", fail)
    with pytest.raises(GPUFailed, match="not here"):
        await both.open()
    await until(lambda: both.importer._connection is None)


@pytest.mark.parametrize(
    "claim",
    [
        {"handle": b""},
        {"handle": b"h" * 63},
        {"nbytes": 0},
        {"nbytes": 512},
        {"nbytes": MIB},
        {"nbytes": 2**62},
    ],
)
async def test_what_nobody_exports_is_not_even_connected_to(
    both: Both, claim: dict[str, Any]
) -> None:
    lie = dataclasses.replace(
        both, exposed=msgspec.structs.replace(both.exposed, **claim)
    )
    with pytest.raises(RemoteProtocolError):
        await lie.open()
    assert both.importer._connection is None and not both.opened
    export, nonce = await both.open()  # the ticket is good still
    assert both.importer.verify(nonce)
    in_thread(export.close)
    await until(lambda: not both.opened)


async def test_more_than_was_exported_is_not_opened(both: Both) -> None:
    more = msgspec.structs.replace(both.exposed, nbytes=both.exposed.nbytes + 4096)
    with pytest.raises(GPUFailed):
        await dataclasses.replace(both, exposed=more).open()
    await until(lambda: both.importer._connection is None)
    assert not both.opened


async def test_a_cancelled_opening_hangs_up_when_its_thread_has_closed_it(
    both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_go_on = threading.Event(), threading.Event()
    nonce = ImportedAllocation.nonce

    def hold(allocation: ImportedAllocation) -> bytes:
        begun.set()
        may_go_on.wait(10)
        return nonce(allocation)

    monkeypatch.setattr(ImportedAllocation, "nonce", hold)
    opening = asyncio.ensure_future(both.open())
    try:
        await until(begun.is_set)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        for _ in range(3):  # a hang-up would be heard by now
            await asyncio.sleep(0)
        assert both.importer._connection is not None and both.opened
    finally:
        may_go_on.set()
    await until(lambda: both.importer._connection is None)
    assert not both.opened


async def test_only_a_peer_of_this_boot_and_host_shares_memory(both: Both) -> None:
    check = functools.partial(check_same_host, both.link.near)
    for boot_id in ("", "another"):
        with pytest.raises(ValueError, match="another host"):
            check(boot_id)
