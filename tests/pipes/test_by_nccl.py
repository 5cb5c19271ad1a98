"""Pipes between two GPUs: what is sent on one is received on the other by NCCL."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import torch

from asynckv.errors import PeerLost, RemoteProtocolError
from asynckv.links.options import Digest
from asynckv.protocol.frames import Push
from asynckv.protocol.transfer_frames import Grant, Sent
from asynckv.testing.expectations import is_same, noise
from asynckv.testing.pipe_checks import LARGE, PIPE_BYTES
from asynckv.types import TensorSpec
from harness.fake_gpus import FakeGpus
from harness.nccl_pipe_pairs import NcclPipes, open_nccl_pipes

ODD = LARGE + 12_345
SEEDS = (0, *(pytest.param(seed, marks=pytest.mark.trust) for seed in (1, 2)))
SIZES = (64, LARGE, ODD, 2 * PIPE_BYTES)


@pytest.fixture
async def pair(two_gpus: FakeGpus) -> AsyncIterator[NcclPipes]:
    async with open_nccl_pipes(two_gpus) as pair:
        yield pair


async def test_a_tensor_goes_from_gpu_to_gpu(pair: NcclPipes) -> None:
    await pair.near.send_tensor(pair.ours.tensor(noise(LARGE, 1)))
    found = await pair.far.recv_tensor()
    assert found is not None and found.device == torch.device("cuda", 1)
    assert is_same(found, noise(LARGE, 1)) and pair.moved


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.bool])
async def test_any_dtype_and_any_strides_go_from_gpu_to_gpu(
    pair: NcclPipes, dtype: torch.dtype
) -> None:
    tensor = (noise(2 * LARGE, 1) % 2).view(512, -1).to(dtype)
    await pair.near.send_tensor(pair.ours.tensor(tensor))
    found = await pair.far.recv_tensor()
    assert found is not None and found.shape == tensor.shape
    assert found.dtype == dtype and is_same(found, tensor) and pair.moved


async def test_what_does_not_fit_stays_in_the_stream(pair: NcclPipes) -> None:
    await pair.near.send_tensor(pair.ours.tensor(noise(LARGE, 1)))
    with pytest.raises(ValueError, match="the tensor is"):
        await pair.far.recv_tensor(torch.zeros(3, dtype=torch.uint8))
    found = await pair.far.recv_tensor()
    assert found is not None and is_same(found, noise(LARGE, 1))


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
    for route in ("nccl", "link"):
        with pytest.raises(RemoteProtocolError, match="never offered"):
            pair.near._outbound.on_grant(Grant(99, route, "off"))


async def test_what_was_not_asked_for_does_not_come(pair: NcclPipes) -> None:
    inbound = pair.far._inbound
    with pytest.raises(RemoteProtocolError, match="no Sent belongs here"):
        inbound.granting.on_sent(Sent(99, 0, b"", "off", "nccl"))


async def test_what_is_granted_again_may_have_been_sent_meanwhile(
    pair: NcclPipes,
) -> None:
    inbound, transfer = pair.far._inbound, pair.near._link.new_transfer()
    push = Push(transfer, spec=TensorSpec((LARGE,), "uint8"), on_gpu=True)
    inbound.on_push(push, b"")
    pair.far_way._stalled(PeerLost("a test"))
    inbound.granting.on_sent(Sent(transfer, 0, b"", "full", "nccl"))
    assert pair.far._link.is_open
