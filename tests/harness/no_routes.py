"""A side from whose GPU nothing leads to a peer's, but through memory of the host."""

from __future__ import annotations

from asynckv.links.link import Link
from asynckv.sharing.gpu_channel import GpuLink
from asynckv.tensors.copying import CopyPool
from asynckv.transfers.host_copies import D2HCopier, HostCopies
from asynckv.transfers.outgoing import GpuImporter
from asynckv.transfers.source import GpuStaging
from asynckv.transfers.staging import GpuRoom

__all__ = ("NoRoutes",)


class NoRoutes:
    """What it sends is read by ``pool``, and is in ``copies`` on its way."""

    room: GpuRoom | None = None

    def __init__(self, pool: CopyPool | None = None) -> None:
        self.pool = pool or CopyPool()
        self._copies: HostCopies | None = None

    @property
    def copies(self) -> HostCopies:
        """Made with the first use: a loop is running then."""
        self._copies = self._copies or HostCopies()
        return self._copies

    def d2h(self, link: Link) -> D2HCopier:
        return D2HCopier(self.pool, self.copies, link.payload.feeds)

    def nccl(self, link: Link) -> GpuLink | None:
        return None

    def importer(self, link: Link) -> GpuImporter | None:
        return None

    def staging(self, nbytes: int) -> GpuStaging | None:
        return None
