"""What a peer may ask for, and what digests it is told."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from asynckv.errors import RemoteProtocolError
from asynckv.links.options import Digest
from asynckv.protocol.transfer_frames import Grant, Sent
from asynckv.testing.expectations import is_same, noise
from asynckv.testing.pairs import open_pipe_pair
from asynckv.testing.pipe_checks import LARGE
from harness.fake_gpus import FakeGpus
from harness.nccl_pipe_pairs import NcclPipes, open_nccl_pipes


@pytest.fixture
async def pair(two_gpus: FakeGpus) -> AsyncIterator[NcclPipes]:
    async with open_nccl_pipes(two_gpus) as pair:
        yield pair


@pytest.mark.parametrize(
    ("ours", "theirs", "kind"),
    [
        ("auto", "auto", "full"),
        ("edges", "edges", "edges"),
        ("off", "off", "off"),
        ("off", "full", "full"),
    ],
)
async def test_the_stricter_digest_is_compared(
    two_gpus: FakeGpus,
    sent_devices: list[Sent],
    ours: Digest,
    theirs: Digest,
    kind: str,
) -> None:
    async with open_nccl_pipes(two_gpus, listens=theirs, digest=ours) as pair:
        source = noise(LARGE, 1)
        await pair.near.send_tensor(pair.ours.tensor(source))
        found = await pair.far.recv_tensor()
        assert found is not None and is_same(found, source)
    assert [frame.kind for frame in sent_devices] == [kind]
    assert bool(sent_devices[0].digest) is (kind != "off")


async def test_what_was_never_sent_is_not_granted(pair: NcclPipes) -> None:
    leaving = pair.near._outbound.leaving
    with pytest.raises(RemoteProtocolError, match="Grant for what waits"):
        leaving.on_routed_grant(Grant(99, "nccl", "off"))
    with pytest.raises(RemoteProtocolError, match="a Grant for what waits"):
        leaving.on_grant(Grant(99))


async def test_a_pipe_without_a_gpu_sends_from_none() -> None:
    async with open_pipe_pair() as (near, _):
        with pytest.raises(RemoteProtocolError, match="waits for none"):
            near._outbound.leaving.on_routed_grant(Grant(1, "nccl", "off"))
