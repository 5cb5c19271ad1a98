"""Pipes that other ranks have opened to this one, each until it is taken."""

from __future__ import annotations

import asyncio
from typing import Final

from asynckv.errors import ConfigError, PeerLost
from asynckv.links.link import Link
from asynckv.links.requests import LinkStream
from asynckv.pipes.end import PipeEnd
from asynckv.protocol.frames import OpenPipe

__all__ = ("Callers",)

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
