"""Which memory waits for which part, and what the peer may offer of it.

An offer of a transfer that is not here was stopped or has landed, if its number is not
above the highest ever announced; else the peer lies. On the loop only.
"""

from __future__ import annotations

from asynckv.errors import LocalProtocolError, RemoteProtocolError
from asynckv.protocol.transfer_frames import DeviceOffer
from asynckv.transports.nccl.parts import DevicePart

__all__ = ("Arrivals",)


class Arrivals:
    """The parts that have not landed, by transfer; None stands for one that has."""

    def __init__(self) -> None:
        self._transfers: dict[int, dict[int, DevicePart | None]] = {}
        self._highest = -1

    def __bool__(self) -> bool:
        return bool(self._transfers)

    def announce(self, transfer: int) -> None:
        """The peer may offer bytes of transfers up to this one."""
        self._highest = max(self._highest, transfer)

    def check(self, offer: DeviceOffer) -> None:
        """Refuse what was never announced.

        :raises RemoteProtocolError: it was not
        """
        if offer.transfer > self._highest:
            raise RemoteProtocolError(
                f"an offer of transfer {offer.transfer}, never announced"
            )

    def add(self, part: DevicePart) -> None:
        """Let the peer offer this part.

        :raises LocalProtocolError: it is waited for already, or has landed
        """
        self.announce(part.transfer)
        parts = self._transfers.setdefault(part.transfer, {})
        if part.number in parts:
            raise LocalProtocolError(
                f"part {part.number} of transfer {part.transfer} received twice"
            )
        parts[part.number] = part

    def find(self, offer: DeviceOffer) -> DevicePart | None:
        """Return whose bytes these are; None if nobody wants them.

        :raises RemoteProtocolError: they are not what may come next
        """
        parts = self._transfers.get(offer.transfer)
        if parts is None:
            return None
        part = parts.get(offer.part)
        where = f"part {offer.part} of transfer {offer.transfer}"
        if part is None:
            raise RemoteProtocolError(f"{where} has landed or does not exist")
        if offer.offset != part.begun_bytes or offer.nbytes > part.left_bytes:
            raise RemoteProtocolError(
                f"{where}: {offer.nbytes} bytes at {offer.offset}, "
                f"expected {part.left_bytes} at {part.begun_bytes}"
            )
        return part

    def landed(self, part: DevicePart) -> None:
        """All of it has landed."""
        parts = self._transfers.get(part.transfer)
        if parts is not None and parts.get(part.number) is part:
            parts[part.number] = None
            if not any(parts.values()):
                del self._transfers[part.transfer]

    def parts_of(self, transfer: int) -> list[DevicePart]:
        """Those that have not landed."""
        return [part for part in self._transfers.get(transfer, {}).values() if part]

    def stop(self, transfer: int) -> list[DevicePart]:
        """Forget and return the parts of it that have not landed."""
        parts = self._transfers.pop(transfer, {})
        return [part for part in parts.values() if part is not None]

    def take_all(self) -> list[DevicePart]:
        """Forget and return all of them."""
        return [
            part for transfer in list(self._transfers) for part in self.stop(transfer)
        ]
