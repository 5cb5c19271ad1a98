"""What an NCCL transport says to its peer, and how."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from asynckv.protocol.transfer_frames import DeviceFrame

__all__ = ("DeviceChannel",)


@runtime_checkable
class DeviceChannel(Protocol):
    """Frames to and from the peer's transport: whole, in order, authenticated.

    Unique ids go over it, so it is the control link and nothing less. On the loop only;
    nothing waits.
    """

    def send(self, frame: DeviceFrame) -> None:
        """Queue a frame; nothing happens if the channel is over."""

    def attach(
        self,
        hear: Callable[[DeviceFrame], None],
        lost: Callable[[Exception], None],
    ) -> None:
        """From here on call ``hear`` for each frame, those that came before first.

        An :exc:`~asynckv.errors.RemoteProtocolError` of it breaks the link. ``lost`` is
        called once, if the channel ends before it is detached.
        """

    def detach(self) -> None:
        """Call nobody any more."""
