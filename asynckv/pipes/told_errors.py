"""What an application has heard of the end of its pipe: closing it tells the rest."""

from __future__ import annotations

from asynckv.errors import ChecksumError, PeerLost, PipeBroken

__all__ = ("ToldErrors",)


class ToldErrors:
    """That the peer is lost, and that something sent may not have arrived."""

    def __init__(self) -> None:
        self._loss = self._broken = False

    def note(self, error: BaseException) -> None:
        """The application is about to hear of it."""
        self._loss |= isinstance(error, PeerLost | ChecksumError)
        self._broken |= isinstance(error, PipeBroken)

    def note_all(self) -> None:
        """It has hung up: there is nothing to tell it."""
        self._loss = self._broken = True

    def has(self, error: PipeBroken) -> bool:
        """Whether the application has heard of it; from now on it has."""
        knew = self._broken or (self._loss and not error.maybe_delivered)
        self.note(error)
        return knew
