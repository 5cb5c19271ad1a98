from __future__ import annotations

import pytest
import torch

from asynckv.devices.copying import CopyPool
from asynckv.protocol.frames import Offer
from asynckv.tensors.blocks import KVBlocks, KVMemory
from asynckv.tensors.views import spec_of
from asynckv.testing.expectations import is_same
from asynckv.testing.lookup_checks.values import noise
from asynckv.transfers.delivery import (
    Delivery,
    move_to_device,
    moved_to_device,
    on_host,
)
from asynckv.transfers.layout import layout_of
from asynckv.transfers.manifest import Manifest
from harness.fake_devices import FakeDevice


def delivered(**tensors: torch.Tensor) -> Delivery:
    layout = layout_of({name: spec_of(tensor) for name, tensor in tensors.items()})
    manifest = Manifest(layout, (b"",) * len(tensors), None, None, ())
    delivery = Delivery(Offer(transfer=2, inline=False), manifest)
    delivery.tensors = dict(tensors)
    return delivery


async def test_what_came_to_the_host_is_moved_to_the_gpu(pool: CopyPool) -> None:
    delivery = delivered(key=noise(64), hidden=noise(8))
    await move_to_device(delivery, {}, pool)
    assert all(tensor.is_cuda for tensor in delivery.tensors.values())
    assert is_same(delivery.tensors["key"], noise(64))


async def test_what_has_its_place_on_the_host_stays_there(
    gpu: FakeDevice, pool: CopyPool
) -> None:
    key, hidden = noise(64), noise(8)
    delivery, into = delivered(key=key, hidden=hidden), gpu.tensor(noise(8) * 0)
    await move_to_device(delivery, {"key": key, "hidden": into}, pool)
    assert delivery.tensors["key"] is key and delivery.tensors["hidden"] is into
    assert is_same(into, hidden)


async def test_one_tensor_is_moved_alone(gpu: FakeDevice, pool: CopyPool) -> None:
    delivery = delivered(key=noise(64), hidden=noise(8))
    assert is_same(await moved_to_device(delivery, "key", {}, pool), noise(64))
    assert not delivery.tensors["hidden"].is_cuda


async def test_one_tensor_whose_place_is_on_the_host_stays_there(
    pool: CopyPool,
) -> None:
    delivery = delivered(key=noise(64))
    key = delivery.tensors["key"]
    assert await moved_to_device(delivery, "key", {"key": key}, pool) is key
    assert not key.is_cuda and is_same(key, noise(64))


async def test_a_place_that_does_not_fit_is_refused(
    gpu: FakeDevice, pool: CopyPool
) -> None:
    with pytest.raises(ValueError, match="key"):
        await move_to_device(
            delivered(key=noise(64)), {"key": gpu.tensor(noise(8))}, pool
        )


def test_only_places_of_the_host_take_bytes_from_a_socket(gpu: FakeDevice) -> None:
    there, here = gpu.tensor(noise(64).view(4, 16)), noise(8)
    places: dict[str, KVMemory] = {
        "key": there,
        "value": KVBlocks(there, [1]),
        "hidden": here,
    }
    assert on_host(places) == {"hidden": here}
