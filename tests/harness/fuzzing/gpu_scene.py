"""Two sides that move payload from GPU to GPU, and what their link says meanwhile.

The GPUs are not there; the link, its stream and what is said on it are the real ones.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Final

from asynckv.devices.cuda import DeviceMemory
from asynckv.links.dial import dial
from asynckv.links.link import LinkStream
from asynckv.links.listen import listen
from asynckv.protocol.frames import OpeningFrame
from asynckv.protocol.transfer_frames import OpenDevices
from asynckv.sharing.gpu_channel import DeviceStream
from asynckv.testing.blocked import until
from asynckv.testing.expectations import expect
from asynckv.transports.nccl.directions import NcclSettings
from asynckv.transports.nccl.transport import NcclTransport
from harness.fake_gpus import FakeGpus
from harness.fuzzing.recording import Recording, Tap, heard
from harness.link_pairs import name_of
from harness.nccl_pairs import NcclPair

__all__ = ("record_gpus",)

_SETTINGS: Final = NcclSettings(chunk_bytes=4096, max_operations=2)
_CONTENT: Final = bytes(range(250)) * 40


async def record_gpus() -> Recording:
    """Both ways; not wanted; aborted; to the end."""
    pair = NcclPair(FakeGpus(2), _no_loss, _no_loss, settings=_SETTINGS)
    service = _Accepting(pair.far)
    try:
        listener = await listen(
            "tcp://127.0.0.1:0",
            identity=name_of("far"),
            service_for=lambda link: service,
        )
        try:
            return await heard(listener.url, _Using(pair, service).play)
        finally:
            await listener.aclose()
    finally:
        await pair.aclose()


class _Accepting:
    """Opens its transport for whoever asks."""

    def __init__(self, transport: NcclTransport) -> None:
        self.opening: asyncio.Task[None]
        self._transport = transport

    def open(
        self, stream: LinkStream, frame: OpeningFrame, body: bytes
    ) -> DeviceStream:
        if not isinstance(frame, OpenDevices):
            raise ValueError(f"asked for something else: {frame}")
        channel = DeviceStream.answer(stream)
        channel.describe(self._transport.describe())
        opening = self._transport.open(frame.description, channel)
        self.opening = asyncio.create_task(opening)
        return channel


@dataclasses.dataclass(frozen=True)
class _Using:
    """Does with a pair what there is to do."""

    pair: NcclPair
    accepting: _Accepting

    async def play(self, url: str, tap: Tap) -> None:
        near, far = self.pair.near, self.pair.far
        link = await dial(url, identity=name_of("near"), lanes=1)
        try:
            channel = DeviceStream(answers=False)
            channel.ask(link, near.describe())
            await near.open(await channel.description(), channel)
            await self.accepting.opening
            await self._move(0, 1)
            await self._move(1, 2)
            await self._offer_what_nobody_wants()
            await self._abort()
            await near.aclose()
            await far.aclose()
        finally:
            await link.aclose()

    async def _offer_what_nobody_wants(self) -> None:
        """And take back what the other side may have refused already."""
        near, far = self.pair.near, self.pair.far
        far.announce(5)
        near.send(5, 0, self.pair.memory(0, _CONTENT), _ignore)
        near.stop(5)
        await near.quiesce(5)

    async def _abort(self) -> None:
        """One side posts what the other never does: both let go of it."""
        near, far = self.pair.near, self.pair.far
        peers_nccl = self.pair.processes[0].nccl
        peers_nccl.is_silent = True
        source, target = self._memory(0)
        far.receive(7, 0, target, _ignore)
        near.send(7, 0, source, _ignore)
        await until(lambda: far.receiver.nbytes > 0)
        await far.quiesce(7)
        peers_nccl.is_silent = False

    def _memory(self, side: int) -> tuple[DeviceMemory, DeviceMemory]:
        """Of one side's GPU what is sent, and of the other's where it lands."""
        source = self.pair.memory(side, _CONTENT)
        return source, self.pair.memory(1 - side, bytes(len(_CONTENT)))

    async def _move(self, side: int, transfer: int) -> None:
        ends = (self.pair.near, self.pair.far)
        source, target = self._memory(side)
        landed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def tell(digest: bytes, error: BaseException | None) -> None:
            if error is None:
                landed.set_result(None)
            else:
                landed.set_exception(error)

        ends[1 - side].receive(transfer, 0, target, tell)
        ends[side].send(transfer, 0, source, _ignore)
        await landed
        is_same = self.pair.content(1 - side, target) == _CONTENT
        expect(is_same, "other bytes landed")


def _ignore(digest: bytes, error: BaseException | None) -> None:
    """Whoever is told does not care."""


def _no_loss(error: Exception) -> None:
    """The end of the link is no surprise here."""
