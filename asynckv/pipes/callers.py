"""How one rank comes to its group: it meets the others, and opens a pipe to each.

Pipes that other ranks have opened to this one are kept until each is taken.
"""

from __future__ import annotations

import asyncio
import random
from typing import Final, Literal

from asynckv.devices.names import Device
from asynckv.devices.opening import OpenDevice, open_device
from asynckv.errors import ConfigError, PeerLost
from asynckv.links.address import LOOPBACK, Address, is_beyond_this_host, parse_url
from asynckv.links.dial import dial
from asynckv.links.link import Link, LinkStream
from asynckv.links.listen import LinkListener, listen
from asynckv.links.options import new_identity
from asynckv.links.streams import StreamHandler
from asynckv.observability.waits import LoggedWait
from asynckv.pipes.end import PipeEnd
from asynckv.pipes.endpoints import PipeListener
from asynckv.pipes.pipe import Pipe
from asynckv.pipes.rendezvous import Follower, Leader, Rendezvous, name_ranks
from asynckv.protocol.frames import JoinGroup, Members, OpeningFrame, OpenPipe
from asynckv.protocol.transfer_frames import OpenDevices, OpenMemory
from asynckv.security.keyring import NO_KEYS, Keyring

__all__ = (
    "Callers",
    "Joining",
)


_MAX_CALLERS: Final = 1024


class Callers:
    """Who has called, by the name of the pipe, which says its group and its rank."""

    def __init__(self, max_bytes: int, *, has_gpu: bool) -> None:
        self._max_bytes, self._has_gpu = max_bytes, has_gpu
        self._ends: dict[str, PipeEnd] = {}
        self._changed = asyncio.Event()
        self._error: PeerLost | None = None

    def arrived(self, stream: LinkStream, frame: OpenPipe) -> PipeEnd:
        """A rank has opened its pipe; it waits until it is taken.

        :raises ConfigError: it has one already, or too many wait
        """
        if frame.name in self._ends or len(self._ends) >= _MAX_CALLERS:
            raise ConfigError("that rank has its pipe already")
        end = PipeEnd.asked_for(stream, self._max_bytes, has_gpu=self._has_gpu)
        self._ends[frame.name] = end
        self._changed.set()
        return end

    def of(self, link: Link) -> PipeEnd | None:
        """Return the pipe of that link, if it waits here."""
        return next((end for end in self._ends.values() if end.link is link), None)

    async def taken(self, name: str) -> PipeEnd:
        """Wait for the pipe of that name, and take it. A cancelled call takes none.

        :raises PeerLost: the group has ended, as :meth:`fail` was told
        """
        while name not in self._ends:
            if self._error is not None:
                raise self._error
            self._changed.clear()
            await self._changed.wait()
        return self._ends.pop(name)

    def fail(self, error: PeerLost) -> None:
        """The group has ended: nobody is waited for any more. Never waits."""
        self._error = error
        self._changed.set()

    def hope_again(self) -> None:
        """There is another group to come to."""
        self._error = None

    def abort(self) -> None:
        """Hang up on all that nobody has taken. Never waits."""
        for end in self._ends.values():
            end.abort()


_LEFT: Final = "the group was closed on this side"

_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 1.0


class Joining:
    """One rank's way into a group, and what it holds there besides its pipes."""

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        host: str,
        port: int,
        timeout_s: float,
        max_bytes: int,
        keyring: Keyring = NO_KEYS,
        device: Device | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self._scheme: Literal["tcp", "tls"] = "tls" if keyring.has_tls else "tcp"
        self._address = Address(self._scheme, host=host or LOOPBACK, port=port)
        self._timeout_s = timeout_s
        self._max_bytes = max_bytes
        self._keyring = keyring
        self._device = device
        self._opened: OpenDevice | None = None
        self._listener: LinkListener | None = None
        self._rendezvous: Rendezvous | None = None
        self._link: Link | None = None
        self._ends: dict[int, PipeEnd] = {}
        self._callers = Callers(max_bytes, has_gpu=device is not None)
        self._awaited: int | None = None
        self._has_left = False

    async def join(self) -> dict[int, Pipe]:
        """Return a pipe to each other rank, once all ranks have come and are ready.

        A cancelled call leaves nothing behind.

        :raises PeerLost: a rank did not come in time, or was lost again
        :raises ConfigError: the ranks do not agree on the group
        :raises GPUUnavailable: CuPy, a driver or the GPU is missing
        :raises GPUFailed: the GPU cannot be opened
        """
        opened = self._opened = await open_device(self._device)
        if self.size == 1:
            return {0: await self._loopback(opened)}
        try:
            try:
                async with asyncio.timeout(self._timeout_s):
                    with LoggedWait(f"rank {self.rank}", "its group", "the last rank"):
                        await self._join()
            except TimeoutError as exc:
                await self._give_up(exc)
        except BaseException:
            self.abort()
            raise
        return {rank: Pipe(end, end, opened) for rank, end in self._ends.items()}

    async def barrier(self) -> None:
        """Wait at the group's next barrier.

        :raises PeerLost: a rank is gone, or this one has left
        """
        if self._has_left:
            raise PeerLost(_LEFT)
        if self._rendezvous is not None:
            await self._rendezvous.barrier.wait()

    async def aclose(self) -> None:
        """Leave the group; the pipes are not touched. Bounded and shielded."""
        self._leave()
        try:
            if self._link is not None:
                await self._link.aclose()
        finally:
            if self._listener is not None:
                await self._listener.aclose()

    def abort(self) -> None:
        """Leave now, without a word. Never waits."""
        self._leave()
        for end in self._ends.values():
            end.abort()
        self._callers.abort()
        if self._link is not None:
            self._link.abort()
        if self._listener is not None:
            self._listener.abort()

    def _leave(self) -> None:
        self._has_left = True
        if self._rendezvous is not None:
            self._rendezvous.barrier.end(PeerLost(_LEFT))

    def open(
        self, stream: LinkStream, frame: OpeningFrame, body: bytes
    ) -> StreamHandler:
        """Answer another rank: it comes to rank 0, or opens its pipe to this one.

        With that it may ask to connect both GPUs.
        """
        if isinstance(frame, JoinGroup) and isinstance(self._rendezvous, Leader):
            return self._rendezvous.seat(stream, frame)
        if isinstance(frame, OpenDevices | OpenMemory):
            return self._end_of(stream.link).asked_to_share(stream, frame)
        if not isinstance(frame, OpenPipe):
            raise ConfigError("a group of ranks meets here: use join_group()")
        return self._callers.arrived(stream, frame)

    def _end_of(self, link: Link) -> PipeEnd:
        if (end := self._callers.of(link)) is not None:
            return end
        for end in self._ends.values():
            if end.link is link:
                return end
        raise ConfigError("this link is no pipe")

    # Joining, step by step.

    async def _join(self) -> None:
        if self.rank == 0:
            self._rendezvous = Leader(self.size, self._callers.fail, self._scheme)
            self._listener = await self._listen(self._address)
            members = await self._rendezvous.members()
        else:
            members = await self._follow()
        for rank in range(self.size):
            self._awaited = rank
            if rank < self.rank:
                self._ends[rank] = await self._dial(rank, members)
            elif rank > self.rank:
                self._ends[rank] = await self._pipe_from(rank, members.group_id)
        self._awaited = None
        await self.barrier()

    async def _listen(self, address: Address) -> LinkListener:
        return await listen(
            str(address),
            identity=new_identity(),
            service_for=lambda link: self,
            keyring=self._keyring,
        )

    async def _follow(self) -> Members:
        """Come to rank 0, again and again until it is there."""
        pause_s = _FIRST_PAUSE_S
        while True:
            follower = None
            try:
                follower = await self._come()
                return await follower.members()
            except PeerLost:
                if follower is not None and follower.was_refused:
                    raise
            if self._link is not None:
                self._link.abort()
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _come(self) -> Follower:
        self._rendezvous = None
        self._callers.hope_again()
        self._link = await dial(
            str(self._address),
            identity=new_identity(),
            lanes=1,
            keyring=self._keyring,
        )
        port = await self._port_at(self._link.own_host)
        self._rendezvous = follower = Follower(
            self._link, self.rank, self.size, port, self._callers.fail
        )
        return follower

    async def _port_at(self, host: str) -> int:
        """Listen where rank 0 sees this rank, as that is where the others look."""
        if self._listener is not None and parse_url(self._listener.url).host != host:
            self._listener.abort()
            self._listener = None
        if self._listener is None:
            self._listener = await self._listen(Address(self._scheme, host=host))
        return parse_url(self._listener.url).port

    async def _dial(self, rank: int, members: Members) -> PipeEnd:
        url = self._url_of(rank, members)
        try:
            link = await dial(url, identity=new_identity(), keyring=self._keyring)
        except PeerLost as exc:
            raise PeerLost(f"rank {rank} takes no pipe: {exc.message}") from exc
        name = _caller(members.group_id, self.rank)
        end = PipeEnd.dialled(link, self._max_bytes, name)
        end.share_memory(self._opened, "auto")
        end.connect_gpus(self._opened, "auto")
        return end

    def _url_of(self, rank: int, members: Members) -> str:
        """Return where rank 0, which we have dialled ourselves, says that one is."""
        if not rank:
            return str(self._address)
        url = members.urls[rank]
        address = parse_url(url)
        if address.scheme != self._scheme:
            raise ConfigError(f"rank {rank} is at {url}, not at a {self._scheme} URL")
        if not is_beyond_this_host(address) and self._is_beyond_rank_0():
            raise ConfigError(
                f"rank {rank} came to rank 0 from {address.host}: it can only be "
                "reached on that host",
                hint="every rank needs the host of rank 0 that the others have",
            )
        return url

    def _is_beyond_rank_0(self) -> bool:
        """Whether this rank came from an address that other hosts can have too."""
        host = "" if self._link is None else self._link.own_host
        return bool(host) and is_beyond_this_host(Address(self._scheme, host=host))

    async def _pipe_from(self, rank: int, group_id: str) -> PipeEnd:
        end = await self._callers.taken(_caller(group_id, rank))
        if self._listener is not None:
            self._listener.release(end.link)
        end.inbound.open()
        end.share_memory(self._opened, "auto")
        end.connect_gpus(self._opened, "auto")
        return end

    async def _loopback(self, opened: OpenDevice | None) -> Pipe:
        async with PipeListener(
            "mem://", digest="full", lanes=None, max_bytes=self._max_bytes
        ) as listener:
            link = await dial(listener.url, identity=new_identity())
            try:
                sends = PipeEnd.dialled(link, self._max_bytes)
                receives = await listener.accept_end()
            except BaseException:
                link.abort()
                raise
        return Pipe(sends, receives, opened)

    async def _give_up(self, cause: TimeoutError) -> None:
        error = PeerLost(
            f"rank {self.rank}: {self._who_is_late()} within {self._timeout_s:g} s",
            hint="is each of them alive? Does it have the same size, host and port?",
        )
        if isinstance(self._rendezvous, Leader):
            self._rendezvous.end(error)
            await self.aclose()
        raise error from cause

    def _who_is_late(self) -> str:
        if self._rendezvous is None:
            return f"rank 0 did not come to {self._address}"
        missing = self._rendezvous.missing
        if self._awaited is not None:
            missing = (self._awaited,)
        if missing:
            return f"{name_ranks(missing)} of {self.size} did not come"
        return "the others were not ready"


def _caller(group_id: str, rank: int) -> str:
    return f"{group_id}/{rank}"
