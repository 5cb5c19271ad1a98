"""Reading an offer's tensors in mapped memory of the host, for a GPU of this side."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

from asynckv.buffers.delivery import Delivery
from asynckv.buffers.lifting import on_host
from asynckv.buffers.map_reader import MapReader
from asynckv.buffers.mapped import MappedMemory
from asynckv.buffers.receive_budget import ReceiveBudget
from asynckv.tensors.blocks import KVMemory
from asynckv.tensors.copying import CopyPool

__all__ = ("LiftedReader",)


class LiftedReader(MapReader):
    """Shows what is mapped, until it is copied to the GPU, and counts as received.

    :func:`~asynckv.buffers.lifting.lift_all` does that. Here is copied only what lands
    in memory of the host, of the caller's own.
    """

    is_in_host: ClassVar[bool] = False

    def __init__(self, memory: MappedMemory, pool: CopyPool) -> None:
        super().__init__(memory, pool, views=True)
        self.is_charged = True

    async def take(
        self,
        delivery: Delivery,
        targets: Mapping[str, KVMemory],
        budget: ReceiveBudget,
        stands: Callable[[Delivery], bool],
    ) -> None:
        await super().take(delivery, on_host(targets), budget, stands)
