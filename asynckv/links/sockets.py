"""Sockets: opened, bound, secured by TLS, and read up to the end of one frame.

Every coroutine here is bounded by its caller's deadline and leaves no socket behind
when it is cancelled. What would block the loop for a moment is done in a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import ssl
import stat
import struct
from collections.abc import Callable
from typing import Any, Final, TypeAlias, TypeVar

import anyio.to_thread

from asynckv.errors import AsyncKVError, AuthError, ConfigError, PeerLost
from asynckv.links.address import Address
from asynckv.protocol.codec import FrameDecoder
from asynckv.protocol.frames import Frame
from asynckv.protocol.handshake import GREETING_LIMITS
from asynckv.protocol.hello import GreetingSide
from asynckv.protocol.values import Limits
from asynckv.security.names import NO_ASSURANCE, Assurance
from asynckv.security.tls import ALPN, TlsKeys, tls_failure
from asynckv.security.tls_socket import Connection, TlsSocket, WantsToWrite, discard
from asynckv.waits.waiting import wait_shielded

__all__ = (
    "assurance_of",
    "bind",
    "check_peer",
    "connect",
    "converse",
    "hang_up",
    "in_thread",
    "prepare",
    "read_first_frame",
    "remove_place",
    "secure",
    "send_first_frame",
    "wait_readable",
    "wait_writable",
)


T = TypeVar("T")


async def in_thread(work: Callable[[], T]) -> T:
    """Return what ``work`` returns, or raise what it raises; it runs in a thread.

    ``work`` is sure to return within bounded time: a cancellation is delivered
    after that, so that nothing is closed under its feet.
    """
    # A limiter of its own: an application that keeps all of anyio's threads
    # busy does not keep links from being opened.
    running = anyio.to_thread.run_sync(work, limiter=anyio.CapacityLimiter(1))
    task = asyncio.create_task(running, name="asynckv: work in a thread")
    task.add_done_callback(_see)
    await wait_shielded(task)
    return task.result()


def _see(task: asyncio.Task[T]) -> None:
    """Look at the error of work that nobody waits for any more."""
    if not task.cancelled():
        task.exception()


def assurance_of(sock: Connection) -> Assurance:
    """Return what a connection has proved before anything was said over it."""
    return sock.assurance() if isinstance(sock, TlsSocket) else NO_ASSURANCE


async def secure(sock: TlsSocket, keys: TlsKeys) -> None:
    """Shake hands, and refuse who is not certified or not allowed.

    What takes time to compute is done in threads. On return this side knows who
    the peer is; that the peer wants to know us, only its next words tell.
    Bounded by the caller's deadline; a cancelled call leaves ``sock`` unusable.

    :raises AuthError: the peer is not let in, or does not let us in
    :raises PeerLost: the peer hung up
    """
    try:
        await _shake_hands(sock)
    except ssl.SSLError as exc:
        raise tls_failure(exc) from exc
    except OSError as exc:
        raise PeerLost(f"the connection broke in the TLS handshake: {exc}") from exc
    if sock.protocol != ALPN:
        raise AuthError("the peer speaks TLS, but is no asynckv")
    sock.peer_names().check_allowed(keys.allowed_peers)


async def _shake_hands(sock: TlsSocket) -> None:
    while True:
        try:
            await in_thread(sock.shake_hands)
            return
        except WantsToWrite:
            await wait_writable(sock)
        except BlockingIOError:
            await wait_readable(sock)


async def wait_readable(sock: Connection) -> None:
    """Wait until there is something to receive. A cancelled call leaves no trace."""
    loop = asyncio.get_running_loop()
    await _wait_ready(sock, loop.add_reader, loop.remove_reader)


async def wait_writable(sock: Connection) -> None:
    """Wait until more can be sent. A cancelled call leaves no trace."""
    loop = asyncio.get_running_loop()
    await _wait_ready(sock, loop.add_writer, loop.remove_writer)


async def _wait_ready(
    sock: Connection, add: Callable[..., None], remove: Callable[[Connection], bool]
) -> None:
    ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    add(sock, _settle, ready)
    try:
        await ready
    finally:
        remove(sock)


def _settle(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


_Target: TypeAlias = tuple[socket.AddressFamily, str | tuple[Any, ...]]

_BACKLOG: Final = 1024
_UCRED: Final = struct.Struct("3i")
_EAGAIN_PAUSE_S: Final = 0.01
_LINGER_S: Final = 0.5
_LINGER_BYTES: Final = 64 * 1024
_LISTEN_HINTS: Final = {
    errno.EADDRINUSE: "is another one running there? Port 0 takes a free port",
    errno.EACCES: "take a port from 1024 on, or a folder that you may write to",
    errno.ENOENT: "make the folder first",
    errno.EADDRNOTAVAIL: "use an address of this machine",
    errno.EMFILE: "this process has no file descriptors left: see ulimit -n",
}


async def connect(address: Address) -> socket.socket:
    """Return a connected, non-blocking socket.

    :raises PeerLost: nobody listens there, or it cannot be reached
    """
    try:
        targets = await _targets(address)
    except OSError as exc:
        raise PeerLost(
            f"{address.host!r} is no host that is known here: {exc}",
            hint="check the name, or write its IP address",
        ) from exc
    error: OSError | None = None
    for family, target in targets:
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            await _connect_to(sock, target)
            prepare(sock)
            check_peer(sock)
            return sock
        except OSError as exc:
            sock.close()
            error = exc
        except BaseException:
            sock.close()
            raise
    if error is not None:
        error = error.with_traceback(None)  # it came out of asyncio: of no use
    if isinstance(error, ConnectionRefusedError | FileNotFoundError):
        raise PeerLost(
            f"nobody listens at {address}",
            hint="start the other side first, or check the address",
        ) from error
    raise PeerLost(
        f"{address} cannot be reached: {error}",
        hint="check the address, and the network in between",
    ) from error


async def _targets(address: Address) -> list[_Target]:
    """Return where that is. A cancelled call leaves a thread that ends by itself.

    :raises OSError: no host of that name is known
    """
    if address.scheme == "unix":
        return [(socket.AF_UNIX, address.place)]
    for family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError):
            socket.inet_pton(family, address.host)
            return [(family, (address.host, address.port))]
    # A limiter of its own, as in in_thread().
    found = await anyio.to_thread.run_sync(
        lambda: socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM),
        abandon_on_cancel=True,
        limiter=anyio.CapacityLimiter(1),
    )
    return [(item[0], item[4]) for item in found]


async def _connect_to(sock: socket.socket, target: str | tuple[Any, ...]) -> None:
    if not isinstance(target, str):
        await asyncio.get_running_loop().sock_connect(sock, target)
        return
    while True:
        # A full backlog is EAGAIN here: not under way, to be tried again.
        try:
            sock.connect(target)
            return
        except BlockingIOError:
            await asyncio.sleep(_EAGAIN_PAUSE_S)


def prepare(sock: socket.socket) -> None:
    """Make a connected socket ready for small frames."""
    sock.setblocking(False)
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def check_peer(sock: socket.socket) -> None:
    """Refuse whoever is not this user, where the kernel knows who it is.

    :raises AuthError: the other end of a unix socket is another user's
    """
    if sock.family != socket.AF_UNIX or not hasattr(socket, "SO_PEERCRED"):
        return
    ucred = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    _, uid, _ = _UCRED.unpack(ucred)
    if uid != os.geteuid():
        raise AuthError("the other end of the unix socket belongs to another user")


async def bind(address: Address) -> socket.socket:
    """Return a listening, non-blocking socket; port 0 takes a free one.

    Of a name that is several addresses, it is at the first of IPv4 if there is one.

    :raises ConfigError: the address cannot be listened at
    """
    try:
        family, target = min(await _targets(address), key=lambda found: found[0])
        with contextlib.ExitStack() as stack:
            sock = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            sock.setblocking(False)
            if isinstance(target, str):
                _listen_unix(sock, target)
            else:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                sock.bind(target)
                sock.listen(_BACKLOG)
            stack.pop_all()
    except OSError as exc:
        raise ConfigError(
            f"cannot listen at {address}: {exc.strerror or exc}",
            hint=_LISTEN_HINTS.get(exc.errno or 0, "choose another address"),
        ) from exc
    return sock


def _listen_unix(sock: socket.socket, path: str) -> None:
    """Listen at ``path``.

    Between bind() and listen() our file looks stale to another process that
    starts at the same moment: so whoever finds that its own is gone gives up.
    """
    _remove_stale(path)
    sock.bind(path)
    inode = os.lstat(path).st_ino
    # Nobody connects before listen(), so there is no moment at a wider mode.
    os.chmod(path, stat.S_IRUSR | stat.S_IWUSR)
    sock.listen(_BACKLOG)
    if os.lstat(path).st_ino != inode:
        raise OSError(errno.EADDRINUSE, "another process has just come there")


def _remove_stale(path: str) -> None:
    """Remove a socket file that nobody listens at; leave anything else."""
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            return
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
        except BlockingIOError:
            return


def remove_place(path: str, inode: int) -> None:
    """Remove the socket file of a listener, unless it is another's by now."""
    with contextlib.suppress(OSError):
        if os.lstat(path).st_ino == inode:
            os.unlink(path)


async def converse(sock: Connection, side: GreetingSide) -> None:
    """Read and answer until ``side`` wants no more; no byte beyond that is read.

    :raises PeerLost: the peer hung up before the end of it
    :raises AsyncKVError: what ``side`` raises
    """
    while missing_bytes := side.missing_bytes:
        answer = side.receive(await _receive(sock, missing_bytes))
        if answer:
            await send_first_frame(sock, answer)


async def read_first_frame(sock: Connection, limits: Limits = GREETING_LIMITS) -> Frame:
    """Return the first frame on a connection, and read no byte beyond it.

    :raises PeerLost: the peer hung up before the end of it
    :raises RemoteProtocolError: it is not a frame, or longer than a stranger's may be
    """
    decoder = FrameDecoder(limits)
    while True:
        data = await _receive(sock, decoder.missing_bytes)
        for _, frame, _ in decoder.feed(data):
            return frame


async def send_first_frame(sock: Connection, data: bytes) -> None:
    """Send the first bytes on a connection.

    :raises PeerLost: the peer hung up
    """
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[sock.send(rest) :]
        except BlockingIOError:
            await wait_writable(sock)
        except OSError as exc:
            raise _broken(exc) from exc


async def hang_up(sock: Connection) -> None:
    """Let the last words reach a peer that may still be talking, for a moment.

    A socket that is closed with something unread takes back what it has sent.
    """
    left_bytes = _LINGER_BYTES
    with contextlib.suppress(OSError, TimeoutError):
        sock.shutdown(socket.SHUT_WR)
        async with asyncio.timeout(_LINGER_S):
            while left_bytes > 0:
                try:
                    nbytes = discard(sock)
                except BlockingIOError:
                    await wait_readable(sock)
                    continue
                if not nbytes:
                    return
                left_bytes -= nbytes


async def _receive(sock: Connection, nbytes: int) -> bytes:
    while True:
        try:
            data = sock.recv(nbytes)
            break
        except WantsToWrite:
            await wait_writable(sock)
        except BlockingIOError:
            await wait_readable(sock)
        except OSError as exc:
            raise _broken(exc) from exc
    if not data:
        raise PeerLost(
            "the peer hung up in the handshake",
            hint="its log may say why: is it asynckv, and at a tls:// address?",
        )
    return data


def _broken(exc: OSError) -> AsyncKVError:
    if isinstance(exc, ssl.SSLError):
        return tls_failure(exc)
    return PeerLost(f"the connection broke in the handshake: {exc}")
