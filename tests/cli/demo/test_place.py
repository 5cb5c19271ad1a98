from __future__ import annotations

import pytest
import torch

from asynckv.cli.demo.place import HOST, Place, check_place, place_named
from asynckv.errors import ConfigError, GPUUnavailable
from harness.fake_devices import fake_device
from harness.gpu_processes import why_not

ON_NO_GPU = pytest.mark.skipif(why_not("real") == "", reason="there is a GPU here")


def test_the_host_is_asked_for_nothing() -> None:
    assert place_named("cpu") is HOST
    assert (HOST.name, HOST.describe(), HOST.is_gpu) == ("cpu", "cpu", False)
    HOST.settle()


def test_a_gpu_is_the_one_of_its_number_or_of_the_local_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert place_named("cuda:2").name == "cuda:2"
    monkeypatch.setenv("LOCAL_RANK", "1")
    place = place_named("cuda")
    assert (place.name, place.computes_on, place.is_gpu) == ("cuda:1", "cuda:1", True)


@pytest.mark.parametrize("name", ["tpu", "cuda:", "0"])
def test_another_device_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="is unknown"):
        place_named(name)


async def test_a_gpu_that_is_there_is_good_enough() -> None:
    with fake_device() as gpu:
        await check_place(Place("cpu", gpu.device))
    await check_place(HOST)


@ON_NO_GPU
async def test_a_gpu_that_is_not_there_is_told() -> None:
    assert not torch.cuda.is_available()
    with pytest.raises(GPUUnavailable):
        await check_place(place_named("cuda"))
