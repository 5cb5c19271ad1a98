from __future__ import annotations

import asyncio

import pytest

from asynckv.buffers.serve import serve
from asynckv.buffers.store import StoreBuffer
from asynckv.config import KVTransferConfig
from asynckv.connectors.engine import KVEngine
from asynckv.connectors.peers import PeerLine
from asynckv.connectors.store_line import StoreLine
from asynckv.errors import ConfigError, GPUFailed, GPUUnavailable
from asynckv.testing.expectations import is_same
from asynckv.testing.fake_devices import fake_device
from asynckv.testing.lookup_checks.values import MIB, noise

ENGINE = KVEngine(engine_id="E", block_size=4)


def config_of(**extra: object) -> KVTransferConfig:
    return KVTransferConfig(kv_role="kv_both", kv_connector_extra_config=extra)


async def test_the_configured_store_is_dialled_when_it_is_needed() -> None:
    line = StoreLine(
        config_of(store="mem://line", fingerprint="toy"), ENGINE, None, "0"
    )
    async with StoreBuffer() as store, serve("mem://line", store=store):
        assert await (await line.store()).contains(["a"]) == (False,)
        await line.aclose()


async def test_a_store_that_is_given_is_used_and_left_open() -> None:
    async with StoreBuffer() as store:
        line = StoreLine(config_of(), ENGINE, store, "0")
        assert await line.store() is store
        await line.aclose()
        line.abort()
        assert await store.contains([]) == ()


async def test_values_land_where_it_was_last_said() -> None:
    config = config_of(store="mem://gpu-line", fingerprint="toy")
    async with StoreBuffer(fingerprint="toy") as store:
        with fake_device() as gpu:
            line = StoreLine(config, ENGINE, None, "0")
            line.use_gpu(gpu.device, 2 * MIB, 0)
            async with serve("mem://gpu-line", store=store):
                await store.put("a", noise(MIB))
                there = await (await line.store()).get("a")
                assert there is not None and there.is_cuda
                assert is_same(there.cpu(), noise(MIB))
                del there
                await line.aclose()
            assert not gpu.process.owned


@pytest.mark.parametrize("kind", [GPUFailed, GPUUnavailable])
async def test_where_a_gpu_has_no_memory_values_come_to_the_host(
    kind: type[GPUFailed | GPUUnavailable],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def malloc(nbytes: int) -> int:
        raise kind(f"no {nbytes} bytes")

    config = config_of(store="mem://full-gpu", fingerprint="toy")
    async with StoreBuffer(fingerprint="toy") as store:
        with fake_device() as gpu:
            monkeypatch.setattr(gpu.process.cuda, "malloc", malloc)
            line = StoreLine(config, ENGINE, None, "0")
            line.use_gpu(gpu.device, 2 * MIB, 0)
            async with serve("mem://full-gpu", store=store):
                one, two = await asyncio.gather(line.store(), line.store())
                await one.put("a", noise(MIB))
                there = await one.get("a")
                assert one is two and there is not None and not there.is_cuda
                assert is_same(there, noise(MIB))
                assert caplog.text.count("no memory of cuda:0") == 1
                await line.aclose()
            assert not gpu.process.owned


async def test_what_leaves_has_its_share_of_what_there_is() -> None:
    config = config_of(store="mem://shares", fingerprint="toy")
    async with StoreBuffer(fingerprint="toy") as store:
        with fake_device() as gpu:
            line = StoreLine(config, ENGINE, None, "0")
            line.use_gpu(gpu.device, 2 * MIB, MIB)
            assert line.landing == "cuda:0"
            async with serve("mem://shares", store=store):
                await line.store()
                assert (line.landing, line.leaving_bytes) == ("cuda:0", MIB)
                assert line.staging is None  # nothing leads to a GPU
                await line.aclose()
            assert not line.leaving_bytes
        async with StoreBuffer() as given:
            of_given = StoreLine(config, ENGINE, given, "0")
            of_given.use_gpu(gpu.device, MIB, MIB)
            assert of_given.staging is None and of_given.leaving_bytes == MIB


async def test_an_error_of_a_gpu_that_is_not_the_landings_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def peer(self: PeerLine) -> None:
        raise GPUFailed("no")

    monkeypatch.setattr(PeerLine, "peer", peer)
    line = StoreLine(
        config_of(store="mem://line", fingerprint="toy"), ENGINE, None, "0"
    )
    with pytest.raises(GPUFailed):
        await line.store()


def test_without_a_store_there_is_no_connector() -> None:
    with pytest.raises(ConfigError, match=r"extra_config\.store"):
        StoreLine(config_of(), ENGINE, None, "0")


def test_a_store_of_blocks_of_nobody_knows_which_model_is_not_used() -> None:
    with pytest.raises(ConfigError, match=r"extra_config\.fingerprint"):
        StoreLine(config_of(store="mem://line"), ENGINE, None, "0")
