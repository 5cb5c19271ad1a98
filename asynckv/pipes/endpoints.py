"""Opening pipes: one side dials, the other accepts."""

from __future__ import annotations

import asyncio
import collections
import os
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Final, Self

from asynckv.abc.closing import AsyncWithOnly, async_with_only
from asynckv.affinity import LoopBound
from asynckv.devices.names import Device, DeviceName, device_named
from asynckv.devices.opening import OpenDevice, open_device
from asynckv.errors import ConfigError, EndOfStream
from asynckv.links.dial import dial
from asynckv.links.link import LinkStream
from asynckv.links.listen import LinkListener, listen
from asynckv.links.options import (
    Digest,
    as_digest,
    as_lanes,
    make_keyring,
    new_identity,
    payload_digest,
)
from asynckv.links.streams import StreamHandler
from asynckv.pipes.end import PipeEnd
from asynckv.pipes.pipe import Pipe
from asynckv.protocol.frames import OpeningFrame, OpenPipe
from asynckv.protocol.transfer_frames import OpenDevices, OpenMemory
from asynckv.security.keyring import NO_KEYS, Keyring
from asynckv.security.tls import TLS
from asynckv.types import parse_bytes

__all__ = ("PipeListener", "listen_pipe", "open_pipe")

_MAX_WAITING: Final = 64


def open_pipe(
    url: str,
    *,
    digest: Digest = "auto",
    lanes: int | None = None,
    secret_file: str | os.PathLike[str] | None = None,
    tls: TLS | None = None,
    allow_plaintext: bool = False,
    max_bytes: int | float | str = "1GB",
    device: DeviceName | None = None,
) -> AbstractAsyncContextManager[Pipe]:
    """Open a pipe to the listener at ``url``: ``async with open_pipe(url) as pipe``.

    Entering waits for the connection (at most 10 s), not for the peer's
    ``accept()``; a cancelled entering leaves nothing behind. Leaving flushes, says
    goodbye and hangs up; after an error it just hangs up.

    :param url: where the other side listens: its ``listener.url``. Two processes of one
        host read large tensors in each other's memory, as soon as that is open, unless
        the URL ends in ``?payload=inline``, or ``device`` is given
    :param digest: what is compared of each tensor: ``"full"`` every byte; ``"auto"``
        too, but the first and last 4 KiB of what is read in memory of this host;
        ``"edges"`` as much, and no more between two GPUs; ``"off"`` nothing, if both
        sides say so
    :param lanes: sockets for payload, 1 to 8; the smaller number of both sides counts.
        By default one for two cores, up to 4
    :param secret_file: a file with the secret that both sides must share; without it
        ``ASYNCKV_SECRET_FILE`` or ``ASYNCKV_SECRET`` of the environment, if set
    :param tls: this side's certificate, key and authorities, for ``tls://`` URLs
    :param allow_plaintext: go on without TLS, with a secret, between two machines
    :param max_bytes: bounds what is in flight, and what is received ahead of the
        application
    :param device: the GPU (``"cuda:0"``; ``"cuda"``: that of ``LOCAL_RANK``) on which
        what is received is, wherever it was sent from. Entering then opens it first,
        which may take 30 s more. Between two processes on one GPU payload stays there,
        by CUDA IPC, as it goes between two GPUs of a host that reach each other's
        memory; else by NCCL. As soon as that is open a pipe has twice ``max_bytes`` of
        its GPU. Tensors of any GPU can be sent anyway
    :raises ConfigError: an option that cannot be honoured, keys that cannot be
        read, or an address that asks for more protection
    :raises GPUUnavailable: CuPy, a driver or the GPU is missing
    :raises GPUFailed: the GPU cannot be opened
    :raises AuthError: the two sides do not share a secret
    :raises PeerLost: nobody listens there, or did not answer in time
    """
    keyring = make_keyring(secret_file, tls, allow_plaintext)
    return _opened(
        url,
        as_digest(digest),
        as_lanes(lanes),
        parse_bytes(max_bytes),
        keyring,
        device=device_named(device),
    )


@async_with_only("open_pipe(...) as pipe")
async def _opened(
    url: str,
    digest: Digest,
    lanes: int | None,
    max_bytes: int,
    keyring: Keyring,
    *,
    device: Device | None,
) -> AsyncIterator[Pipe]:
    opened = await open_device(device)
    link = await dial(
        url,
        identity=new_identity(),
        digest=payload_digest(digest),
        lanes=lanes,
        keyring=keyring,
    )
    end = PipeEnd.dialled(link, max_bytes)
    end.share_memory(opened, digest)
    if "payload=" not in url:
        end.connect_gpus(opened, digest)
    async with Pipe(end, end, opened) as pipe:
        yield pipe


def listen_pipe(
    url: str,
    *,
    digest: Digest = "auto",
    lanes: int | None = None,
    secret_file: str | os.PathLike[str] | None = None,
    tls: TLS | None = None,
    allow_plaintext: bool = False,
    max_bytes: int | float | str = "1GB",
    device: DeviceName | None = None,
) -> PipeListener:
    """Wait for pipes at ``url``, of which port 0 takes a free port.

    ``async with listen_pipe(url) as listener``; ``listener.url`` has the real
    port, and ``async with await listener.accept() as pipe`` takes one pipe.

    :param url: where, as in :func:`asynckv.serve`
    :param digest: what is compared of each tensor: ``"full"`` every byte; ``"auto"``
        too, but the first and last 4 KiB of what is read in memory of this host;
        ``"edges"`` as much, and no more between two GPUs; ``"off"`` nothing, if both
        sides say so
    :param lanes: sockets for payload, 1 to 8; the smaller number of both sides counts.
        By default one for two cores, up to 4
    :param secret_file: a file with the secret that both sides must share; without it
        ``ASYNCKV_SECRET_FILE`` or ``ASYNCKV_SECRET`` of the environment, if set
    :param tls: this side's certificate, key and authorities, for ``tls://`` URLs
    :param allow_plaintext: go on without TLS, with a secret, between two machines
    :param max_bytes: bounds what is in flight in each pipe, and what is received there
        ahead of the application
    :param device: the GPU on which what is received is, as in :func:`open_pipe`;
        entering opens it
    :raises ConfigError: an option that cannot be honoured; on entering, keys that
        cannot be read, or an address that asks for more protection
    :raises GPUUnavailable: on entering: CuPy, a driver or the GPU is missing
    :raises GPUFailed: on entering: the GPU cannot be opened
    """
    return PipeListener(
        url,
        digest=as_digest(digest),
        lanes=as_lanes(lanes),
        max_bytes=parse_bytes(max_bytes),
        keyring=make_keyring(secret_file, tls, allow_plaintext),
        device=device_named(device),
    )


class _Door:
    """What one link may ask of a listener: to be a pipe, once."""

    def __init__(self, listener: PipeListener) -> None:
        self._listener = listener
        self._end: PipeEnd | None = None

    def open(
        self, stream: LinkStream, frame: OpeningFrame, body: bytes
    ) -> StreamHandler:
        if isinstance(frame, OpenDevices | OpenMemory) and self._end is not None:
            return self._end.asked_to_share(stream, frame)
        if not isinstance(frame, OpenPipe):
            raise ConfigError(
                "this peer listens for pipes and serves no buffer: use open_pipe()"
            )
        if self._end is not None:
            raise ConfigError("this link is a pipe already")
        self._end = self._listener.arrived(stream)
        return self._end


class PipeListener(LoopBound, AsyncWithOnly):
    """Accepts pipes while it is entered. Those it has accepted are the caller's."""

    _entered_by = "listen_pipe(...) as listener"

    def __init__(
        self,
        url: str,
        *,
        digest: Digest,
        lanes: int | None,
        max_bytes: int,
        keyring: Keyring = NO_KEYS,
        device: Device | None = None,
    ) -> None:
        self._asked_url = url
        self._has_gpu = device is not None and "payload=" not in url
        self._device = device
        self._opened: OpenDevice | None = None
        self._digest: Digest = digest
        self._lanes = lanes
        self._keyring = keyring
        self._max_bytes = max_bytes
        self._listener: LinkListener | None = None
        self._waiting: collections.deque[PipeEnd] = collections.deque()
        self._turn_to_accept = asyncio.Lock()
        self._changed = asyncio.Event()
        self._is_closed = False

    @property
    def url(self) -> str:
        """Where pipes are opened, with the real port.

        :raises RuntimeError: it was not entered yet
        """
        if self._listener is None:
            raise RuntimeError("the listener has no address before it is entered")
        return self._listener.url

    async def accept(self) -> Pipe:
        """Return the next pipe that a peer has opened; the caller closes it.

        Several callers are served in turn. A cancelled call has taken nothing.

        :raises EndOfStream: the listener was closed
        """
        end = await self.accept_end()
        return Pipe(end, end, self._opened)

    async def accept_end(self) -> PipeEnd:
        """As :meth:`accept`; for pipes that are put together in another way."""
        self._check_loop()
        if self._listener is None:
            raise RuntimeError("enter the listener before accept()")
        async with self._turn_to_accept:
            while not self._is_closed:
                while self._waiting:
                    end = self._waiting.popleft()
                    if end.link.is_open:
                        self._listener.release(end.link)
                        end.inbound.open()
                        end.share_memory(self._opened, self._digest)
                        end.connect_gpus(self._opened, self._digest)
                        return end
                self._changed.clear()
                await self._changed.wait()
        raise EndOfStream("the listener was closed on this side")

    def arrived(self, stream: LinkStream) -> PipeEnd:
        """A peer has opened a pipe; it waits until it is accepted.

        :raises ConfigError: too many wait
        """
        self._waiting = collections.deque(
            end for end in self._waiting if end.link.is_open
        )
        if len(self._waiting) >= _MAX_WAITING:
            raise ConfigError(
                f"{_MAX_WAITING} pipes wait to be accepted here already",
                hint="call accept() there, or open fewer",
            )
        end = PipeEnd.asked_for(stream, self._max_bytes, has_gpu=self._has_gpu)
        self._waiting.append(end)
        self._changed.set()
        return end

    async def __aenter__(self) -> Self:
        self._check_loop()
        if self._listener is not None:
            raise RuntimeError("the listener was entered before; make a new one")
        self._opened = await open_device(self._device)
        self._listener = await listen(
            self._asked_url,
            identity=new_identity(),
            service_for=lambda link: _Door(self),
            digest=payload_digest(self._digest),
            lanes=self._lanes,
            keyring=self._keyring,
        )
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Take no more; pipes that nobody accepted are cut. May be called again."""
        self._close()
        if self._listener is not None:
            await self._listener.aclose()

    def abort(self) -> None:
        """As :meth:`aclose`, at once. Never waits."""
        self._close()
        if self._listener is not None:
            self._listener.abort()

    def _close(self) -> None:
        self._is_closed = True
        self._changed.set()
        while self._waiting:
            # No goodbye: the peer would take it for the end of a whole stream.
            self._waiting.popleft().abort()
