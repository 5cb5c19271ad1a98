"""A pipe: an ordered stream of tensors between two ranks."""

from __future__ import annotations

import abc
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

from asynckv.abc.closing import Closable

if TYPE_CHECKING:
    import torch

__all__ = ("KVPipe",)


class KVPipe(Closable):
    """An ordered stream of ``Tensor | None`` between two ranks.

    Sending never blocks receiving. One task may send while another receives;
    several senders (or receivers) are served in the order in which they called.
    """

    @abc.abstractmethod
    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of unset elements in memory that sending need not copy.

        Fill it and send it whole. It must not be written to before :meth:`flush` has
        returned; where that raised, or was cancelled, never. Then fill it again, or let
        it go: its memory comes back when the peer has it, and nobody has a view of it.
        Small, or where there is no room, it is an ordinary tensor, and sending copies
        it. It is charged as long as it lives. Never waits.

        :raises ValueError: tensors of this dtype cannot be sent
        """

    @abc.abstractmethod
    async def send_tensor(self, tensor: torch.Tensor | None, copy: bool = True) -> None:
        """Hand ``tensor`` to the pipe; on return it may be overwritten.

        Waits until the bytes in flight leave room for it (a tensor larger than
        the bound goes alone) and until it is copied; never for the peer's
        ``recv_tensor``. A failure after the return is raised by the next call
        and by :meth:`flush` and :meth:`aclose`.

        With ``copy=False`` it may be sent from where it lies: leave it as it is until
        :meth:`flush`, :meth:`aclose` or :meth:`abort` has returned, has raised or was
        cancelled. Nothing reads it after that. A pipe may copy all the same.

        A cancelled call has sent nothing, and the tensor is no longer read.

        :raises PipeBroken: the peer is lost; ``maybe_delivered`` says how many
            tensors may or may not have arrived
        :raises EndOfStream: the peer, or this side, has closed the pipe
        :raises ValueError: a dtype or a number of dimensions that cannot be sent
        """

    @abc.abstractmethod
    async def flush(self) -> None:
        """Wait until the peer's memory holds everything that was sent.

        A cancelled call leaves no trace, unless something that was sent with
        ``copy=False`` is still to be read: then the pipe is lost with it.

        :raises PipeBroken: not everything arrived, and never will
        """

    @abc.abstractmethod
    async def recv_tensor(
        self, into: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Return the next tensor, in the order sent; ``None`` is a value.

        It is on the device of this side of the pipe, wherever it was sent from.
        With ``into`` the bytes land in that tensor, which is returned; dtype and shape
        must be equal and it must be contiguous. A ``None`` leaves it untouched.

        A cancelled call has taken nothing from the stream: the next call returns that
        tensor. ``into`` is no longer written to by then, but may hold part of it.

        :raises EndOfStream: the peer said goodbye and everything was received
        :raises PeerLost: the connection ended in any other way
        :raises ChecksumError: the bytes changed on their way; the pipe is broken
        :raises ValueError: ``into`` does not fit; the tensor stays in the stream
        :raises GPUFailed: the GPU it is to land on failed; it stays in the stream
        """

    def __aiter__(self) -> AsyncIterator[torch.Tensor | None]:
        return self

    @abc.abstractmethod
    async def __anext__(self) -> torch.Tensor | None:
        """As :meth:`recv_tensor`; the peer's goodbye ends the iteration."""
