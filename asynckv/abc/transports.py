"""A transport: who moves the payload bytes of one link."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from asynckv.errors import LocalProtocolError

if TYPE_CHECKING:
    from asynckv.tensors.feeds import Feed
    from asynckv.tensors.runs import Memory

__all__ = ("PayloadTransport",)


class PayloadTransport(abc.ABC):
    """Moves the payload bytes of one link. Knows nothing of frames or entries.

    It owns no payload memory and sends no control frame. A *transfer* is a
    number that both sides use; it is the sender's, and no transfer of the other
    direction has it. A *part* is one tensor of it. ``done(digest,
    error)`` is called once for each part, on the loop: with the xxh3-128 digest
    of the bytes (empty where digests are off), or with what went wrong. It may
    call anything here, and memory is quiet before it is told of an error.
    """

    name: ClassVar[str]
    feeds: int = 0
    """So many parts may well be sent piece by piece at a time; 0: :meth:`feed` sends
    none."""

    can_block_until_quiet: bool = False
    """Whether there is a :meth:`block_until_quiet`."""

    @abc.abstractmethod
    def describe(self) -> bytes:
        """Return what the peer's transport must know, at most 4 KiB."""

    @abc.abstractmethod
    async def open(self, peer_description: bytes, side_channel: object) -> None:
        """Become usable: the control link is up and the peer has described itself."""

    @abc.abstractmethod
    def send(
        self,
        transfer: int,
        part: int,
        source: Memory,
        done: Callable[[bytes, BaseException | None], None],
        *,
        digest: bytes | None = None,
    ) -> None:
        """Queue one part; the peer must have granted ``transfer`` before.

        Reads ``source`` until ``done`` is called or the transfer is quiet. A
        known ``digest`` is not computed again. Never waits.
        """

    def feed(
        self,
        transfer: int,
        part: int,
        source: Feed,
        done: Callable[[bytes, BaseException | None], None],
        *,
        digest: bytes | None = None,
    ) -> None:
        """As :meth:`send`, of a part whose bytes leave as they come. Never waits.

        :raises LocalProtocolError: this transport sends what is there
        """
        raise LocalProtocolError(f"{self.name} sends nothing piece by piece")

    @abc.abstractmethod
    def receive(
        self,
        transfer: int,
        part: int,
        target: Memory,
        done: Callable[[bytes, BaseException | None], None],
    ) -> None:
        """Let the bytes of one part land in ``target`` (writable). Never waits."""

    @abc.abstractmethod
    def announce(self, transfer: int) -> None:
        """The peer has offered ``transfer``; its bytes may come, or come late."""

    def landed_bytes(self, transfer: int) -> int:
        """Bytes of parts still on their way that have landed: slow is not silent."""
        return 0

    @abc.abstractmethod
    def stop(self, transfer: int) -> None:
        """Let go of the transfer at the next chunk: no more ``done``. Never waits."""

    @abc.abstractmethod
    async def quiesce(self, transfer: int) -> None:
        """Wait until no thread touches memory of the stopped ``transfer``.

        Waits at most 1 s, then ends lane and link. A cancellation comes after that.
        """

    def block_until_quiet(self, transfer: int) -> None:
        """As :meth:`quiesce`, for a plain function: it blocks, 1 s at most.

        To be called after :meth:`abort`: threads let go within a moment then.

        :raises LocalProtocolError: this transport's threads need the loop for that
        """
        raise LocalProtocolError(f"{self.name} cannot block until memory is quiet")

    @abc.abstractmethod
    async def aclose(self) -> None:
        """Let queued parts leave, then end. Bounded and shielded."""

    @abc.abstractmethod
    def abort(self) -> None:
        """End now. Never waits."""
