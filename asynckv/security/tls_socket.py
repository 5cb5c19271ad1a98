"""A TLS connection that never blocks, over a socket of its own.

It does what a non-blocking socket does, and raises ``BlockingIOError`` where
that would. Its state is one for both directions, so the calls of two threads
take turns; none of them waits for the peer.
"""

from __future__ import annotations

import errno
import socket
import ssl
import threading
from types import TracebackType
from typing import Final, Self, TypeAlias

from asynckv.security.names import Assurance, CertifiedNames, names_in
from asynckv.security.tls import TlsKeys, digest_of_certificate

__all__ = (
    "Connection",
    "TlsSocket",
    "WantsToWrite",
    "discard",
    "has_hung_up",
    "is_readable",
)

_DISCARD_BYTES: Final = 4096
_WANTS: Final = (ssl.SSLWantReadError, ssl.SSLWantWriteError)


class WantsToWrite(BlockingIOError):
    """TLS has to send something first: wait until the socket is writable."""


class TlsSocket:
    """Made by :meth:`over`; usable after :meth:`shake_hands` has returned."""

    def __init__(self, sock: ssl.SSLSocket, own_digest: bytes) -> None:
        self._sock = sock
        self._own_digest = own_digest
        self._lock = threading.Lock()

    @classmethod
    def over(
        cls, sock: socket.socket, keys: TlsKeys, *, dials: str | None = None
    ) -> TlsSocket:
        """Take ``sock`` over: the one that dials says whose certificate it wants.

        :raises OSError: the peer is gone already; ``sock`` is still the caller's
        """
        sock.getpeername()
        context = keys.listening if dials is None else keys.dialling
        sock.setblocking(False)
        return cls(
            context.wrap_socket(
                sock,
                server_side=dials is None,
                server_hostname=dials,
                do_handshake_on_connect=False,
            ),
            keys.certificate_digest,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def fileno(self) -> int:
        """Return the descriptor of the socket."""
        return self._sock.fileno()

    @property
    def family(self) -> int:
        """The address family of the socket."""
        return self._sock.family

    def setsockopt(self, level: int, option: int, value: int) -> None:
        """Set an option of the socket."""
        self._sock.setsockopt(level, option, value)

    def getsockname(self) -> object:
        """Return the address of this end."""
        return self._sock.getsockname()

    def getpeername(self) -> object:
        """Return the address of the other end."""
        return self._sock.getpeername()

    def shake_hands(self) -> None:
        """Go on with the TLS handshake. Computes for some milliseconds.

        :raises BlockingIOError: it is not over; call again when there is more
        :raises ssl.SSLError: it failed, and the peer was told so
        """
        with self._lock:
            try:
                self._sock.do_handshake()
            except _WANTS as exc:
                raise _blocked(exc) from exc

    @property
    def protocol(self) -> str | None:
        """What both sides agreed to speak."""
        return self._sock.selected_alpn_protocol()

    def peer_names(self) -> CertifiedNames:
        """Return the names that the peer has proved to have."""
        return CertifiedNames(names_in(self._sock.getpeercert() or {}))

    def peer_digest(self) -> bytes:
        """Return what tells the peer's certificate from others."""
        return digest_of_certificate(self._sock.getpeercert(binary_form=True) or b"")

    def assurance(self) -> Assurance:
        """Return what this connection proves to a greeting above it."""
        digests = [self._own_digest, self.peer_digest()]
        if not self._sock.server_side:
            digests.reverse()
        return Assurance(self.peer_names(), b"".join(digests))

    def send(self, data: bytes | memoryview) -> int:
        """Send all of ``data``, or nothing yet: then call again with the same.

        Never in plaintext, which is what a socket's own ``send`` falls back to.

        :raises BlockingIOError: it has not left, though a part may have
        """
        with self._lock:
            try:
                return self._sock.write(data)
            except _WANTS as exc:
                raise _blocked(exc) from exc
            except ValueError as exc:
                raise _closed() from exc

    def recv(self, nbytes: int) -> bytes:
        """Receive at most ``nbytes``; nothing at all if the peer has hung up."""
        with self._lock:
            try:
                return self._sock.read(nbytes)
            except _WANTS as exc:
                raise _blocked(exc) from exc
            except ValueError as exc:
                raise _closed() from exc

    def recv_into(self, buffer: bytearray | memoryview) -> int:
        """Receive into ``buffer``; 0 if the peer has hung up."""
        with self._lock:
            try:
                return self._sock.read(len(buffer), buffer)  # type: ignore[return-value]
            except _WANTS as exc:
                raise _blocked(exc) from exc
            except ValueError as exc:
                raise _closed() from exc

    def pending(self) -> int:
        """Return how many bytes can be received though the socket has none."""
        with self._lock:
            return self._sock.pending()

    def discard(self) -> int:
        """Receive what comes, undeciphered, and drop it; 0 if the peer has hung up."""
        return len(socket.socket.recv(self._sock, _DISCARD_BYTES))

    def has_hung_up(self) -> bool:
        """As :func:`has_hung_up`."""
        return not socket.socket.recv(self._sock, 1, socket.MSG_PEEK)

    def shutdown(self, how: int) -> None:
        """End one direction of the connection, or both. Never waits."""
        # Its own shutdown() would go on in plaintext: what still comes would
        # be taken for what the peer has said.
        socket.socket.shutdown(self._sock, how)

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()


Connection: TypeAlias = socket.socket | TlsSocket
"""What greetings, control streams and lanes go over."""


def discard(sock: Connection) -> int:
    """Receive what comes after a failure, and drop it; 0 if the peer has hung up."""
    if isinstance(sock, TlsSocket):
        return sock.discard()
    return len(sock.recv(_DISCARD_BYTES))


def is_readable(sock: Connection) -> bool:
    """Whether something has come that was not received yet. Takes nothing."""
    try:
        if isinstance(sock, TlsSocket):
            return not sock.has_hung_up()
        return bool(sock.recv(1, socket.MSG_PEEK))
    except OSError:
        return False


def has_hung_up(sock: Connection) -> bool:
    """Whether nothing more can come, as the peer has hung up. Takes nothing."""
    try:
        if isinstance(sock, TlsSocket):
            return sock.has_hung_up()
        return not sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _closed() -> OSError:
    return OSError(errno.EBADF, "the TLS connection is closed")


def _blocked(exc: ssl.SSLError) -> BlockingIOError:
    wants_to_write = isinstance(exc, ssl.SSLWantWriteError)
    return (WantsToWrite if wants_to_write else BlockingIOError)(exc.reason)
