"""NCCL itself, on a real GPU: from it to itself. A pair needs two. ``nox -s gpu``."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
import torch

from asynckv.devices.cupy import open_cuda
from asynckv.devices.tensors import TorchTensors
from asynckv.transports.nccl.api import Comm, NcclApi, open_nccl
from asynckv.types import DTYPE_NBYTES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        importlib.util.find_spec("cupy") is None,
        reason='CuPy is not installed: pip install ".[cuda12]"',
    ),
]

_NBYTES = 48_000
_LARGE = 256 * 2**20
_DTYPES = [name for name in DTYPE_NBYTES if hasattr(torch, name)]


@pytest.fixture(scope="module")
def comm() -> Iterator[tuple[NcclApi, Comm]]:
    """A communicator of one rank."""
    torch.zeros(1, device="cuda").add_(1)  # torch starts CUDA
    open_cuda().use_device(0)
    nccl = open_nccl()
    comm = nccl.open_comm(1, nccl.unique_id(), 0)
    yield nccl, comm
    comm.destroy()


def send_to_itself(
    comm: tuple[NcclApi, Comm], here: torch.Tensor, there: torch.Tensor
) -> None:
    nccl, rank = comm
    cuda, tensors = open_cuda(), TorchTensors()
    cuda.use_device(0)
    source, target = tensors.memory_of(here), tensors.memory_of(there)
    torch.cuda.synchronize()
    stream = cuda.stream()
    nccl.group_start()
    rank.send(source.address, here.nbytes, 0, stream)
    rank.receive(target.address, there.nbytes, 0, stream)
    nccl.group_end()
    stream.synchronize()
    rank.check_async_error()
    stream.close()


@pytest.mark.parametrize("dtype", _DTYPES)
def test_every_dtype_comes_bit_for_bit(comm: tuple[NcclApi, Comm], dtype: str) -> None:
    content = torch.randint(0, 256, (_NBYTES,), dtype=torch.uint8)
    here = content.cuda().view(getattr(torch, dtype))
    there = torch.zeros(_NBYTES, dtype=torch.uint8, device="cuda").view(here.dtype)
    send_to_itself(comm, here, there)
    assert torch.equal(there.view(torch.uint8).cpu(), content)


def test_every_byte_of_much_comes(comm: tuple[NcclApi, Comm]) -> None:
    here = torch.randint(0, 256, (_LARGE + 1,), dtype=torch.uint8, device="cuda")
    there = torch.zeros_like(here)
    send_to_itself(comm, here, there)
    assert torch.equal(here, there)
