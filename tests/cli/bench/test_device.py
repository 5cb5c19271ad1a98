from __future__ import annotations

import importlib.util
import sys

import pytest

from asynckv.cli.bench.command import bench
from asynckv.cli.bench.device import DeviceRow, device_number, run_device_bench
from asynckv.devices.cupy import open_cuda
from asynckv.devices.names import Device
from asynckv.errors import GPUUnavailable
from asynckv.transports.nccl.api import open_nccl
from harness.fake_devices import fake_device
from harness.gpu_processes import BEGIN


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
    assert bench(device="cuda", loop="asyncio") == 1
    said = capsys.readouterr().out
    assert "CuPy is not installed" in said and "pip install" in said


def test_a_row_says_its_ratio() -> None:
    row = DeviceRow("gather", "GB/s", 1.5, 2.0, "copy within")
    assert row.line().endswith("1.50 GB/s copy within: 2.00, ratio 0.75")


CHILD = """
from asynckv.cli.bench.device_server import serve_gpu
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
