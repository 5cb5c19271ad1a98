"""Bounds on what peers may begin, and how often. No clock.

Each link bounds its own unfinished requests. Without a bound on those of all links of a
listener together, peers that begin long bodies and never end them would make a server
keep as much as they have links. Rates are against floods that cost the peer less than
us, such as requests that are cancelled as soon as they are made (in HTTP/2:
CVE-2023-44487).
"""

from __future__ import annotations

from collections.abc import Callable

from asynckv.errors import RemoteProtocolError

__all__ = (
    "Rate",
    "Share",
    "Unfinished",
)


class Unfinished:
    """At most ``max_bytes`` of bodies that are under way.

    Where there is no room a link ends that has more than its share of it: of those
    the one whose body began first. One that is sent in earnest is whole within
    moments, and one that is held back never is; who sends little is left alone.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.nbytes = 0
        self.begun: dict[tuple[Share, int], int] = {}
        """How much there is of each body, the first one first."""

    def make_room(self) -> None:
        """End links until there is room for the others."""
        while self.nbytes > self.max_bytes:
            shares = [share for share, _ in self.begun]
            fair = self.max_bytes // len(set(shares))
            # There is one: all together have more than that for each.
            next(share for share in shares if share.nbytes > fair).crowd_out()


class Share:
    """What one link keeps of them. After :meth:`end` nothing counts any more.

    ``give_way(error)`` is called when it is the one to end; it must not raise.
    """

    def __init__(
        self, whole: Unfinished, give_way: Callable[[RemoteProtocolError], None]
    ) -> None:
        self.nbytes = 0
        self._whole = whole
        self._give_way = give_way
        self._has_ended = False

    def add(self, stream: int, nbytes: int) -> None:
        """Count bytes of the body on ``stream``, which may end other links."""
        if self._has_ended:
            return
        whole, body = self._whole, (self, stream)
        whole.begun[body] = whole.begun.get(body, 0) + nbytes
        whole.nbytes += nbytes
        self.nbytes += nbytes
        whole.make_room()

    def finish(self, stream: int) -> None:
        """The body on ``stream`` is whole, or nobody waits for it any more."""
        nbytes = self._whole.begun.pop((self, stream), 0)
        self._whole.nbytes -= nbytes
        self.nbytes -= nbytes

    def end(self) -> None:
        """The link is over."""
        self._has_ended = True
        for stream in [stream for owner, stream in self._whole.begun if owner is self]:
            self.finish(stream)

    def crowd_out(self) -> None:
        """Others have no room: the link is to end."""
        self.end()
        self._give_way(
            RemoteProtocolError(
                "the unfinished bodies of all links are more than "
                f"{self._whole.max_bytes} bytes, and this link has had more than its "
                "share of them for longest",
                hint="send less at a time, or give the server more room",
            )
        )


class Rate:
    """A budget of ``at_once`` events, to which ``per_s`` are added every second."""

    def __init__(self, per_s: int, at_once: int, now_s: float) -> None:
        self._per_s = per_s
        self._at_once = max(at_once, per_s)
        self._left = float(self._at_once)
        self._then_s = now_s

    def spend(self, count: int, now_s: float) -> bool:
        """Count what has happened; ``False`` if that was too often."""
        earned = max(now_s - self._then_s, 0.0) * self._per_s
        self._left = min(self._left + earned, self._at_once) - count
        self._then_s = now_s
        return self._left >= 0
