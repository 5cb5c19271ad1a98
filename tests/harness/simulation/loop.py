"""An asyncio event loop in virtual time, run step by step by the world.

It is asyncio's own selector loop; only its clock and its selector are others.
Callbacks run in the order that asyncio promises. What a kernel leaves open,
which of several ready sockets comes first, is drawn from the seed.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import random
import selectors
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Any, Protocol, TypeVar

__all__ = ("Pollable", "VirtualLoop", "VirtualSelector")

_T = TypeVar("_T")


class Pollable(Protocol):
    """A simulated socket, as a selector sees it."""

    @property
    def is_readable(self) -> bool:
        """Whether receiving would not block."""

    @property
    def is_writable(self) -> bool:
        """Whether sending would not block."""


class VirtualSelector(selectors.BaseSelector):
    """Tells what is ready now; never waits. ``files`` are the open descriptors."""

    def __init__(self, files: Mapping[int, Pollable], chance: random.Random) -> None:
        self._files = files
        self._chance = chance
        self._keys: dict[int, selectors.SelectorKey] = {}
        self._registered: dict[int, Pollable] = {}

    def register(
        self, fileobj: Any, events: int, data: Any = None
    ) -> selectors.SelectorKey:
        fd = _descriptor(fileobj)
        if fd in self._keys:
            raise KeyError(f"{fileobj!r} is registered already")
        self._registered[fd] = self._file(fd)
        key = selectors.SelectorKey(fileobj, fd, events, data)
        self._keys[fd] = key
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        key = self.get_key(fileobj)
        del self._keys[key.fd], self._registered[key.fd]
        return key

    def modify(
        self, fileobj: Any, events: int, data: Any = None
    ) -> selectors.SelectorKey:
        key = self.get_key(fileobj)
        if self._files.get(key.fd) is not self._registered[key.fd]:
            # As epoll: the number belongs to another socket by now.
            raise FileNotFoundError(f"descriptor {key.fd} was closed while watched")
        key = key._replace(events=events, data=data)
        self._keys[key.fd] = key
        return key

    def select(
        self, timeout: float | None = None
    ) -> list[tuple[selectors.SelectorKey, int]]:
        ready = [(key, mask) for key in self._keys.values() if (mask := self._on(key))]
        if len(ready) > 1:
            self._chance.shuffle(ready)
        return ready

    @property
    def is_ready(self) -> bool:
        """Whether :meth:`select` would return anything."""
        return any(self._on(key) for key in self._keys.values())

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return _KeysByFile(self._keys)

    def get_key(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys[_descriptor(fileobj)]

    def close(self) -> None:
        self._keys.clear()
        self._registered.clear()

    def _file(self, fd: int) -> Pollable:
        file = self._files.get(fd)
        if file is None:
            raise OSError(9, f"descriptor {fd} is not open")
        return file

    def _on(self, key: selectors.SelectorKey) -> int:
        file = self._registered[key.fd]
        if self._files.get(key.fd) is not file:
            return 0
        mask = 0
        if key.events & selectors.EVENT_READ and file.is_readable:
            mask |= selectors.EVENT_READ
        if key.events & selectors.EVENT_WRITE and file.is_writable:
            mask |= selectors.EVENT_WRITE
        return mask


class _KeysByFile(Mapping[Any, selectors.SelectorKey]):
    """Keys by what was registered, a socket or its descriptor: asyncio asks by both.

    :raises ValueError: asked for what has no descriptor any more
    """

    def __init__(self, keys: dict[int, selectors.SelectorKey]) -> None:
        self._keys = keys

    def __getitem__(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys[_descriptor(fileobj)]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


class VirtualLoop(asyncio.SelectorEventLoop):
    """One node's event loop. ``now`` tells that node's time."""

    _ready: collections.deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]
    _clock_resolution: float
    _run_once: Callable[[], None]
    _asyncgen_firstiter_hook: Callable[[Any], None]
    _asyncgen_finalizer_hook: Callable[[Any], None]

    def __init__(self, now: Callable[[], float], selector: VirtualSelector) -> None:
        self._now = now
        self._watched = selector
        super().__init__(selector)

    def time(self) -> float:
        return self._now()

    @property
    def has_work(self) -> bool:
        """Whether a step would run anything now."""
        if self._ready or self._watched.is_ready:
            return True
        due_before = self._now() + self._clock_resolution
        return bool(self._scheduled) and self._scheduled[0].when() < due_before

    @property
    def next_timer(self) -> float | None:
        """When the first timer is due, in this loop's time."""
        return self._scheduled[0].when() if self._scheduled else None

    def step(self) -> None:
        """Run what is ready now, once."""
        with self._running():
            self._run_once()

    def finish(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Return what a coroutine returns that never waits.

        :raises RuntimeError: it does wait
        """
        with self._running():
            try:
                coroutine.send(None)
            except StopIteration as stop:
                value: _T = stop.value
                return value
        coroutine.close()
        raise RuntimeError("it waits")

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        before, hooks = asyncio._get_running_loop(), sys.get_asyncgen_hooks()
        asyncio._set_running_loop(None)
        asyncio._set_running_loop(self)
        sys.set_asyncgen_hooks(
            self._asyncgen_firstiter_hook, self._asyncgen_finalizer_hook
        )
        try:
            yield
        finally:
            sys.set_asyncgen_hooks(*hooks)
            asyncio._set_running_loop(before)

    # The pipe by which threads wake a selector is not needed: nobody sleeps.

    def _make_self_pipe(self) -> None:
        self._ssock = self._csock = None

    def _close_self_pipe(self) -> None:
        pass

    def _write_to_self(self) -> None:
        pass


def _descriptor(fileobj: Any) -> int:
    fd = fileobj if isinstance(fileobj, int) else int(fileobj.fileno())
    if fd < 0:
        raise ValueError(f"{fileobj!r} is closed")
    return fd
