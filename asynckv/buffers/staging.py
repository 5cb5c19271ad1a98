"""What is on a GPU, copied to where a peer of this host reads it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

from asynckv.buffers.stage import Stage
from asynckv.errors import ChecksumError
from asynckv.links.sharing import MapDigest
from asynckv.shielding import clear_all_frames
from asynckv.tensors.arena import Region
from asynckv.tensors.copying import CopyPool
from asynckv.tensors.slab_regions import SlabRegion
from asynckv.types import TensorSpec

__all__ = ("Original", "Staging")

logger = logging.getLogger(__name__)


class Original(NamedTuple):
    """One tensor on a GPU; ``digest`` is that of what was put there, if it is known."""

    region: Region
    spec: TensorSpec
    digest: bytes | None


class Staging:
    """Copies for one peer, by ``pool``, one delivery at a time, to memory of ``stage``.

    They are compared with what was inserted, unless ``digest`` is off.
    """

    def __init__(self, pool: CopyPool, stage: Stage | None, digest: MapDigest) -> None:
        self._pool = pool
        self._stage = stage
        self._is_digested = digest != "off"
        self._turn = asyncio.Lock()

    async def copy(
        self,
        originals: Sequence[Original],
        copied: Callable[[Sequence[SlabRegion] | None], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """Copy all of a delivery when it is its turn, then call one of the two.

        ``copied`` is told where the copies are, to be released by whoever hears it, or
        of nothing where there is no room. If it raises, they are released here, and
        ``failed`` is called too. Waits for no peer. A cancelled call has
        called neither, and ends when the GPU is done.
        """
        copies: Sequence[SlabRegion] | None = None
        try:
            async with self._turn:
                if self._stage is not None:
                    sizes = [original.region.nbytes for original in originals]
                    copies = await self._stage.take(sizes)
                if copies is not None:
                    await self._copy(originals, copies)
            copied(copies)
            copies = None
        except Exception as exc:
            # Whatever it is: who waits for the bytes would wait for ever.
            clear_all_frames(exc)  # they keep the GPU's memory
            logger.exception("an entry cannot be read from its GPU")
            failed(exc)
        finally:
            for copy in copies or ():
                copy.release()

    async def _copy(
        self, originals: Sequence[Original], copies: Sequence[SlabRegion]
    ) -> None:
        copying = self._pool.copy(
            [original.region.place(original.spec) for original in originals],
            [
                copy.place(original.spec)
                for original, copy in zip(originals, copies, strict=True)
            ],
            digest=self._is_digested,
        )
        for original, found in zip(originals, await copying, strict=True):
            if self._is_digested and original.digest and found != original.digest:
                raise ChecksumError(
                    "what lies in the GPU's memory is not what was inserted",
                    hint="the delivery was refused; nothing of it was used",
                )
