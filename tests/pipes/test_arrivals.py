"""What lands on a GPU, and what a peer may say of it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from asynckv.errors import RemoteProtocolError
from asynckv.pipes.arrivals import Arrival
from asynckv.protocol.frames import Push
from asynckv.protocol.transfer_frames import Sent
from asynckv.testing.pipe_checks import LARGE
from asynckv.types import TensorSpec
from harness.fake_gpus import FakeGpus
from harness.nccl_pipe_pairs import NcclPipes, open_nccl_pipes


@pytest.fixture
async def pair(two_gpus: FakeGpus) -> AsyncIterator[NcclPipes]:
    async with open_nccl_pipes(two_gpus) as pair:
        yield pair


async def test_what_was_not_asked_for_does_not_come(pair: NcclPipes) -> None:
    inbound = pair.far._inbound
    with pytest.raises(RemoteProtocolError, match="never granted"):
        inbound.granting.on_routed_sent(Sent(99, 0, b"", "off", "nccl"))
    arrival = Arrival(inbound, Push(1, 0, False, TensorSpec((LARGE,), "uint8")))
    with pytest.raises(RemoteProtocolError, match="not asked for"):
        arrival.on_routed_sent(Sent(1, 0, b"", "off", "nccl"))


async def test_what_was_granted_again_may_have_been_sent_meanwhile(
    pair: NcclPipes,
) -> None:
    inbound = pair.far._inbound
    gpus = inbound.granting.gpus
    assert gpus is not None
    push = Push(1, 0, False, TensorSpec((LARGE,), "uint8"), on_gpu=True)
    arrival = Arrival(inbound, push)
    assert arrival.land_on_gpu(pair.far._link, gpus) is not None
    assert arrival.reception is not None
    arrival.reception.stop()
    arrival.let_go()
    arrival.on_routed_sent(Sent(1, 0, b"", "edges", "nccl"))
    assert arrival.land_on_gpu(pair.far._link, gpus) is None
