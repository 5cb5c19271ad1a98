"""Parts on their way from this side's GPU to a peer's, and what is said of each."""

from __future__ import annotations

from asynckv.buffers.telling import DigestPart, Telling
from asynckv.errors import RemoteProtocolError
from asynckv.links.gpu_link import GpuLink
from asynckv.links.requests import LinkStream
from asynckv.protocol.device_frames import GrantDevices
from asynckv.protocol.handshake import strictest
from asynckv.tensors.arena import Region
from asynckv.tensors.cuda import DeviceMemory
from asynckv.types import TensorSpec

__all__ = ("GpuSending",)


class GpuSending:
    """One transfer that the peer has granted memory of its GPU. Nothing here waits."""

    def __init__(
        self,
        way: GpuLink,
        stream: LinkStream,
        granted: GrantDevices,
        digest_part: DigestPart,
    ) -> None:
        self._transport = way.transport
        self._transfer = granted.transfer
        kind = strictest(way.digest, granted.kind)
        self._telling = Telling(stream, granted.transfer, kind, digest_part)

    def send(
        self, index: int, region: Region, spec: TensorSpec, digest: bytes | None
    ) -> None:
        """Send one part; ``digest`` is its own, if that is known.

        :raises RemoteProtocolError: it is in memory of the host
        """
        place = region.place(spec)
        if not isinstance(place, DeviceMemory):
            raise RemoteProtocolError("a grant of a GPU's memory for what is on none")

        def sent(_: bytes, error: BaseException | None) -> None:
            if error is None:  # else the peer hears that the way is lost
                self._telling.tell(index, region, spec, digest)

        self._transport.send(self._transfer, index, place, sent)

    def stop(self) -> None:
        """Send no more."""
        self._transport.stop(self._transfer)
        self._telling.stop()
