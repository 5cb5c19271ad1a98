"""What a peer says of its memory file, and when that is closed here."""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import tracemalloc
from collections.abc import Iterator

import numpy
import pytest

from asynckv.errors import PeerLost, RemoteProtocolError
from asynckv.protocol.transfer_frames import Exposed
from asynckv.protocol.values import Place
from asynckv.sharing import peer_files
from asynckv.sharing.peer_files import PeerFile, edges_at, import_file
from asynckv.tensors.shared_file import SharedFile
from asynckv.tensors.slabs import PAGE_NBYTES, Slabs, has_slabs

pytestmark = pytest.mark.skipif(not has_slabs(), reason="no memory files here")

PAGES = 64
NBYTES = 4 * PAGE_NBYTES
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
PLACE = Place(((8 * PAGE_NBYTES, NBYTES),), 0, 5)


@pytest.fixture
def shown() -> Iterator[SharedFile]:
    slabs = Slabs(PAGES * PAGE_NBYTES)
    slabs.grow()
    shown = SharedFile(slabs)
    slabs.memory[8 * PAGE_NBYTES : 12 * PAGE_NBYTES] = 7
    yield shown
    shown.close()


def opened(shown: SharedFile) -> tuple[PeerFile, socket.socket]:
    ours, theirs = socket.socketpair()
    return PeerFile(ours, os.dup(shown.fileno()), shown.nbytes), theirs


async def closed(file: PeerFile, peer: socket.socket) -> None:
    """Close it; the peer hears of that."""
    file.close()
    await file.wait_closed()
    peer.setblocking(False)
    assert peer.recv(1) == b""
    peer.close()


async def test_a_file_that_is_not_as_large_as_was_said_is_not_mapped(
    shown: SharedFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = socket.socketpair()

    async def fetch(*_: object) -> tuple[socket.socket, int]:
        return ours, os.dup(shown.fileno())

    monkeypatch.setattr(peer_files, "fetch_file", fetch)
    with pytest.raises(ValueError):
        await import_file(Exposed("", b"", shown.nbytes + PAGE_NBYTES))
    assert theirs.recv(1) == b""  # it hears that nobody has it
    theirs.close()


async def test_a_place_is_forgotten_among_too_many(
    shown: SharedFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_files, "_MAX_REMEMBERED", 1)
    file, peer = opened(shown)
    for first in (8, 16):
        place = Place(((first * PAGE_NBYTES, NBYTES),), 0, 5)
        file.claim(place, NBYTES)
        file.release(place)
    file.claim(PLACE, NBYTES)
    await closed(file, peer)


async def test_it_shows_what_the_peer_has(shown: SharedFile) -> None:
    file, peer = opened(shown)
    assert file.nonce == shown.nonce
    file.claim(PLACE, NBYTES)
    with file.reading(PLACE, NBYTES) as memory:
        assert memory.nbytes == NBYTES and (memory == 7).all()
        assert not memory.flags.writeable
        expected = numpy.full(NBYTES, 7, numpy.uint8)
        assert edges_at(memory, 5) == edges_at(expected, 5) != edges_at(expected, 6)
        del memory
    await closed(file, peer)


async def test_pieces_that_lie_apart_are_shown_as_one(shown: SharedFile) -> None:
    file, peer = opened(shown)
    page = PAGE_NBYTES
    place = Place(((11 * page, page), (20 * page, page)), 64, 1)
    file.claim(place, 2 * page - 64)
    with file.reading(place, 2 * page - 64) as memory:
        assert (memory[: page - 64] == 7).all() and not memory[page - 64 :].any()
        del memory
    await closed(file, peer)


@pytest.mark.parametrize(
    "place",
    [
        Place(((PAGES * PAGE_NBYTES, NBYTES),), 0, 9),
        Place(((1, NBYTES),), 0, 9),
        Place(((8 * PAGE_NBYTES, NBYTES),), 64, 9),
        Place(((8 * PAGE_NBYTES, NBYTES),), 1, 9),
        Place((), 0, 9),
        Place(((9 * PAGE_NBYTES, NBYTES),), 0, 9),
        Place(((0, PAGE_NBYTES), (8 * PAGE_NBYTES, NBYTES)), 0, 9),
        Place(PLACE.runs, 0, 5),
        Place(PLACE.runs, 0, 4),
    ],
)
async def test_a_place_that_makes_no_sense_is_refused(
    shown: SharedFile, place: Place
) -> None:
    file, peer = opened(shown)
    file.claim(PLACE, NBYTES)
    with pytest.raises(RemoteProtocolError):
        file.claim(place, NBYTES)
    await closed(file, peer)


async def test_what_is_over_may_be_somebody_elses(shown: SharedFile) -> None:
    file, peer = opened(shown)
    file.claim(PLACE, NBYTES)
    file.release(PLACE)
    with pytest.raises(RemoteProtocolError, match="before"):
        file.claim(PLACE, NBYTES)
    file.claim(Place(PLACE.runs, 0, 6), NBYTES)
    await closed(file, peer)


async def test_what_a_claim_costs_does_not_grow_with_what_is_claimed() -> None:
    nbytes = 2**40
    written = os.memfd_create("huge", os.MFD_ALLOW_SEALING)
    os.ftruncate(written, nbytes)
    fcntl.fcntl(written, fcntl.F_ADD_SEALS, SEALS)
    ours, theirs = socket.socketpair()
    fd = os.open(f"/proc/self/fd/{written}", os.O_RDONLY)
    os.close(written)
    tracemalloc.start()
    file = PeerFile(ours, fd, nbytes)
    file.claim(Place(((0, nbytes - PAGE_NBYTES),), 0, 1), nbytes - PAGE_NBYTES)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()
    await closed(file, theirs)


async def test_what_lies_between_two_others_is_no_matter(shown: SharedFile) -> None:
    file, peer = opened(shown)
    page = PAGE_NBYTES
    for generation, first in enumerate((16, 8, 12)):
        file.claim(Place(((first * page, NBYTES),), 0, generation), NBYTES)
    middle = Place(((12 * page, NBYTES),), 0, 2)
    for _ in range(2):
        file.release(middle)
    for first, count in ((7, 2), (11, 2), (15, 2), (4, 32), (19, 1)):
        with pytest.raises(RemoteProtocolError, match="another"):
            file.claim(Place(((first * page, count * page),), 0, 9), page)
    file.claim(Place(((12 * page, NBYTES),), 0, 9), NBYTES)
    await closed(file, peer)


async def test_it_is_not_closed_while_it_is_read(shown: SharedFile) -> None:
    file, peer = opened(shown)
    peer.setblocking(False)
    with file.reading(PLACE, NBYTES) as memory:
        file.close()
        file.close()
        await asyncio.sleep(0)
        assert not file.is_open and (memory == 7).all()
        with pytest.raises(BlockingIOError):
            peer.recv(1)
        del memory
    await closed(file, peer)
    with pytest.raises(PeerLost), file.reading(PLACE, NBYTES):
        pass
    with pytest.raises(PeerLost):
        assert file.nonce


async def test_a_forked_child_does_not_close_what_its_parent_reads(
    shown: SharedFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, peer = opened(shown)
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: -1)
        file.close()
    assert file.is_open and file.nonce == shown.nonce
    await closed(file, peer)


async def test_what_is_no_file_of_a_peers_is_refused(shown: SharedFile) -> None:
    ours, theirs = socket.socketpair()
    fd = os.open(os.devnull, os.O_RDONLY)
    with ours, theirs, pytest.raises(ValueError, match="no memory file"):
        PeerFile(ours, fd, shown.nbytes)
    os.close(fd)
