"""The parts of one transfer that a buffer's side reads where this side has staged them.

They are pinned for the reader before it is told of them: only its word, or the end of
what it has open, lets the memory be another's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeAlias

from asynckv.buffers.gpu_staging import Source, StagedTensor, places_of
from asynckv.links.sharing import MapHolder
from asynckv.protocol.handshake import DigestMode
from asynckv.protocol.ipc_frames import SentShared
from asynckv.tensors.device_copying import DeviceCopyPool

__all__ = ("ShownParts", "ShownTo")


@dataclasses.dataclass(frozen=True, slots=True)
class ShownTo:
    """Who reads memory of this side's GPU, and what digests it here."""

    holder: MapHolder
    pool: DeviceCopyPool


_Staged: TypeAlias = tuple[int, StagedTensor, bytes]


class ShownParts:
    """Each of ``parts`` with its number, and with its digest where that is known.

    ``shown`` is who reads them, if anybody does; ``tell`` sends what is said of each.
    """

    def __init__(
        self,
        transfer: int,
        parts: Sequence[tuple[int, Source, bytes | None]],
        shown: ShownTo | None,
        tell: Callable[[SentShared], None],
    ) -> None:
        self._transfer = transfer
        self._parts = parts
        self._shown = shown
        self._tell = tell
        self._pin: int | None = None

    @property
    def are_read(self) -> bool:
        """Whether the reader may be at them."""
        return self._pin is not None

    async def show(self, kind: DigestMode) -> None:
        """Say where each lies, with a digest of that ``kind`` or of all its bytes.

        If one of them is not there, only that. A cancelled call ends when nothing reads
        them on this side.

        :raises GPUFailed: the GPU failed
        """
        shown, staged, edges = self._shown, list[_Staged](), iter(list[bytes]())
        if shown is not None and not shown.holder.is_usable:
            shown = None  # nobody would ever say that he is through with it
        for index, source, digest in self._parts:
            if shown is None or not isinstance(source, StagedTensor):
                self._tell(SentShared(self._transfer, index, "off"))
                return
            staged.append((index, source, digest or b""))
        if shown is None:
            return
        self._pin = shown.holder.pin([source.region for _, source, _ in staged]).number
        if kind == "edges":
            unknown = [source for _, source, digest in staged if not digest]
            edges = iter(await shown.pool.edges([one.place() for one in unknown]))
        for index, source, digest in staged:
            said: DigestMode = "full" if digest else kind
            if not digest and kind == "edges":
                digest = next(edges)
            elif not digest and kind == "full":
                (digest,) = await shown.pool.digest(places_of([source]))
            offset = source.region.start
            self._tell(SentShared(self._transfer, index, said, offset, digest))

    def let_go(self) -> None:
        """The reader is through with all of them. Never waits."""
        shown, self._shown = self._shown, None
        pin, self._pin = self._pin, None
        if pin is not None and shown is not None:
            shown.holder.unpin(pin)
