from __future__ import annotations

import inspect
from typing import Any

import pytest

from asynckv.testing import faults
from asynckv.testing.faults import opening
from asynckv.testing.faults.proxy import Proxy
from asynckv.testing.faults.raw import RawConnection, RawListener

ON_FROM_THE_START: dict[str, dict[str, Any]] = {
    "latency": {"delay_s": 0.01},
    "rate": {"bytes_per_s": 10_000},
    "tiny_slices": {},
    "cut_after": {"nbytes": 10},
    "bit_flip": {"at": 10},
}
AT_THE_BEGIN = ("stall", "black_hole", "reset", "half_close")


@pytest.mark.parametrize("name", ON_FROM_THE_START)
async def test_what_shapes_or_damages_is_on_from_the_start(
    listener: RawListener, name: str
) -> None:
    async with getattr(faults, name)(listener.url, **ON_FROM_THE_START[name]) as fault:
        assert fault.is_on
        with await RawConnection.dial(fault.url) as near:
            far = await listener.accept()
            await near.send(bytes(20))
            await far.receive(10)
            await fault.acted()


@pytest.mark.parametrize("name", AT_THE_BEGIN)
async def test_what_ends_or_holds_waits_for_its_begin(
    listener: RawListener, name: str
) -> None:
    async with getattr(faults, name)(listener.url) as fault:
        with await RawConnection.dial(fault.url) as near:
            far = await listener.accept()
            await near.send(b"before")
            assert await far.receive(6) == b"before"
            fault.begin()
            near.send_nowait(b"after")
            await fault.acted()


def test_every_fault_has_its_function() -> None:
    assert set(opening.__all__) == {*ON_FROM_THE_START, *AT_THE_BEGIN}
    for name in opening.__all__:
        function, method = getattr(opening, name), getattr(Proxy, name)
        assert (function.__name__, function.__doc__) == (name, method.__doc__)
        assert inspect.isfunction(function)
