"""Where a proxy listens and whom it dials: a loopback port, or a unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import socket
import tempfile
import urllib.parse
from typing import Final

import anyio
import anyio.to_thread

from asynckv.errors import ConfigError

__all__ = ("Place", "place_of", "prepared")

_BACKLOG: Final = 1024
_EAGAIN_PAUSE_S: Final = 0.01


@dataclasses.dataclass(frozen=True)
class Place:
    """What a URL says of where a listener is."""

    url: str
    family: socket.AddressFamily
    target: str | tuple[str, int]
    folder: str = ""

    async def connect(self) -> socket.socket:
        """Return a connected, non-blocking socket.

        :raises OSError: nobody listens there
        """
        sock = socket.socket(self.family, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            if isinstance(self.target, tuple):
                await asyncio.get_running_loop().sock_connect(sock, self.target)
            else:
                await _connect_unix(sock, self.target)
        except BaseException:
            sock.close()
            raise
        return prepared(sock)

    async def listen_beside(self) -> tuple[Place, socket.socket]:
        """Return a place of the same scheme that is free, and who listens there."""
        if self.family == socket.AF_UNIX:
            return await self._listen_beside_unix()
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            sock.bind(("127.0.0.1", 0))
            sock.listen(_BACKLOG)
        except BaseException:
            sock.close()
            raise
        host, port = sock.getsockname()
        url = self._url_at(f"{host}:{port}")
        return Place(url, socket.AF_INET, (host, port)), sock

    async def remove(self) -> None:
        """Remove what :meth:`listen_beside` left in the file system. Shielded."""
        if self.folder:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(_remove, self.folder, str(self.target))

    async def _listen_beside_unix(self) -> tuple[Place, socket.socket]:
        # In a folder that only this user can enter: who could connect to the
        # proxy would reach the listener in this user's name.
        with anyio.CancelScope(shield=True):
            folder = await anyio.to_thread.run_sync(_new_folder)
        path = f"{folder}/proxy.sock"
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        url = self._url_at(urllib.parse.quote(path))
        place = Place(url, socket.AF_UNIX, path, folder)
        try:
            sock.setblocking(False)
            sock.bind(path)
            sock.listen(_BACKLOG)
        except BaseException:
            sock.close()
            await place.remove()
            raise
        return place, sock

    def _url_at(self, where: str) -> str:
        """Return this URL at another place, with all bytes through its sockets."""
        split = urllib.parse.urlsplit(self.url)
        return f"{split.scheme}://{where}?{split.query or 'payload=inline'}"


def prepared(sock: socket.socket) -> socket.socket:
    """Return ``sock``, ready to carry small writes as they come."""
    sock.setblocking(False)
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def place_of(url: str) -> Place:
    """Return where ``url`` leads.

    :raises ConfigError: no proxy can stand there
    """
    parts = urllib.parse.urlsplit(url)
    if parts.scheme == "unix" and parts.path:
        return Place(url, socket.AF_UNIX, urllib.parse.unquote(parts.path))
    if parts.scheme in ("tcp", "tls") and parts.port:
        host = parts.hostname or "127.0.0.1"
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return Place(url, family, (host, parts.port))
    raise ConfigError(
        f"no proxy can stand before {url!r}",
        hint="it needs the real address of a listener: tcp://127.0.0.1:7000 or "
        "unix:///run/asynckv.sock; there is nothing between the sides of mem://",
    )


async def _connect_unix(sock: socket.socket, path: str) -> None:
    while True:
        # A full backlog is EAGAIN here: not under way, to be tried again.
        try:
            sock.connect(path)
            return
        except BlockingIOError:
            await asyncio.sleep(_EAGAIN_PAUSE_S)


def _new_folder() -> str:
    return tempfile.mkdtemp(prefix="asynckv-")


def _remove(folder: str, path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
    with contextlib.suppress(OSError):
        os.rmdir(folder)
