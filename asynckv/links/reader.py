"""What comes in on a link: read in one place, and handed on at once.

From the socket's own callback to the handler of a request: no reader waits for an
application. A link that says a little at a time is heard as it speaks. One that has
said more than a turn holds waits in line with the others that have; while somebody else
is being heard, all of these together may say so much a second. So a flood of requests
that are all legal keeps nobody waiting who waits for an answer. Such turns are counted
in frames. What takes longer than a loop may be kept from others is heard in pieces,
each on a tick of its own. The clock of a simulation stands still in a tick: it hears
the same bytes in the same order.
"""

from __future__ import annotations

import asyncio
import collections
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator
from typing import Final, Protocol

from asynckv.errors import (
    PeerLost,
    ProtocolError,
    RemoteProtocolError,
)
from asynckv.links.end import Heartbeat, LinkEnd
from asynckv.links.streams import ControlStream, LinkWriter, StreamHandler
from asynckv.protocol.handshake import Agreement
from asynckv.protocol.limits import Rate
from asynckv.protocol.session import (
    Came,
    Event,
    Farewell,
    Nothing,
    Opened,
    Refused,
    Session,
)

__all__ = (
    "AT_ONCE",
    "LinkReader",
    "Speaker",
    "Turns",
)


AT_ONCE: Final = 128
"""So many frames of one link are heard before others have their turn."""

_AT_A_TIME_S: Final = 0.75e-3
"""After so long others of the loop have theirs: a millisecond, with the last frame.

By no loop's time: that of uvloop stands still in a tick.
"""

_RECENT_S: Final = 0.05
"""For so long one who says little is likely to go on, after an answer."""

_BESIDE_OTHERS_PER_S: Final = 5000
_BESIDE_OTHERS: Final = 4
_PAUSE_S: Final = 0.0005
_ALONE: Final = 128

_NOBODY: Final = (0, -math.inf)


class Speaker(Protocol):
    """Who has said more than a turn holds."""

    def go_on(self, max_count: int, until_s: float) -> int:
        """Be heard, until then; return how many frames that were.

        Who has more waits again.
        """


class Turns:
    """The line of one loop. Plain functions; nothing here waits.

    Each speaker has a number of its own, by which it is known when it was heard.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._line: collections.deque[Speaker] = collections.deque()
        self._is_due = False
        self._paused_s = 0.0
        self._numbers = itertools.count(1)
        # The last two who say little: one of them may be about to say much.
        self._received = self._received_before = _NOBODY

    @property
    def is_shared(self) -> bool:
        """Whether somebody was heard just now who does not wait in line."""
        return self._loop.time() < self._received[1] + _RECENT_S

    def new_number(self) -> int:
        """Return the number of one more speaker."""
        return next(self._numbers)

    def note_received(self, number: int) -> None:
        """Somebody who says little was heard."""
        if self._received[0] != number:
            self._received_before = self._received
        self._received = (number, self._loop.time())

    def wait(self, number: int, speaker: Speaker) -> None:
        """Call ``speaker.go_on`` when it is its turn, on a later tick."""
        if self._received[0] == number:
            self._received, self._received_before = self._received_before, _NOBODY
        self._line.append(speaker)
        if not self._is_due:
            self._is_due = True
            self._paused_s = self._loop.time()
            self._loop.call_soon(self._next)

    def _next(self) -> None:
        now_s = self._loop.time()
        left = _ALONE
        if self.is_shared:
            # What is due for the time since the last turn: a loop may be slow.
            left = int((now_s - self._paused_s) * _BESIDE_OTHERS_PER_S)
            left = min(max(left, _BESIDE_OTHERS), _ALONE)
        until_s = time.monotonic() + _AT_A_TIME_S
        while self._line and left > 0 and time.monotonic() < until_s:
            speaker = self._line.popleft()
            left -= max(1, speaker.go_on(min(left, AT_ONCE), until_s))
        self._paused_s = now_s
        self._is_due = bool(self._line)
        if not self._is_due:
            return
        if self.is_shared:
            self._loop.call_later(_PAUSE_S, self._next)
        else:
            self._loop.call_soon(self._next)


logger = logging.getLogger(__name__)

_JUDGED_AT_ONCE: Final = 1024
"""So many requests, or as many as may be open, cost one look at the clock."""

_PINGS_PER_S: Final = 1000
"""Many more than any heartbeat needs: a millisecond apart."""


class LinkReader:
    """Hears of the stream of a link, and tells its handlers.

    ``opened`` is told of what the peer opens, and has somebody hear of it.
    """

    def __init__(
        self,
        agreement: Agreement,
        stream: ControlStream,
        session: Session[StreamHandler],
        outgoing: LinkWriter,
        ending: LinkEnd,
        heartbeat: Heartbeat,
        turns: Turns,
        *,
        opened: Callable[[Opened], None],
    ) -> None:
        self._open = opened
        self._peer_id = agreement.peer.id
        self._stream = stream
        self._session = session
        self._outgoing = outgoing
        self._ending = ending
        self._heartbeat = heartbeat
        self._turns, self._number = turns, turns.new_number()
        self._loop = asyncio.get_running_loop()
        limits, now_s = agreement.limits, self._loop.time()
        self._requests = Rate(limits.max_requests_per_s, limits.max_streams, now_s)
        self._cancels = Rate(limits.max_cancels_per_s, limits.max_streams, now_s)
        self._pings = Rate(_PINGS_PER_S, _PINGS_PER_S, now_s)
        self._judged = (0, 0)
        self._judged_pings = 0
        self._judged_at_once = max(1, min(limits.max_streams, _JUDGED_AT_ONCE))
        self._judge_at = self._judged_at_once
        # What was received; not empty only while reading is paused.
        self._events: Iterator[Event[StreamHandler]] = iter(())
        self._received_count = 0
        self._is_behind = self._is_waiting = False

    def on_bytes(self, data: bytes) -> None:
        """Bytes came."""
        if self._ending.error is not None:
            return
        self._heartbeat.has_received = True
        self._events = self._session.receive(data)
        self._received_count = 0
        if self._is_behind:
            self._wait_turn()
        else:
            self._receive(AT_ONCE, time.monotonic() + _AT_A_TIME_S)

    def on_writable(self) -> None:
        """All that was written has left."""
        self._outgoing.flush()

    def on_end(self, error: OSError | None) -> None:
        """Nothing more will come."""
        peer_id = self._peer_id
        if error is not None:
            lost = PeerLost(f"the connection to {peer_id} broke: {error}")
        elif self._session.is_between_frames:
            lost = PeerLost(f"{peer_id} hung up without a goodbye")
        else:
            lost = PeerLost(f"{peer_id} hung up in the middle of a frame")
        lost.__cause__ = error
        self._ending.at_once(lost)

    def read_on(self) -> None:
        """Go on with what was received already, then with reading."""
        if not self._is_waiting:
            self.go_on(AT_ONCE, time.monotonic() + _AT_A_TIME_S)

    def go_on(self, max_count: int, until_s: float) -> int:
        """Go on, by so many frames at most; return how many there were."""
        self._is_waiting = False
        count = 0
        if self._may_receive():
            self._heartbeat.has_received = True
            count = self._receive(max_count, until_s)
        if self._may_receive() and not self._is_waiting:
            self._stream.resume_reading()
        return count

    def _may_receive(self) -> bool:
        return self._ending.error is None and not self._outgoing.is_reading_paused

    def _receive(self, max_count: int, until_s: float) -> int:
        """Hear so many frames of what was received; if there is more, wait for it."""
        outgoing, session, ending = self._outgoing, self._session, self._ending
        outgoing.will_flush = True
        max_answer_bytes = 0  # the first answer leaves before others are made
        count = came_count = empty_count = 0
        event: Event[StreamHandler] | None = None
        try:
            for event in self._events:
                count += 1
                if type(event) is Came:
                    came_count += 1
                    event.owner.on_frame(event.frame, event.body)
                elif type(event) is Opened:
                    self._open(event)
                else:
                    empty_count += type(event) is Nothing
                    self._handle(event)
                is_turn_over = count >= max_count or time.monotonic() >= until_s
                is_all = not session.decoder.has_unread
                if is_all or is_turn_over or ending.error is not None:
                    break
                if session.outbox.answer_bytes > max_answer_bytes:
                    outgoing.flush()
                    if outgoing.is_reading_paused:
                        break
                    max_answer_bytes = outgoing.max_answer_bytes
        except Exception as exc:  # noqa: BLE001 - the link ends by it
            self._fail(exc, event)
        outgoing.end_handling(is_answered=max_answer_bytes > 0)
        if count > empty_count and not self._is_behind:
            self._turns.note_received(self._number)
        if came_count < count:  # of what only goes on there is never too much
            self._judge()
        self._received_count += count
        if not session.decoder.has_unread:
            self._is_behind = self._received_count > AT_ONCE
        elif self._may_receive():
            self._is_behind = self._is_behind or self._received_count >= AT_ONCE
            self._wait_turn()
        return count

    def _wait_turn(self) -> None:
        self._is_waiting = True
        self._stream.pause_reading()
        if self._is_behind:
            self._turns.wait(self._number, self)
        else:
            self._loop.call_soon(self._receive_rest)

    def _receive_rest(self) -> None:
        """Hear what is not enough to wait in line with it."""
        self.go_on(AT_ONCE - self._received_count, time.monotonic() + _AT_A_TIME_S)

    def _judge(self) -> None:
        session = self._session
        if session.opened_count >= self._judge_at:
            self._judge_rates()
        if session.pinged_count != self._judged_pings:
            self._judge_pings()

    def _judge_rates(self) -> None:
        """Now and then: whether the peer asks, or changes its mind, too often."""
        now_s = self._loop.time()
        opened, cancelled = self._session.opened_count, self._session.cancelled_count
        for what, rate, count in (
            ("requests", self._requests, opened - self._judged[0]),
            ("cancelled requests", self._cancels, cancelled - self._judged[1]),
        ):
            if not rate.spend(count, now_s) and self._ending.error is None:
                self._ending.refuse(RemoteProtocolError(f"a flood of {what}"))
        self._judged = (opened, cancelled)
        self._judge_at = opened + self._judged_at_once

    def _judge_pings(self) -> None:
        pinged = self._session.pinged_count
        now_s = self._loop.time()
        is_flood = not self._pings.spend(pinged - self._judged_pings, now_s)
        self._judged_pings = pinged
        if is_flood and self._ending.error is None:
            self._ending.refuse(RemoteProtocolError("a flood of pings"))

    def _fail(self, error: Exception, event: Event[StreamHandler] | None) -> None:
        """End the link at this event: the peer broke the rules, or we did."""
        if type(event) is Came:
            self._session.keep_ending(event.owner)
        if isinstance(error, ProtocolError):
            self._ending.refuse(error)
            return
        # A fault of ours: whoever waits on this link learns of it by its end.
        where = self._peer_id
        logger.error("a request handler of the link to %s", where, exc_info=error)
        self._ending.at_once(error)

    def _handle(self, event: Event[StreamHandler]) -> None:
        if isinstance(event, Farewell):
            self._ending.on_goodbye(event.reason)
        elif isinstance(event, Refused):
            why = f"{self._peer_id} closed the link: {event.error.message}"
            lost = PeerLost(why)
            lost.__cause__ = event.error  # who tries again would hear it again
            self._ending.at_once(lost)
