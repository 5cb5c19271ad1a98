"""The parts of a stream, copied within a GPU from a peer's memory of it, as they come.

The peer has offered where they will lie, and says of each when it lies there. What is
not copied is not used: the memory may be somebody else's once it was let go.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from asynckv.buffers.importing import ImportedMemory
from asynckv.buffers.map_reader import MappedParts
from asynckv.errors import RemoteProtocolError
from asynckv.links.link import Link
from asynckv.links.progress import Progress
from asynckv.protocol.device_frames import SentDevices
from asynckv.protocol.handshake import DigestMode, strictest
from asynckv.shielding import clear_all_frames, wait_shielded
from asynckv.tensors.cuda import DeviceMemory
from asynckv.tensors.device_copying import DeviceCopyPool
from asynckv.tensors.runs import Memory

__all__ = ("ShownArrivals", "ShownParts")


class ShownParts(MappedParts):
    """Where the parts of a stream will lie in ``memory``, but for those that ride."""

    memory: ImportedMemory
    pool: DeviceCopyPool

    def source(self, index: int) -> DeviceMemory:
        """Return a part's bytes; whoever has them keeps the memory of all parts."""
        place = self.places[index]
        if place is None or self.pin is None:
            raise ValueError(f"part {index} does not lie there, or was let go")
        return self.memory.imported.part(place, self.sizes[index], self.pin)


class _Awaited(NamedTuple):
    """Where a part is to land, and who is told."""

    target: DeviceMemory
    done: Callable[[bytes, BaseException | None], None]


class ShownArrivals:
    """One transfer; fits :class:`~asynckv.links.receiving.PartReceiver`.

    ``digest`` is what both sides want to be compared of what has landed.
    """

    def __init__(self, link: Link, parts: ShownParts) -> None:
        self.pool = parts.pool
        self.digest: DigestMode = parts.memory.digest
        self.progress: Progress = link.progress
        self._parts = parts
        self._awaited: dict[int, _Awaited] = {}
        self._reading: set[asyncio.Task[None]] = set()
        self._is_stopped = False

    def receive(
        self,
        transfer: int,
        part: int,
        target: Memory | DeviceMemory,
        done: Callable[[bytes, BaseException | None], None],
    ) -> None:
        if not isinstance(target, DeviceMemory):
            raise TypeError("memory of the host does not come this way")
        self._awaited[part] = _Awaited(target, done)

    def sent(self, frame: SentDevices) -> None:
        """A part lies where the peer has offered it: begin to copy it. Never waits.

        :raises RemoteProtocolError: there is no such part, it was told of before, or
            less is to be compared than this side asks for
        """
        if self._is_stopped:
            return
        if strictest(self.digest, frame.kind) != frame.kind:
            raise RemoteProtocolError(f"digests of {frame.kind}, not of {self.digest}")
        awaited = self._awaited.pop(frame.part, None)
        if awaited is None:
            raise RemoteProtocolError(
                f"part {frame.part} is there, which makes no sense"
            )
        self.progress.note(awaited.target.nbytes)
        reading = self._read(self._parts.source(frame.part), awaited, frame)
        task = asyncio.get_running_loop().create_task(
            reading, name=f"asynckv: read part {frame.part} of a stream"
        )
        self._reading.add(task)
        task.add_done_callback(self._reading.discard)
        if not self._awaited:
            self._parts.let_go()  # only what is copied just now keeps the memory

    def stop(self, transfer: int) -> None:
        self._is_stopped = True
        self._awaited.clear()
        self._parts.let_go()
        for task in self._reading:
            task.cancel()

    async def quiesce(self, transfer: int) -> None:
        self.stop(transfer)
        # All of them, however often the wait is cancelled: the memory is lent.
        await wait_shielded(asyncio.gather(*self._reading, return_exceptions=True))

    async def _read(
        self, source: DeviceMemory | None, awaited: _Awaited, frame: SentDevices
    ) -> None:
        (target, done), kind = awaited, frame.kind
        try:
            # No variable of the source: an error's traceback would keep it in use.
            places, source = [source] if source is not None else [], None
            copying = self.pool.copy(places, [target], digest=kind == "full")
            del places
            with self.progress.working(frame.transfer):
                (digest,) = await copying
                if kind == "edges":
                    (digest,) = await self.pool.edges([target])
        except Exception as exc:  # noqa: BLE001 - whoever waits is told
            clear_all_frames(exc)
            del awaited, target  # as there
            done(b"", exc)
        else:
            done(digest, None)
