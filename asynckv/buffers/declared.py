"""The tensors that a streaming entry was declared with, and which were put."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from asynckv.buffers.gpu_staging import StagedTensor
from asynckv.tensors.blocks import KVMemory, spec_in
from asynckv.types import TensorSpec

__all__ = ("Declared",)


class Declared:
    """What a writer has promised, and what it has kept of it."""

    def __init__(self, specs: Mapping[str, TensorSpec]) -> None:
        self._specs = specs
        self._begun: set[str] = set()
        self._put: set[str] = set()

    @contextmanager
    def putting(self, name: str, tensor: KVMemory | StagedTensor) -> Iterator[None]:
        """Note a put. One that fails has put nothing, and may be made again.

        :raises ValueError: unknown name, put before, other shape or dtype
        :raises TypeError: no tensor
        """
        self._check(name, tensor)
        self._begun.add(name)
        try:
            yield
        except BaseException:
            self._begun.discard(name)
            raise
        self._put.add(name)

    def check_whole(self) -> None:
        """Refuse to commit what is not whole.

        :raises ValueError: a tensor was never put, or is still being put
        """
        missing = [name for name in self._specs if name not in self._put]
        if missing:
            raise ValueError(
                f"{len(missing)} declared tensors were not put: "
                f"{', '.join(missing[:5])}; the entry is aborted "
                "(await writer.put(name, tensor) for each)"
            )

    def _check(self, name: str, tensor: KVMemory | StagedTensor) -> None:
        if name not in self._specs:
            declared = ", ".join(self._specs)
            raise ValueError(f"{name!r} was not declared; declared: {declared}")
        if name in self._begun:
            raise ValueError(f"{name!r} was put before")
        if not isinstance(tensor, KVMemory | StagedTensor):
            raise TypeError(f"{name!r} is a {type(tensor).__name__}, not a tensor")
        found = tensor.spec if isinstance(tensor, StagedTensor) else spec_in(tensor)
        spec = self._specs[name]
        if found != spec:
            raise ValueError(
                f"{name!r} is {found.dtype} {found.shape}, declared was "
                f"{spec.dtype} {spec.shape}"
            )
