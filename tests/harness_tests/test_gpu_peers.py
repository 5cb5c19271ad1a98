from __future__ import annotations

from collections.abc import Iterator

import pytest

from asynckv.links.fd_socket import has_fd_sockets
from asynckv.testing.blocked import until
from asynckv.testing.lookup_checks.values import MIB, noise
from harness.fake_devices import faultless_gpus
from harness.fake_gpus import FakeGpus
from harness.gpu_pairs import open_gpu_pair

WAYS = pytest.mark.parametrize(
    "theirs",
    [
        pytest.param(
            *(0,),
            marks=pytest.mark.skipif(not has_fd_sockets(), reason="no sockets here"),
        ),
        1,
    ],
)


@pytest.fixture
def gpus() -> Iterator[FakeGpus]:
    with faultless_gpus(2) as gpus:
        yield gpus


@WAYS
async def test_what_is_put_by_either_way_counts(gpus: FakeGpus, theirs: int) -> None:
    async with open_gpu_pair(gpus, theirs=theirs) as pair:
        await until(lambda: pair.is_way_open or not theirs)
        assert not pair.has_put
        key = pair.theirs.tensor(noise(MIB))
        await pair.peer.lookup.insert([1], None, key, None, None)
        assert pair.has_put and not pair.has_moved
        await pair.buffer.drop_select([1])
        await pair.emptied()


async def test_a_way_between_two_gpus_has_two_ends(gpus: FakeGpus) -> None:
    async with open_gpu_pair(gpus, theirs=1) as pair:
        await until(lambda: pair.is_way_open)
        assert pair.way is not pair.near_way and pair.near_way.is_open
        await pair.buffer.insert([1], None, noise(MIB), None, None)
        await pair.peer.lookup.drop_select([1])
        assert pair.has_moved and not pair.has_put


async def test_within_one_gpu_there_is_no_way(gpus: FakeGpus) -> None:
    async with open_gpu_pair(gpus) as pair:
        assert not pair.is_way_open
        for end in ("way", "near_way"):
            with pytest.raises(LookupError):
                getattr(pair, end)
