"""The tensors of one remotely selected entry, as they land."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from asynckv.abc import SelectStream
from asynckv.buffers.delivery import Delivery
from asynckv.buffers.lifting import lift
from asynckv.buffers.queries import tensor_of
from asynckv.buffers.selecting import Selecting
from asynckv.tensors.blocks import KVMemory
from asynckv.tensors.copying import CopyPool
from asynckv.types import TensorSpec

__all__ = ("RemoteStream",)


class RemoteStream(SelectStream):
    """Hands out each tensor once it is verified, where it is wanted: see lifting."""

    def __init__(
        self,
        selecting: Selecting,
        delivery: Delivery,
        targets: Mapping[str, KVMemory],
        pool: CopyPool,
    ) -> None:
        offer, manifest = delivery.offer, delivery.manifest
        self.entry_id = offer.entry_id
        self.attempt = offer.attempt
        self.matched_tokens = offer.matched_tokens
        self.input_tokens = tensor_of(manifest.input_tokens)
        self.roi = tensor_of(manifest.roi)
        self.specs: Mapping[str, TensorSpec] = manifest.specs
        self._selecting = selecting
        self._delivery = delivery
        self._targets = targets
        self._pool = pool
        self._lifted: dict[str, torch.Tensor] = {}
        self._next = 0
        self._is_closed = False

    async def __anext__(self) -> tuple[str, torch.Tensor]:
        self._check_open()
        landed = self._delivery.landed
        if self._next >= len(self.specs):
            while not self._delivery.is_complete:
                await self._selecting.changed()
            raise StopAsyncIteration
        while len(landed) <= self._next:
            await self._selecting.changed()
        name = landed[self._next]
        self._next += 1
        return name, await self._tensor(name)

    async def wait_for(self, name: str) -> torch.Tensor:
        self._check_open()
        if name not in self.specs:
            raise KeyError(name)
        while name not in self._delivery.landed:
            await self._selecting.changed()
        return await self._tensor(name)

    async def _tensor(self, name: str) -> torch.Tensor:
        if name not in self._lifted:
            lifting = lift(self._delivery, name, self._targets, self._pool)
            self._lifted[name] = await lifting
        return self._lifted[name]

    def close(self) -> None:
        """No more tensors."""
        self._is_closed = True

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("the stream was left already")
