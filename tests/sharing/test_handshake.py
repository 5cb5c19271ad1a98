"""What both sides may say while one opens memory of the other, or each of both."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import sys
import weakref
from typing import Any

import pytest

from asynckv.errors import AsyncKVError, ConfigError, PeerLost, RemoteProtocolError
from asynckv.protocol.codec import Buffer
from asynckv.protocol.failures import to_failure
from asynckv.protocol.frames import Accepted, Cancel, Cancelled, Failure, Frame, Ping
from asynckv.protocol.transfer_frames import Exposed, OpenMemory, Proved
from asynckv.sharing.handshake import Handshake
from asynckv.testing.blocked import until_blocked

ON_GPU = Exposed("asynckv-0", b"t" * 16, 2**20, b"h" * 64)
ON_HOST = Exposed("asynckv-0", b"t" * 16, 2**20)
GPU = OpenMemory("lookup", "0" * 32)
GPU_OF_ASKER = OpenMemory("inserts", "0" * 32)
GPU_OF_BOTH = OpenMemory("pipe", "0" * 32)
HOST = OpenMemory("lookup")


@dataclasses.dataclass
class Said:
    """In place of a link's stream."""

    frames: list[Frame] = dataclasses.field(default_factory=list)

    def send(self, frame: Frame, body: Buffer = b"") -> None:
        self.frames.append(frame)

    def open_stream(self, handler: object, frame: Frame) -> Said:
        return self


def make(request: OpenMemory = GPU_OF_BOTH, *, answers: bool) -> tuple[Handshake, Said]:
    said: Any = Said()
    if answers:
        return Handshake.answer(said, request), said
    return Handshake.ask(said, request), said


@dataclasses.dataclass
class Reader:
    """In place of the peer that may open memory."""

    nonce: bytes
    may_open: bool = True
    exposed: Exposed = ON_GPU

    def verify(self, nonce: bytes) -> bool:
        return nonce == self.nonce

    def link_over(self) -> None:
        self.may_open = False


async def export(handshake: Handshake, found: bytes) -> None:
    reader = Reader(found)
    try:
        await handshake.export(reader)  # type: ignore[arg-type]
    finally:
        is_over = sys.exc_info()[0] is not None
        assert reader.may_open is not is_over


async def test_what_comes_is_kept_until_it_is_waited_for() -> None:
    handshake, said = make(answers=True)
    handshake.on_frame(Proved(b"n"), b"")
    handshake.on_frame(ON_GPU, b"")
    with handshake:
        await export(handshake, b"n")
        assert await handshake.exposed == ON_GPU
        handshake.prove(b"m")
        handshake.accept()
    assert said.frames == [ON_GPU, Proved(b"m"), Accepted()]


async def test_whoever_is_about_to_accept_hears_that_the_peer_has_left() -> None:
    handshake, said = make(GPU_OF_ASKER, answers=True)
    handshake.check()
    handshake.on_frame(Cancel(), b"")
    with pytest.raises(AsyncKVError, match="given it up"), handshake:
        handshake.check()
    assert said.frames == [Cancelled()]


async def test_who_has_accepted_says_nothing_more() -> None:
    handshake, said = make(answers=True)
    with pytest.raises(ValueError, match="too late"), handshake:
        handshake.accept()
        raise ValueError("too late")
    handshake.prove(b"m")
    assert said.frames == [Accepted()]


async def test_whoever_has_read_something_else_is_refused() -> None:
    handshake, said = make(GPU, answers=True)
    handshake.on_frame(Proved(b"x"), b"")
    with pytest.raises(ConfigError, match="not what the memory holds"), handshake:
        await export(handshake, b"n")
    assert [type(one) for one in said.frames] == [Exposed, Failure]


@pytest.mark.parametrize(
    ("answers", "frame"),
    [(True, Cancel()), (False, Cancelled()), (False, to_failure(ConfigError("no")))],
)
async def test_a_peer_that_gives_it_up_is_heard(answers: bool, frame: Frame) -> None:
    handshake, said = make(answers=answers)
    waiting = asyncio.ensure_future(export(handshake, b"n"))
    await asyncio.sleep(0)
    handshake.on_frame(frame, b"")
    with pytest.raises(AsyncKVError):
        await waiting
    with pytest.raises(AsyncKVError), handshake:
        await handshake.exposed
    assert said.frames == [ON_GPU, *([Cancelled()] if answers else [])]


async def test_who_leaves_behind_his_proof_may_open_nothing() -> None:
    handshake, said = make(GPU, answers=True)
    handshake.on_frame(Proved(b"n"), b"")
    handshake.on_frame(Cancel(), b"")
    with pytest.raises(AsyncKVError, match="given it up"), handshake:
        await export(handshake, b"n")
    assert said.frames == [Cancelled()]


async def test_who_asked_to_be_read_waits_until_that_is_accepted() -> None:
    handshake, said = make(GPU_OF_ASKER, answers=False)
    handshake.on_frame(Proved(b"n"), b"")
    waiting = asyncio.ensure_future(export(handshake, b"n"))
    await until_blocked(waiting)
    handshake.on_frame(Accepted(), b"")
    await waiting
    assert said.frames == [ON_GPU]


async def test_who_is_refused_after_the_proof_is_not_read() -> None:
    handshake, _ = make(GPU_OF_ASKER, answers=False)
    handshake.on_frame(Proved(b"n"), b"")
    waiting = asyncio.ensure_future(export(handshake, b"n"))
    await until_blocked(waiting)
    handshake.on_frame(to_failure(ConfigError("no")), b"")
    with pytest.raises(ConfigError, match="no"):
        await waiting


async def test_a_lost_link_ends_the_wait() -> None:
    handshake, said = make(answers=False)
    handshake.on_lost(PeerLost("gone"))
    with pytest.raises(PeerLost, match="gone"), handshake:
        await handshake.exposed
    assert not said.frames


@pytest.mark.parametrize(
    ("answers", "error", "frame"),
    [
        (False, ValueError("-"), Cancel()),
        (False, asyncio.CancelledError(), Cancel()),
        (True, ValueError("-"), Failure("ValueError", "-")),
        (True, asyncio.CancelledError(), Cancelled()),
    ],
)
async def test_whoever_leaves_by_an_error_says_so_and_hears_nothing_more(
    answers: bool, error: BaseException, frame: Frame
) -> None:
    handshake, said = make(answers=answers)
    with pytest.raises(type(error)), handshake:
        raise error
    handshake.on_frame(Ping(1), b"")
    assert said.frames == [frame]


async def test_what_comes_after_a_cancelled_wait_makes_sense() -> None:
    handshake, _ = make(HOST, answers=False)

    async def wait() -> Exposed:
        return await handshake.exposed

    waiting = asyncio.create_task(wait())
    await asyncio.sleep(0)
    waiting.cancel()
    handshake.on_frame(ON_HOST, b"")
    with pytest.raises(asyncio.CancelledError):
        await waiting


@pytest.mark.parametrize(
    ("opened", "answers", "frames"),
    [
        (GPU_OF_BOTH, False, (ON_GPU, ON_GPU)),
        (GPU_OF_BOTH, True, (ON_GPU, ON_GPU)),
        (GPU_OF_BOTH, False, (Proved(b"n"), Proved(b"n"))),
        (GPU, False, (Proved(b"n"),)),
        (GPU, True, (ON_GPU,)),
        (GPU_OF_ASKER, False, (ON_GPU,)),
        (GPU_OF_ASKER, True, (Proved(b"n"),)),
        (HOST, False, (ON_GPU,)),
        (GPU, False, (ON_HOST,)),
        (HOST, False, (Proved(b"n"),)),
        (GPU, True, (Accepted(),)),
        (GPU, False, (Cancel(),)),
        (HOST, False, (Ping(1),)),
    ],
)
async def test_what_makes_no_sense_breaks_the_link(
    opened: OpenMemory, answers: bool, frames: tuple[Frame, ...]
) -> None:
    handshake, _ = make(opened, answers=answers)
    for frame in frames[:-1]:
        handshake.on_frame(frame, b"")
    with pytest.raises(RemoteProtocolError, match="belongs here"):
        handshake.on_frame(frames[-1], b"")


async def test_no_frame_has_a_body() -> None:
    handshake, _ = make(answers=False)
    with pytest.raises(RemoteProtocolError, match="body"):
        handshake.on_frame(ON_GPU, b"something")


async def test_an_error_that_somebody_keeps_is_kept_by_no_handshake() -> None:
    handshake, _ = make(answers=False)
    handshake.on_frame(to_failure(ConfigError("no")), b"")
    gc.disable()
    try:
        try:
            with handshake:
                await handshake.exposed
        except ConfigError as exc:
            kept = weakref.ref(exc)
        assert kept() is None
    finally:
        gc.enable()
