"""One fault between two sides: ``async with latency(url, 0.05) as fault``.

Each function stands a proxy before the listener at ``url``, puts one fault on it
and yields the fault; ``fault.url`` is what to dial. Its other arguments are those
of the method of that name (:class:`~asynckv.testing.faults.injectors.Injectors`).

What shapes or damages the traffic is on from the start. What holds it or ends it
(:func:`stall`, :func:`black_hole`, :func:`reset`, :func:`half_close`) waits for
``fault.begin()``: the sides have to meet first.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Concatenate, ParamSpec, TypeVar

from asynckv.testing.faults.fault import Fault
from asynckv.testing.faults.proxy import Proxy

__all__ = (
    "bit_flip",
    "black_hole",
    "cut_after",
    "half_close",
    "latency",
    "rate",
    "reset",
    "stall",
    "tiny_slices",
)

_P = ParamSpec("_P")
_F = TypeVar("_F", bound=Fault)


def _before(
    make: Callable[Concatenate[Proxy, _P], _F], *, begins: bool
) -> Callable[Concatenate[str, _P], AbstractAsyncContextManager[_F]]:
    @contextlib.asynccontextmanager
    async def opened(
        url: str, /, *args: _P.args, **options: _P.kwargs
    ) -> AsyncIterator[_F]:
        async with Proxy(url) as proxy:
            fault = make(proxy, *args, **options)
            if begins:
                fault.begin()
            yield fault

    opened.__name__ = opened.__qualname__ = make.__name__
    opened.__doc__ = make.__doc__
    return opened


latency = _before(Proxy.latency, begins=True)
rate = _before(Proxy.rate, begins=True)
tiny_slices = _before(Proxy.tiny_slices, begins=True)
cut_after = _before(Proxy.cut_after, begins=True)
bit_flip = _before(Proxy.bit_flip, begins=True)
stall = _before(Proxy.stall, begins=False)
black_hole = _before(Proxy.black_hole, begins=False)
reset = _before(Proxy.reset, begins=False)
half_close = _before(Proxy.half_close, begins=False)
