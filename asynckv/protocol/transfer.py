"""The state of one transfer, on either side: what may be said of it, and what counts.

No I/O and no waiting: tell it what the peer says and what has moved, and do what it
returns. All that is not eager comes by one route at a time: where that is lost, it is
granted anew, by another. A frame of a transfer before this one, or one that comes after
the stop, has crossed an end: it is ignored. One that makes no sense raises, and changes
nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final, Literal, TypeAlias

from asynckv.errors import RemoteProtocolError
from asynckv.protocol.handshake import DigestMode
from asynckv.protocol.transfer_frames import Eager, Grant, RouteName, Sent

__all__ = (
    "EAGER_NBYTES",
    "NEVER_OFFERED",
    "STILL_LEAVING",
    "ReceiveState",
    "SendState",
    "Verdict",
)

EAGER_NBYTES: Final = 16 * 1024
"""A part of at most so many bytes leaves with the frame that says so.

On a lane it would cost both sides a wake-up of a thread and a frame of its own. The
rule is one of size alone, so that both sides know by which route a part goes.
"""

NEVER_OFFERED: Final = "a grant of what was never offered"

STILL_LEAVING: Final = "a second grant of what is still leaving by the link"

Verdict: TypeAlias = Literal["waits", "verified", "again", "differs", "confirm", "read"]
"""What becomes of a part.

It ``waits`` for what it still lacks, or is of no interest any more. It is ``verified``,
once; if it comes once more behind a lost route, ``again``. It ``differs`` from what was
sent. The peer is to ``confirm`` that it knows of it. By the route it is to be ``read``,
and compared.
"""


class SendState:
    """The parts of one transfer that is sent: held until it is granted, then leaving.

    It may be granted by ``routes``. A later grant asks for all parts anew, but for
    eager ones that have left beside a route between GPUs: the link has lost none. What
    the link is still bringing is not granted once more: it loses nothing.
    """

    __slots__ = (
        "_gone",
        "_leaving",
        "_parts",
        "_routes",
        "is_granted",
        "is_stopped",
        "route",
        "transfer",
    )

    def __init__(self, transfer: int, routes: Collection[RouteName]) -> None:
        self.transfer = transfer
        self.route: RouteName = "link"
        self.is_granted = self.is_stopped = False
        self._routes = routes
        self._parts = dict[int, None]()
        self._leaving = set[int]()
        self._gone = set[int]()

    def add(self, part: int) -> bool:
        """One more part is there: is it to leave now?"""
        if self.is_stopped:
            return False
        self._parts[part] = None
        if self.is_granted:
            self._leaving.add(part)
        return self.is_granted

    def on_grant(self, grant: Grant) -> list[int] | None:
        """Return which parts are to leave now by its route, or None: it is of no
        interest.

        :raises RemoteProtocolError: it was never offered, not by that route, a GPU's
            memory was granted before, or it is leaving by the link now
        """
        if grant.transfer > self.transfer:
            raise RemoteProtocolError(NEVER_OFFERED)
        if self.is_stopped or grant.transfer < self.transfer:
            return None
        if grant.route not in self._routes:
            raise RemoteProtocolError("a grant of memory that nothing leads to")
        is_beside = self.route != "link"
        if is_beside and grant.route != "link":
            raise RemoteProtocolError("a second grant of a GPU's memory")
        if not is_beside and self._leaving:
            raise RemoteProtocolError(STILL_LEAVING)
        leaving = list(self._parts)
        if is_beside:
            leaving = [part for part in leaving if part not in self._gone]
        self.is_granted, self.route = True, grant.route
        self._leaving = set(leaving)
        self._gone.clear()
        return leaving

    def left(self, part: int) -> None:
        """An eager part has left with a frame."""
        self._leaving.discard(part)
        self._gone.add(part)

    def sent(
        self,
        part: int,
        digest: bytes,
        kind: DigestMode = "full",
        offset: int | None = None,
    ) -> Sent | None:
        """Return what is to be said of a part that has left, if anything is."""
        if part not in self._leaving:
            return None
        self._leaving.remove(part)
        return Sent(self.transfer, part, digest, kind, self.route, offset)

    def stop(self) -> None:
        """Nothing more leaves, and nothing more is said of it."""
        self.is_stopped = True
        self._parts.clear()
        self._leaving.clear()


class ReceiveState:
    """The parts of one transfer that is received: awaited, then landed and sent.

    One is verified when both have happened, in either order, and the digests agree.
    Parts of at most ``max_eager_nbytes`` come eagerly. If the peer ``confirms`` what a
    route brings, a part is verified when the peer has said that it knows of it.

    To be read: ``eager`` parts that are to come, with their bytes; ``large`` ones; of
    those what is ``landing`` by the link or ``routed`` otherwise; and the digests of
    what is ``verified``. What lands may be written to until its transport is quiet.
    """

    __slots__ = (
        "_confirms",
        "_landed",
        "_missing",
        "_sent",
        "_unconfirmed",
        "_unsent",
        "eager",
        "is_lost",
        "is_stopped",
        "landing",
        "large",
        "route",
        "routed",
        "transfer",
        "verified",
    )

    def __init__(
        self,
        transfer: int,
        sizes: Sequence[int],
        *,
        max_eager_nbytes: int = -1,
        confirms: bool = False,
    ) -> None:
        self.transfer = transfer
        self.route: RouteName = "link"
        self.is_lost = self.is_stopped = False
        self.eager = dict[int, int]()
        self.large = list[int]()
        for part, nbytes in enumerate(sizes):
            if nbytes <= max_eager_nbytes:
                self.eager[part] = nbytes
            else:
                self.large.append(part)
        self.landing = set[int]()
        self.routed = set[int]()
        self.verified = dict[int, bytes]()
        self._missing = len(sizes)
        self._confirms = confirms
        self._unsent = set[int]()
        self._landed = dict[int, bytes]()
        self._sent = dict[int, bytes]()
        self._unconfirmed = dict[int, bytes]()

    @property
    def has_come(self) -> bool:
        """Are all parts verified?"""
        return not self._missing

    def grant(self, route: RouteName = "link", digest: DigestMode = "full") -> Grant:
        """Let all that is large come by a route; return what the peer is told."""
        self.route = route
        if route == "link":
            self.landing.update(self.large)
            self._unsent.update(self.large)
        else:
            self.routed.update(self.large)
        return Grant(self.transfer, route, digest)

    def landed(self, part: int, digest: bytes) -> Verdict:
        """The link has brought a part."""
        if self.is_stopped or part not in self.landing:
            return "waits"
        self.landing.remove(part)
        if part in self._unsent:
            self._landed[part] = digest
            return "waits"
        return self.compare(part, digest, self._sent.pop(part))

    def on_sent(self, frame: Sent) -> Verdict:
        """The peer has sent a part, or confirms one.

        :raises RemoteProtocolError: it was not to, not so, or has before
        """
        if self.is_stopped or frame.transfer != self.transfer:
            self._check_offered(frame)
            return "waits"
        part, digest = frame.part, frame.digest
        if frame.route != "link":
            return self._on_routed(frame)
        if part not in self._unsent:
            raise RemoteProtocolError(f"a Sent for part {part} makes no sense")
        self._unsent.remove(part)
        if part in self.landing:
            self._sent[part] = digest
            return "waits"
        return self.compare(part, self._landed.pop(part), digest)

    def on_eager(self, frame: Eager, nbytes: int) -> list[tuple[int, int, bytes]]:
        """Return the parts that have come in so many bytes, each with its size and
        digest: they are to be compared.

        :raises RemoteProtocolError: they were not to, have before, or are not so long
        """
        if self.is_stopped or frame.transfer != self.transfer:
            self._check_offered(frame)
            return []
        eager, parts = self.eager, frame.parts
        digests = frame.digests or (b"",) * len(parts)
        awaited = eager.keys() & set(parts)
        if len(awaited) < len(parts):
            raise RemoteProtocolError(f"parts {parts} came eagerly, not all awaited")
        sizes = [eager[part] for part in parts]
        if len(digests) != len(parts) or sum(sizes) != nbytes:
            raise RemoteProtocolError("Eager parts that are not what was offered")
        for part in parts:
            del eager[part]
        return [*zip(parts, sizes, digests, strict=True)]

    def compare(self, part: int, landed: bytes, sent: bytes) -> Verdict:
        """Both sides have digested a part that has come."""
        if landed != sent:
            return "differs"
        if part in self.verified:
            return "again"
        self.verified[part] = landed
        self._missing -= 1
        return "verified"

    def came(self, part: int, digest: bytes) -> Verdict:
        """The route has brought a part, and compared it."""
        if part not in self.routed:
            return "waits"
        self.routed.remove(part)
        if self._confirms:
            self._unconfirmed[part] = digest
            return "confirm"
        return self.compare(part, digest, digest)

    def lose(self) -> None:
        """The route is lost: what is large is to be granted anew, by the link.

        Also what is here already, which the peer does not know.
        """
        self.is_lost = True
        self.routed.clear()

    def stop(self) -> None:
        """Nothing more is told."""
        self.is_stopped = True
        self.eager.clear()
        self.routed.clear()

    def _on_routed(self, frame: Sent) -> Verdict:
        if self.is_lost:
            return "waits"  # it was said before the route was lost
        if frame.route != self.route:
            raise RemoteProtocolError(f"a part by {frame.route} was not asked for")
        if frame.part in self._unconfirmed:
            digest = self._unconfirmed.pop(frame.part)
            return self.compare(frame.part, digest, digest)
        return "read"

    def _check_offered(self, frame: Sent | Eager) -> None:
        if frame.transfer > self.transfer:
            raise RemoteProtocolError("a part of what was never offered")
