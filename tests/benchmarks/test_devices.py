from __future__ import annotations

import importlib.util
import sys

import pytest
import torch

import asynckv
from asynckv.cli.bench.rig import WrongBytes
from asynckv.cli.bench.server import own_child
from asynckv.devices.cupy import open_cuda
from asynckv.devices.names import Device
from asynckv.errors import GPUUnavailable
from asynckv.testing.expectations import is_same
from asynckv.transports.nccl.api import open_nccl
from benchmarks.devices import (
    TOKENS,
    DevicePair,
    DeviceRow,
    content_of,
    device_number,
    main,
    run_device_bench,
)
from harness.fake_devices import fake_device
from harness.gpu_processes import BEGIN

pytest.importorskip("uvloop").new_event_loop().close()  # its first makes a lasting pipe


@pytest.mark.parametrize(("device", "number"), [("cuda", 0), ("cuda:3", 3)])
def test_a_gpu_is_named_as_torch_names_it(device: str, number: int) -> None:
    assert device_number(device) == number


@pytest.mark.parametrize("device", ["cpu", "cuda:", "cuda:x", "cuda:-1", ""])
def test_what_is_no_gpu_is_refused(device: str) -> None:
    if device == "cuda:":
        assert device_number(device) == 0
    else:
        with pytest.raises(GPUUnavailable, match="is no GPU"):
            device_number(device)


def test_without_cupy_the_bench_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(sys, "argv", ["devices"])
    main()
    said = capsys.readouterr().out
    assert "CuPy is not installed" in said and "pip install" in said


def test_a_row_says_its_ratio() -> None:
    row = DeviceRow("gather", "GB/s", 1.5, 2.0, "copy within")
    assert row.line().endswith("1.50 GB/s copy within: 2.00, ratio 0.75")


CHILD = """
from benchmarks.devices import serve_gpu
asyncio.run(serve_gpu(open_device(), int(sys.argv[2]), int(sys.argv[3])))
"""


@pytest.mark.multiprocess
@pytest.mark.trust
async def test_two_processes_measure_every_case_but_nccl_on_a_fake_gpu() -> None:
    rows: list[DeviceRow] = []
    child = ("-c", BEGIN + CHILD, "fake", str(2**20), "4")
    with fake_device() as gpu:
        await run_device_bench(
            gpu.device, rows.append, blocks=16, ticks=20, nccl=None, child=child
        )
    assert all(row.value > 0 for row in rows)
    found = "\n".join(row.name for row in rows)
    for words in ("cuda_ipc", "by map", "by inline", "loop lag taking"):
        assert words in found


@pytest.fixture(scope="module")
def used_gpu() -> None:
    """CUDA and NCCL were used once: what they open for the process stays open."""
    cuda, nccl = open_cuda(), open_nccl()
    cuda.use_device(0)
    stream = cuda.stream()
    stream.synchronize()
    stream.close()
    nccl.open_comm(1, nccl.unique_id(), 0).destroy()


@pytest.mark.gpu
@pytest.mark.skipif(
    importlib.util.find_spec("cupy") is None, reason="CuPy is not installed"
)
async def test_every_case_has_its_row(used_gpu: None) -> None:
    rows: list[DeviceRow] = []
    await run_device_bench(Device(0), rows.append, blocks=256, ticks=200)
    assert rows[-1].name == "NCCL, to itself" and all(row.value > 0 for row in rows)


async def test_a_wrong_byte_ends_the_measurement() -> None:
    async with (
        asynckv.LookupBuffer("1MiB") as buffer,
        asynckv.serve("mem://wrong-byte", lookup=buffer) as server,
        asynckv.connect(server.url) as peer,
    ):
        for content in (content_of(4), content_of(4).flip(0)):
            await buffer.insert(TOKENS, None, content, None, None)
        with pytest.raises(WrongBytes, match="another process"):
            await DevicePair(peer, {"map": peer}, 4, 1).check()


async def test_parts_are_counted() -> None:
    async with (
        asynckv.LookupBuffer("1MiB") as buffer,
        asynckv.serve("mem://parts", lookup=buffer) as server,
        asynckv.connect(server.url) as peer,
    ):
        for _ in range(3):
            await buffer.insert(TOKENS, None, content_of(4), None, None)
        assert await DevicePair(peer, {"map": peer}, 6, 3).parts_s("map") > 0
        assert await peer.lookup.peek(TOKENS) == 0


CODE = """
from benchmarks.devices import serve_gpu
asyncio.run(serve_gpu(open_device(), 2**20, 4))
"""


def test_every_byte_of_an_entry_has_its_value() -> None:
    assert content_of(258).tolist() == [*range(256), 0, 1]


@pytest.mark.multiprocess
@pytest.mark.chaos
async def test_entries_are_there_again_whenever_they_were_taken() -> None:
    async with own_child("-c", BEGIN + CODE, "fake") as line:
        for url, nbytes in zip(line.split(), (2**20, 2**18), strict=True):
            async with asynckv.connect(url) as peer:
                for _ in range(3):
                    entry = await peer.lookup.drop_select(TOKENS)
                    assert isinstance(entry.key, torch.Tensor)
                    assert is_same(entry.key, content_of(nbytes))
