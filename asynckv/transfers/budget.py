"""A consumer's receive bound: what peers may send that nobody has taken yet."""

from __future__ import annotations

import torch

from asynckv.errors import EntryTooLarge
from asynckv.tensors.growth import Growth
from asynckv.types import TensorSpec
from asynckv.waits.line import ByteRoom

__all__ = ("ReceiveBudget",)


class ReceiveBudget(ByteRoom):
    """Bytes, first come, first served, and the ``memory`` of as many for them."""

    def __init__(self, max_bytes: int, memory: Growth | None = None) -> None:
        super().__init__(
            max_bytes,
            who="a delivery",
            what=f"room in the receive bound of {max_bytes} bytes",
            ends_with="the end of another drop_select or get",
        )
        self._memory = memory or Growth(max_bytes)

    def empty(self, spec: TensorSpec) -> torch.Tensor:
        """Return a tensor for some of the bytes that were reserved."""
        return self._memory.lending.spare(spec)

    async def reserve(self, nbytes: int, *, in_host: bool = True) -> None:
        """Take ``nbytes``, waiting behind those who asked before.

        Also waits for slabs that are under way, if they are needed for so much
        ``in_host`` memory.

        A cancelled call leaves no trace.

        :raises EntryTooLarge: ``nbytes`` exceeds the bound
        """
        if nbytes > self.max_bytes:
            raise EntryTooLarge(
                nbytes=nbytes,
                max_bytes=self.max_bytes,
                hint="raise connect(max_bytes=...) or pass into=",
            )
        await self.take(nbytes)
        if not in_host:
            return
        try:
            await self._memory.reach(nbytes)
        except BaseException:
            self.release(nbytes)
            raise
