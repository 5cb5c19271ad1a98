"""A peer's memory of a GPU, opened here with what the peer says of it.

The connection whose ticket came along is open for as long as the memory is: its end
tells the peer that it may free it. Nothing waits here but :func:`open_export`.
"""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Final

from asynckv.errors import RemoteProtocolError
from asynckv.links.fd_socket import fetch_file
from asynckv.links.link import Link
from asynckv.processes import ProcessBound
from asynckv.protocol.transfer_frames import Exported
from asynckv.tensors.cuda import IPC_HANDLE_NBYTES
from asynckv.tensors.device_pages import MARK_NBYTES, DeviceAllocation
from asynckv.tensors.imports import ImportedAllocation, in_thread, open_allocation
from asynckv.tensors.slabs import PAGE_NBYTES

__all__ = ("Export", "check_exported", "check_same_host", "open_export")

_MAX_NBYTES: Final = 2**44
"""No GPU has more: what lies beyond would be anybody's."""


class Export(ProcessBound):
    """One allocation of a peer's, open here, and the connection that says so."""

    def __init__(self, sock: socket.socket, allocation: ImportedAllocation) -> None:
        self._own()
        self.sock = sock
        self.allocation = allocation

    def close(self) -> None:
        """Close the memory, then hang up: the peer counts on that. In a thread.

        Nothing in a forked child, where the memory is not open.
        """
        if not self._is_copy:
            self.allocation.release()
            _hang_up(self.sock)

    def close_soon(self) -> None:
        """As :meth:`close`, in a thread."""
        in_thread(self.close)


async def open_export(
    exported: Exported, own: DeviceAllocation
) -> tuple[Export, bytes]:
    """Open what a peer has exported, on the GPU of ``own``; return its nonce too.

    Bounded by the caller's deadline. A cancelled call leaves nothing behind: the peer
    is hung up on, and may free the memory, when the thread here has closed it.

    :raises PeerLost: nobody is where the ticket is good, or hung up
    :raises AuthError: that is another user's
    :raises RemoteProtocolError: that is no place for a ticket, or no allocation
    :raises GPUFailed: it cannot be opened, or is this process's own
    """
    check_exported(exported)
    sock, fd = await fetch_file(exported.address, exported.ticket)
    os.close(fd)
    owner = os.getpid()

    def ended() -> None:
        if os.getpid() == owner:
            _hang_up(sock)

    cuda, device = own.gpus.cuda, own.memory.device
    allocation, nonce = await open_allocation(
        cuda, device, exported.handle, exported.nbytes, ended
    )
    return Export(sock, allocation), nonce


def check_exported(exported: Exported) -> None:
    """Check what a peer claims to have exported, before any of it is opened.

    That it has so many bytes CUDA alone can tell. What the peer says later is checked
    against the size that it has claimed here.

    :raises RemoteProtocolError: no handle, or no allocation, is like that
    """
    if len(exported.handle) != IPC_HANDLE_NBYTES:
        raise RemoteProtocolError(f"a handle of {len(exported.handle)} bytes is none")
    nbytes = exported.nbytes - MARK_NBYTES
    if nbytes < PAGE_NBYTES or nbytes % PAGE_NBYTES or nbytes > _MAX_NBYTES:
        raise RemoteProtocolError(f"nobody exports {exported.nbytes} bytes of a GPU")


def _hang_up(sock: socket.socket) -> None:
    """Tell the peer: a forked child has the socket too, so closing it says nothing."""
    with contextlib.suppress(OSError):  # the peer has hung up
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


def check_same_host(link: Link, boot_id: str) -> None:
    """Check that the peer could share memory with this process, which has ``boot_id``.

    :raises ValueError: it is elsewhere
    """
    is_same_boot = bool(boot_id) and link.peer.boot_id == boot_id
    if not is_same_boot or link.own_host != link.peer_host:
        raise ValueError("it is on another host")
