"""Where connections arrive: they are half open, and become links or payload lanes.

They are half open until the peer has proved what it has to. There are at most 64 at a
time, each may say 4 KiB (above TLS), and each has 5 s. So has a link whose lanes are to
come; of those there are at most 256.

When there is no room the newest is let in and another one goes: of the network that has
the most, and there of the host that has the most, unless that is less than an eighth of
all places; then one that has said nothing; then by chance. So a flood from one network,
or one that says nothing, takes no place of anybody else who has spoken. One that speaks
and comes from everywhere takes each with a chance of ``1 / max_count`` whenever one of
it comes: who is slow is kept out.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import ipaddress
import logging
import random
import secrets
import socket
from collections.abc import Callable
from typing import Final, Generic, NamedTuple, TypeVar

from asynckv.errors import AsyncKVError, AuthError, PeerLost, RemoteProtocolError
from asynckv.links.address import host_in
from asynckv.links.link import Link
from asynckv.links.options import keys_of
from asynckv.links.reader import Turns
from asynckv.links.sockets import (
    assurance_of,
    check_peer,
    converse,
    hang_up,
    prepare,
    secure,
    send_first_frame,
    wait_readable,
)
from asynckv.links.streams import SocketStream
from asynckv.protocol.codec import encode_frame
from asynckv.protocol.failures import to_refuse
from asynckv.protocol.frames import Attach, Attached
from asynckv.protocol.handshake import Agreement, Terms
from asynckv.protocol.hello import ListenSide
from asynckv.protocol.limits import Unfinished
from asynckv.security.keyring import Keyring, Keys
from asynckv.security.names import Assurance
from asynckv.security.shared_secret import LaneProofs, new_nonce
from asynckv.security.tls import TlsKeys
from asynckv.security.tls_socket import Connection, TlsSocket, has_hung_up, is_readable

__all__ = (
    "MAX_HALF_OPEN",
    "Acceptor",
    "HalfOpen",
)


T = TypeVar("T")

_SHARES: Final = 8
_IPV4_PREFIX: Final = 24
_IPV6_PREFIX: Final = 64


class _Origin(NamedTuple):
    network: str
    host: str


class HalfOpen(Generic[T]):
    """At most ``max_count`` of them. Each host is an IP address, or empty.

    ``has_spoken(one)`` is asked before one goes that nothing was heard of.
    """

    def __init__(
        self, max_count: int, has_spoken: Callable[[T], bool] = lambda _: False
    ) -> None:
        self._max_count = max_count
        self._has_spoken = has_spoken
        self._fair_share = max(1, max_count // _SHARES)
        self._origins: dict[T, _Origin] = {}
        self._silent: set[T] = set()

    def __len__(self) -> int:
        return len(self._origins)

    def add(self, one: T, host: str) -> T | None:
        """Let one in, and return the one that has to go for it, if any."""
        victim = None
        origin = _Origin(_network_of(host), host)
        if len(self._origins) >= self._max_count:
            victim = self._choose(origin)
            self.discard(victim)
        self._origins[one] = origin
        self._silent.add(one)
        return victim

    def note_spoken(self, one: T) -> None:
        """It has said something."""
        self._silent.discard(one)

    def discard(self, one: T) -> None:
        """It has proved itself, or is gone."""
        self._origins.pop(one, None)
        self._silent.discard(one)

    def _choose(self, newest: _Origin) -> T:
        origins = [*self._origins.values(), newest]
        in_network = collections.Counter(origin.network for origin in origins)
        at_host = collections.Counter(origins)
        ranks = {
            each: (
                max(in_network[origin.network], self._fair_share),
                max(at_host[origin], self._fair_share),
                each in self._silent,
            )
            for each, origin in self._origins.items()
        }
        worst = max(ranks.values())
        candidates = [each for each in ranks if ranks[each] == worst]
        random.shuffle(candidates)
        for each in candidates:
            if each not in self._silent or not self._has_spoken(each):
                return each
            self.note_spoken(each)
        return candidates[0]


def _network_of(host: str) -> str:
    if not host:
        return ""
    ip = ipaddress.ip_address(host)
    prefix = _IPV4_PREFIX if ip.version == 4 else _IPV6_PREFIX
    return str(ipaddress.ip_interface(f"{host}/{prefix}").network)


logger = logging.getLogger(__name__)

MAX_HALF_OPEN: Final = 64
_MAX_PENDING: Final = 256
_GREETING_S: Final = 5.0
_LANES_S: Final = 5.0
_ACCEPTS_A_TICK: Final = 8
_NO_FILES_PAUSE_S: Final = 0.1
_SHARED_PAUSE_S: Final = 0.004
_TOKEN_BYTES: Final = 16
_WARNING_PAUSE_S: Final = 1.0


class _PendingLink:
    """A link that was welcomed and waits for its payload lanes."""

    def __init__(
        self, link: Link, lanes: int, lane_proofs: LaneProofs, assurance: Assurance
    ) -> None:
        self.task = _this_task()
        self.link = link
        self.lane_proofs = lane_proofs
        self._binding = assurance.binding
        self.lanes: list[Connection | None] = [None] * lanes
        self._missing = lanes
        self._loop = asyncio.get_running_loop()
        self._is_complete: asyncio.Future[None] = self._loop.create_future()

    def knows(self, attach: Attach, sock: Connection) -> bool:
        """Whether a lane comes from the very peer that opened the link."""
        is_proved = self.lane_proofs.is_proved("dialling", attach.lane, attach.proof)
        return is_proved and assurance_of(sock).binding == self._binding

    def reserve(self, lane: int, sock: Connection) -> None:
        """Let ``sock`` be a lane; from here on it is closed with the others."""
        if lane >= len(self.lanes) or self.lanes[lane] is not None:
            raise RemoteProtocolError(f"lane {lane} is attached, or there is none")
        self.lanes[lane] = sock

    def count(self) -> None:
        """One more lane is attached."""
        self._missing -= 1
        if not self._missing and not self._is_complete.done():
            self._is_complete.set_result(None)

    async def wait_for_lanes(self, control: Connection) -> None:
        """Wait until all lanes are attached.

        :raises PeerLost: the peer hung up first, as one does that gives up dialling
        """
        self._loop.add_reader(control, self._look_at, control)
        try:
            await self._is_complete
        finally:
            self._loop.remove_reader(control)
        if self._missing:
            raise PeerLost("the peer hung up before its lanes came")

    def _look_at(self, control: Connection) -> None:
        if not has_hung_up(control):
            # The lanes are attached, for the peer: this is read by the link.
            self._loop.remove_reader(control)
        elif not self._is_complete.done():
            self._is_complete.set_result(None)

    def close(self) -> None:
        self.link.abort()
        for sock in self.lanes:
            if sock is not None:
                sock.close()


class Acceptor:
    """Takes the connections of one listening socket, until it is closed.

    ``adopt(link)`` gets each link that is complete.
    """

    def __init__(
        self,
        sock: socket.socket,
        terms: Terms,
        keyring: Keyring,
        adopt: Callable[[Link], None],
        *,
        url: str,
        unfinished: Unfinished,
    ) -> None:
        self._sock = sock
        self._terms = terms
        self._keyring = keyring
        self._adopt = adopt
        self._url = url
        self._loop = asyncio.get_running_loop()
        self._turns = Turns(self._loop)
        self._unfinished = unfinished
        self._greetings: dict[asyncio.Task[bool], Connection] = {}
        self._half_open: HalfOpen[asyncio.Task[bool]] = HalfOpen(
            MAX_HALF_OPEN, self._has_spoken
        )
        self._pending: dict[bytes, _PendingLink] = {}
        self._given_up: collections.deque[bytes] = collections.deque(
            maxlen=_MAX_PENDING
        )
        self._waiting: HalfOpen[asyncio.Task[bool]] = HalfOpen(_MAX_PENDING)
        self._pause: asyncio.TimerHandle | None = None
        self._closed = False
        self._warns_at_s = dict[str, float]()
        self._loop.add_reader(sock, self._accept)

    def close(self) -> list[asyncio.Task[bool]]:
        """Take no more; return the tasks that are being cancelled."""
        if not self._closed:
            self._closed = True
            self._stop_accepting()
            self._sock.close()
        greetings = list(self._greetings)
        for task in greetings:
            task.cancel()
        return greetings

    # Accepting. Plain functions: a cancellation cannot lose a connection.

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_A_TICK):
            try:
                sock, peer = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as exc:
                level = self._level_of("no files")
                logger.log(level, "cannot accept at %s: %s", self._url, exc)
                self._accept_later(_NO_FILES_PAUSE_S)
                return
            sock.setblocking(False)
            task = self._loop.create_task(
                self._greet(sock, host_in(peer)), name=f"greeting at {self._url}"
            )
            self._greetings[task] = sock
            task.add_done_callback(self._on_greeted)
            self._make_room(self._half_open.add(task, host_in(peer)))
            if self._turns.is_shared:
                self._accept_later(_SHARED_PAUSE_S)
                return

    def _make_room(self, victim: asyncio.Task[bool] | None) -> None:
        if victim is None:
            return
        logger.debug("too many half-open connections at %s: one closed", self._url)
        victim.cancel()

    def _has_spoken(self, task: asyncio.Task[bool]) -> bool:
        return is_readable(self._greetings[task])

    def _stop_accepting(self) -> None:
        self._loop.remove_reader(self._sock)
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None

    def _accept_later(self, pause_s: float) -> None:
        self._stop_accepting()
        self._pause = self._loop.call_later(pause_s, self._accept_again)

    def _accept_again(self) -> None:
        if not self._closed:
            self._stop_accepting()
            self._loop.add_reader(self._sock, self._accept)

    def _on_greeted(self, task: asyncio.Task[bool]) -> None:
        sock = self._greetings.pop(task)
        self._half_open.discard(task)
        if task.cancelled() or task.exception() or not task.result():
            sock.close()
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a greeting at %s failed", self._url, exc_info=error)

    # Greeting.

    async def _greet(self, plain: socket.socket, host: str) -> bool:
        """Make of a connection what its first frame says: whether it is kept."""
        sock: Connection = plain
        try:
            prepare(plain)
            check_peer(plain)
            async with asyncio.timeout(_GREETING_S):
                await wait_readable(plain)
                self._half_open.note_spoken(_this_task())
                keys = await keys_of(self._keyring)
                if keys.tls is not None:
                    sock = self._over_tls(plain, keys.tls)
                    await secure(sock, keys.tls)
                side = await self._greeted(sock, keys)
            await self._answer(sock, side)
        except TimeoutError:
            logger.debug("a connection at %s did not greet in time", self._url)
            return False
        except PeerLost as exc:
            logger.debug("a connection at %s went away: %s", self._url, exc)
            return False
        except AsyncKVError as exc:
            self._note_refusal(exc, host)
            await _refuse(sock, exc)
            return False
        except OSError as exc:
            logger.debug("a connection at %s broke: %s", self._url, exc)
            return False
        return True

    def _level_of(self, warning: str) -> int:
        """Return ``WARNING``, but not for each of many: they do not fill our log."""
        now_s = self._loop.time()
        if now_s < self._warns_at_s.get(warning, 0.0):
            return logging.DEBUG
        self._warns_at_s[warning] = now_s + _WARNING_PAUSE_S
        return logging.WARNING

    def _note_refusal(self, error: AsyncKVError, host: str) -> None:
        origin = f" from {host}" if host else ""
        words = "%s: a connection%s is refused: %s"
        logger.log(self._level_of("refused"), words, self._url, origin, str(error))

    def _over_tls(self, plain: socket.socket, keys: TlsKeys) -> TlsSocket:
        sock = TlsSocket.over(plain, keys)
        self._greetings[_this_task()] = sock
        return sock

    async def _greeted(self, sock: Connection, keys: Keys) -> ListenSide:
        """Let the peer say who it is and prove it."""
        side = ListenSide(
            self._terms,
            keys.secrets,
            nonce=new_nonce(),
            assurance=assurance_of(sock),
        )
        await converse(sock, side)
        return side

    async def _answer(self, sock: Connection, side: ListenSide) -> None:
        if side.attach is not None:
            await self._attach(sock, side.attach)
        elif side.agreement is not None:
            await self._welcome(sock, side, side.agreement)

    async def _welcome(
        self, sock: Connection, side: ListenSide, agreement: Agreement
    ) -> None:
        task = _this_task()
        self._half_open.discard(task)
        link = Link(
            SocketStream(sock, self._loop),
            agreement,
            dialled=False,
            url=self._url,
            turns=self._turns,
            unfinished=self._unfinished,
        )
        token = secrets.token_bytes(_TOKEN_BYTES)
        welcome = side.welcome(token, link.payload.describe())
        pending = _PendingLink(
            link, agreement.lanes, side.lane_proofs(), assurance_of(sock)
        )
        self._pending[token] = pending
        self._make_room(self._waiting.add(task, link.peer_host))
        try:
            async with asyncio.timeout(_LANES_S):
                await send_first_frame(sock, welcome)
                await pending.wait_for_lanes(sock)
            await link.payload.open(agreement.payload_description, pending.lanes)
        except BaseException:
            self._given_up.append(token)
            pending.close()
            raise
        finally:
            del self._pending[token]
            self._waiting.discard(task)
        self._adopt(link)

    async def _attach(self, sock: Connection, attach: Attach) -> None:
        pending = self._pending.get(attach.link_token)
        if pending is None or not pending.knows(attach, sock):
            refusal = AuthError("no link waits for this payload lane")
            if attach.link_token not in self._given_up:
                raise refusal
            # Who gives up dialling may have sent its lanes already: nothing to warn of.
            await _refuse(sock, refusal)
            raise PeerLost("the link of this payload lane was given up")
        self._half_open.discard(_this_task())
        self._waiting.note_spoken(pending.task)
        pending.reserve(attach.lane, sock)
        # Attached leaves first: from the moment the link is complete, the
        # lane carries nothing but chunks.
        attached = Attached(pending.lane_proofs.prove("listening", attach.lane))
        await send_first_frame(sock, encode_frame(0, attached)[0])
        pending.count()


async def _refuse(sock: Connection, error: AsyncKVError) -> None:
    with contextlib.suppress(OSError):
        sock.send(encode_frame(0, to_refuse(error))[0])
    await hang_up(sock)


def _this_task() -> asyncio.Task[bool]:
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("a greeting runs in a task")
    return task
