from __future__ import annotations

import numpy
import pytest

from asynckv.errors import GPUFailed
from harness.fake_gpus.memory import POISON, AddressSpace, Allocation


def allocation(nbytes: int = 8) -> Allocation:
    return Allocation(numpy.zeros(nbytes, numpy.uint8), 0)


def test_an_address_within_an_allocation_is_found() -> None:
    space = AddressSpace(0)
    base = space.map(one := allocation())
    assert space.find(base + 3, 5) == (one, 3)
    assert space.bases_of(one) == [base]


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 1), (0, 9), (8, 1)])
def test_what_is_nobodys_is_illegal(offset: int, nbytes: int) -> None:
    space = AddressSpace(0)
    base = space.map(allocation())
    with pytest.raises(GPUFailed, match="illegal address"):
        space.find(base + offset, nbytes)


def test_what_was_unmapped_is_nobodys() -> None:
    space = AddressSpace(0)
    base = space.map(one := allocation())
    assert space.unmap(base) is one
    with pytest.raises(GPUFailed, match="nothing begins"):
        space.unmap(base)


def test_what_was_shared_keeps_its_bytes_until_it_is_dropped() -> None:
    one = allocation()
    one.array[:] = 7
    assert one.share() == one.share()
    assert (one.array == 7).all()
    one.drop()
    assert (one.array == POISON).all() and one.is_gone
