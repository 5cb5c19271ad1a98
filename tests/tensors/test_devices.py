from __future__ import annotations

import pytest
import torch

from asynckv.errors import ConfigError
from asynckv.tensors.devices import Device, device_named


def test_the_cpu_is_no_gpu() -> None:
    assert device_named(None) is device_named("cpu") is None
    assert device_named(torch.device("cpu")) is None


def test_a_name_without_a_number_is_the_gpu_of_the_rank() -> None:
    found = device_named("cuda", local_rank=3)
    assert found is not None and found.name == "cuda:3"


def test_a_rank_that_nobody_names_is_the_environments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert device_named("cuda") == Device(0)
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert device_named("cuda") == Device(2)
    assert device_named("cuda:1") == Device(1)


@pytest.mark.parametrize("rank", ["first", "-1", True, 1.5])
def test_what_is_no_rank_is_refused(rank: object) -> None:
    with pytest.raises(ConfigError, match="local_rank"):
        device_named("cuda", local_rank=rank)


def test_a_number_counts_whatever_the_rank_is() -> None:
    for name in ("cuda:1", torch.device("cuda", 1), Device(1)):
        found = device_named(name, local_rank=3)
        assert found is not None and found.index == 1


@pytest.mark.parametrize("name", ["tpu", "cuda:x", "cuda:", "cuda:-1", "mps", ""])
def test_what_is_no_device_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="unknown"):
        device_named(name)
