"""What both sides may say while they show each other memory."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from asynckv.errors import AsyncKVError, ConfigError, PeerLost, RemoteProtocolError
from asynckv.pipes.gpu_sharing import SharingStream
from asynckv.protocol.codec import Buffer
from asynckv.protocol.failures import to_failure
from asynckv.protocol.frames import Accepted, Cancel, Cancelled, Failure, Frame, Ping
from asynckv.protocol.transfer_frames import Exported, Imported

EXPORTED = Exported("asynckv-0", b"t" * 16, b"h" * 64, 2**20)


@dataclasses.dataclass
class Said:
    """In place of a link's stream."""

    frames: list[Frame] = dataclasses.field(default_factory=list)

    def send(self, frame: Frame, body: Buffer = b"") -> None:
        self.frames.append(frame)


def make(*, answers: bool) -> tuple[SharingStream, Said]:
    stream, said = SharingStream(answers=answers), Said()
    stream.use(said)  # type: ignore[arg-type]
    return stream, said


async def test_what_comes_is_kept_until_it_is_waited_for() -> None:
    stream, said = make(answers=True)
    stream.on_frame(Imported(b"n"), b"")
    stream.on_frame(EXPORTED, b"")
    assert await stream.found() == b"n" and await stream.exported() == EXPORTED
    stream.send(Imported(b"m"))
    stream.accept()
    stream.leave(ValueError("too late"))
    assert said.frames == [Imported(b"m"), Accepted()]


@pytest.mark.parametrize(
    ("answers", "frame"),
    [(True, Cancel()), (False, Cancelled()), (False, to_failure(ConfigError("no")))],
)
async def test_a_peer_that_gives_it_up_is_heard(answers: bool, frame: Frame) -> None:
    stream, said = make(answers=answers)
    waiting = asyncio.ensure_future(stream.exported())
    await asyncio.sleep(0)
    stream.on_frame(frame, b"")
    with pytest.raises(AsyncKVError):
        await waiting
    with pytest.raises(AsyncKVError):
        await stream.found()
    stream.leave(ValueError("too late"))
    stream.send(EXPORTED)
    assert said.frames == ([Cancelled()] if answers else [])


async def test_a_lost_link_ends_the_wait() -> None:
    stream, _ = make(answers=False)
    stream.on_lost(PeerLost("gone"))
    with pytest.raises(PeerLost, match="gone"):
        await stream.exported()


@pytest.mark.parametrize(
    ("answers", "error", "frame"),
    [
        (False, ValueError("-"), Cancel),
        (True, ValueError("-"), Failure),
        (True, asyncio.CancelledError(), Cancelled),
    ],
)
async def test_whoever_leaves_says_so_once(
    answers: bool, error: BaseException, frame: type[Frame]
) -> None:
    stream, said = make(answers=answers)
    stream.leave(error)
    stream.leave(error)
    stream.on_frame(EXPORTED, b"")
    assert [type(one) for one in said.frames] == [frame]


async def test_a_cancelled_wait_leaves_no_trace() -> None:
    stream, _ = make(answers=False)
    waiting = asyncio.ensure_future(stream.exported())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    stream.on_frame(EXPORTED, b"")
    assert await stream.exported() == EXPORTED


@pytest.mark.parametrize(
    "frames", [(EXPORTED, EXPORTED), (Imported(b"n"), Imported(b"n")), (Ping(1),)]
)
async def test_what_makes_no_sense_breaks_the_link(frames: tuple[Frame, ...]) -> None:
    stream, _ = make(answers=False)
    for frame in frames[:-1]:
        stream.on_frame(frame, b"")
    with pytest.raises(RemoteProtocolError, match="no sense"):
        stream.on_frame(frames[-1], b"")


async def test_no_frame_has_a_body() -> None:
    stream, _ = make(answers=False)
    with pytest.raises(RemoteProtocolError, match="body"):
        stream.on_frame(EXPORTED, b"something")
