from __future__ import annotations

from collections.abc import Callable

import pytest

from asynckv.testing.faults.fault import Fault
from asynckv.testing.faults.proxy import Proxy

MAKERS: list[Callable[[Proxy], Fault]] = [
    lambda proxy: proxy.latency(0.1, direction="to_dialler", kind="lanes"),
    lambda proxy: proxy.rate(100, direction="to_dialler", kind="lanes"),
    lambda proxy: proxy.tiny_slices(direction="to_dialler", kind="lanes"),
    lambda proxy: proxy.stall(direction="to_dialler", kind="lanes"),
    lambda proxy: proxy.black_hole(direction="to_dialler", kind="lanes"),
    lambda proxy: proxy.reset(direction="to_dialler", kind="lanes"),
    lambda proxy: proxy.half_close("to_dialler", kind="lanes"),
    lambda proxy: proxy.cut_after(1, direction="to_dialler", kind="lanes"),
    lambda proxy: proxy.bit_flip(1, direction="to_dialler", kind="lanes"),
]


@pytest.mark.parametrize("make", MAKERS)
async def test_a_fault_is_made_off_and_put_on_the_proxy(
    proxy: Proxy, make: Callable[[Proxy], Fault]
) -> None:
    fault = make(proxy)
    assert proxy.faults == (fault,)
    assert not fault.is_on
    assert (fault.direction, fault.kind) == ("to_dialler", "lanes")
    with fault:
        assert fault.is_on
    assert not fault.is_on
