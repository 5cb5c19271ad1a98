"""One rank of a toy engine: its heads' part of the caches, in some layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from asynckv.parallel.shapes import EngineShape
from harness.engines.toy_model import ToyModel
from harness.fake_devices import FakeDevice

__all__ = ("ToyRank",)


class ToyRank:
    """Paged caches of every layer, for the heads of one rank.

    On a GPU that is not there what it computes is work of its current stream, and is
    done when somebody looks whether it is.
    """

    def __init__(
        self,
        model: ToyModel,
        shape: EngineShape,
        rank: int,
        num_blocks: int,
        gpu: FakeDevice | None = None,
    ) -> None:
        self._gpu = gpu
        self.model, self.shape = model, shape
        self.heads = shape.heads_of(rank)
        sizes = {
            "K": 2,
            "B": num_blocks,
            "N": shape.block_size,
            "H": len(self.heads),
        }
        axes = shape.layout.axes.removeprefix("L")
        dims = [sizes[axis] for axis in axes]
        self.caches = {
            layer: torch.full((*dims, model.head_dim), -1, dtype=torch.int32)
            for layer in model.layer_names
        }
        if gpu is not None:
            self.caches = {name: gpu.tensor(one) for name, one in self.caches.items()}
        self._order = [*(axes.index(axis) for axis in "BNKH"), len(axes)]

    def write(
        self, layer: str, block_ids: Sequence[int], token_ids: Sequence[int], start: int
    ) -> None:
        """Compute a layer's KV of the tokens from ``start`` on, into their slots."""
        rows = self.model.rows(token_ids, start, self.model.layer_names.index(layer))
        mine = torch.from_numpy(rows)[:, :, self.heads.start : self.heads.stop]
        blocks, slots = self._slots(block_ids, start, len(token_ids))

        def compute() -> None:
            self._view(layer)[blocks, slots] = mine

        if self._gpu is None:
            compute()
        else:
            self._gpu.tensors.stream(self._gpu.device.index).add(_Computing(compute))

    def read(self, layer: str, block_ids: Sequence[int], count: int) -> torch.Tensor:
        """Return a layer's KV of ``count`` tokens: (tokens, 2, heads, head_dim)."""
        blocks, slots = self._slots(block_ids, 0, count)
        if self._gpu is not None:
            stream = self._gpu.tensors.stream(self._gpu.device.index)
            while stream.work:
                self._gpu.process.gpus.progress()
        return self._view(layer)[blocks, slots].cpu()

    def sums(self, block_ids: Sequence[int], count: int) -> dict[tuple[int, int], int]:
        """Return what each (layer, head) comes to, as the model counts it."""
        found = {}
        for index, layer in enumerate(self.model.layer_names):
            rows = self.read(layer, block_ids, count).numpy()
            for place, head in enumerate(self.heads):
                part = rows[:, :, place]
                found[index, head] = self.model.sum_of(part, index, head)
        return found

    def _view(self, layer: str) -> torch.Tensor:
        return self.caches[layer].permute(self._order)

    def _slots(
        self, block_ids: Sequence[int], start: int, stop: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        places = torch.arange(start, stop)
        size = self.shape.block_size
        return torch.tensor(block_ids, dtype=torch.int64)[places // size], places % size


class _Computing:
    """A kernel of the engine's."""

    def __init__(self, compute: Callable[[], None]) -> None:
        self._compute = compute

    def run(self) -> bool:
        self._compute()
        return True
