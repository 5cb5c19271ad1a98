"""Blocks that leave for a store from memory of the GPU on which they are.

They are gathered there, and are read no more once their copy is made. There is memory
for a few: what finds none leaves by way of the host, at once.
"""

from __future__ import annotations

from collections.abc import Callable

from asynckv.buffers.gpu_room import StagingStore
from asynckv.buffers.gpu_staging import StagedTensor
from asynckv.connectors.store_line import StoreLine
from asynckv.errors import PeerLost
from asynckv.tensors.cuda import DeviceMemory
from asynckv.types import TensorSpec

__all__ = ("LeavingBlock", "StoreLeaving")


class LeavingBlock:
    """One block's value, made in memory of its GPU, until :meth:`release`."""

    def __init__(
        self,
        store: StagingStore,
        staged: StagedTensor,
        released: Callable[[LeavingBlock], None],
    ) -> None:
        self._store = store
        self._staged = staged
        self._released = released
        self._is_released = False
        self.is_being_put = False

    @property
    def nbytes(self) -> int:
        """How long it is."""
        return self._staged.nbytes

    @property
    def is_at_work(self) -> bool:
        """Whether the peer, or the GPU, may be at it though it was released."""
        return self._staged.region.is_pinned

    @property
    def is_released(self) -> bool:
        """Whether it is gone, be it with its link."""
        return self._is_released

    def place(self) -> DeviceMemory:
        """Return its bytes; whoever has them keeps them.

        :raises RuntimeError: it was released
        """
        return self._staged.place()

    async def put(self, key: str) -> None:
        """Store it. On return, however it ends, it may be released.

        :raises PeerLost: the link by which it was to leave is lost
        :raises Exception: what the store says
        """
        if self._is_released:
            raise PeerLost("the link to the store was lost, and what waited for it")
        self.is_being_put = True
        await self._store.put_staged(key, self._staged)

    def release(self) -> None:
        """Nobody wants it any more. Again is nothing. Never waits."""
        if not self._is_released:
            self._is_released = True
            self._staged.release()
            self._released(self)


class StoreLeaving:
    """Hands out memory of the GPU that ``line`` was told of: its share, at most.

    What waits to be put when a link is lost goes at once: the next one is to find that
    memory.
    """

    def __init__(self, line: StoreLine) -> None:
        self.used_bytes = 0
        """Of what is not released."""
        self._line = line
        self._blocks: set[LeavingBlock] = set()
        self._at_work: list[LeavingBlock] = []
        line.call_when_left(self._on_left)

    @property
    def is_open(self) -> bool:
        """Whether blocks may leave so now."""
        return self._line.staging is not None

    def take(self, nbytes: int) -> LeavingBlock | None:
        """Take memory for a block; ``None``: it leaves by way of the host. Never waits.

        Who gets it releases it.
        """
        store, spec = self._line.staging, TensorSpec((nbytes,), "uint8")
        self._at_work = [one for one in self._at_work if one.is_at_work]
        used = self.used_bytes + sum(one.nbytes for one in self._at_work)
        if store is None or used + nbytes > self._line.leaving_bytes:
            return None
        staged = store.take(spec)
        if staged is None:
            return None
        block = LeavingBlock(store, staged, self._on_released)
        self._blocks.add(block)
        self.used_bytes += nbytes
        return block

    def _on_released(self, block: LeavingBlock) -> None:
        self._blocks.discard(block)
        self.used_bytes -= block.nbytes
        if block.is_at_work:
            self._at_work.append(block)

    def _on_left(self) -> None:
        for block in list(self._blocks):
            if not block.is_being_put:
                block.release()
