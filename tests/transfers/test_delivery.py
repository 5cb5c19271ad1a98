from __future__ import annotations

import asyncio

import pytest
import torch

from asynckv.devices.copying import CopyPool
from asynckv.devices.growth import Growth
from asynckv.errors import ChecksumError, EntryTooLarge
from asynckv.protocol.frames import Offer
from asynckv.protocol.wire import digest_of
from asynckv.tensors.blocks import KVBlocks, KVMemory
from asynckv.tensors.slabs import has_slabs
from asynckv.tensors.views import bytes_of, spec_of
from asynckv.testing.expectations import is_same
from asynckv.testing.lookup_checks.values import noise
from asynckv.transfers.delivery import (
    Delivery,
    ReceiveBudget,
    SmallTensors,
    move_to_device,
    moved_to_device,
    on_host,
)
from asynckv.transfers.manifest import INLINE_NBYTES, Manifest, layout_of, unpack
from asynckv.transfers.tokens import as_tokens
from asynckv.types import TensorSpec
from harness.fake_devices import FakeDevice
from harness.raw_inserts import body_with

KEY, HIDDEN = torch.arange(6.0).reshape(2, 3), torch.tensor([7])


def inline_offer(*, digest: bytes | None = None, complete: bool = True) -> Delivery:
    named = {"key": KEY, "hidden": HIDDEN}
    specs = {name: spec_of(tensor) for name, tensor in named.items()}
    pieces = [bytes_of(tensor) for tensor in named.values()]
    digests = [digest or digest_of(piece) for piece in pieces]
    body = body_with(specs, pieces, digests=digests, tokens=as_tokens([1, 2]))
    manifest = unpack(body, inline=True)
    offer = Offer(
        transfer=2, inline=True, entry_id="it", matched_tokens=2, complete=complete
    )
    return Delivery(offer, manifest)


def large_offer(nbytes: int) -> Delivery:
    body = body_with({"key": TensorSpec((nbytes,), "uint8")})
    manifest = unpack(body, inline=False)
    return Delivery(Offer(transfer=2, inline=False), manifest)


def test_what_rode_along_becomes_an_entry() -> None:
    delivery = inline_offer()
    delivery.read_inline({})
    assert delivery.is_whole and delivery.is_small
    entry = delivery.entry()
    assert torch.equal(entry.key, KEY)  # type: ignore[arg-type]
    assert entry.hidden is not None and entry.hidden.tolist() == [7]
    assert entry.input_tokens is not None and entry.input_tokens.tolist() == [1, 2]
    assert (entry.entry_id, entry.matched_tokens, entry.roi) == ("it", 2, None)


def test_what_rode_along_lands_in_the_memory_of_the_caller() -> None:
    delivery, into = inline_offer(), {"key": torch.zeros(2, 3)}
    delivery.read_inline(into)
    assert delivery.entry().key is into["key"] and torch.equal(into["key"], KEY)


def test_changed_bytes_do_not_land_in_the_memory_of_the_caller() -> None:
    into = {"key": torch.zeros(2, 3)}
    with pytest.raises(ChecksumError):
        inline_offer(digest=b"wrong").read_inline(into)
    assert not into["key"].any()


def test_memory_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="no such tensor"):
        inline_offer().read_inline({"value": torch.zeros(2, 3)})
    with pytest.raises(ValueError, match="the tensor is"):
        large_offer(10).own_nbytes({"key": torch.zeros(2, 3)})


def test_an_entry_that_is_not_committed_is_not_whole() -> None:
    delivery = inline_offer(complete=False)
    delivery.read_inline({})
    assert not delivery.is_whole
    delivery.has_completed = True
    assert delivery.is_whole


def test_only_what_is_lent_by_nobody_needs_memory_of_its_own() -> None:
    delivery = large_offer(10)
    assert delivery.own_nbytes({}) == 10
    lent = {"key": torch.zeros(10, dtype=torch.uint8)}
    assert delivery.own_nbytes(lent) == 0


def test_an_entry_has_its_tensors_in_the_order_of_its_insert() -> None:
    names = ("0.key", "1.key")
    layout = layout_of(dict.fromkeys(names, TensorSpec((1,), "uint8")))
    manifest = Manifest(layout, (b"", b""), None, None, ())
    delivery = Delivery(Offer(transfer=2, inline=False), manifest)
    for name in reversed(names):  # as they may have come
        delivery.tensors[name] = torch.zeros(1, dtype=torch.uint8)
    key = delivery.entry().key
    assert isinstance(key, dict) and [*key] == ["0", "1"]


def test_up_to_64_kib_is_small_however_it_comes() -> None:
    assert large_offer(INLINE_NBYTES).is_small
    assert not large_offer(INLINE_NBYTES + 1).is_small


def test_a_delivery_shows_no_token_and_no_tensor() -> None:
    delivery = inline_offer()
    delivery.read_inline({})
    assert repr(delivery) == "<Delivery 2 of 32 bytes>"


def test_each_small_tensor_has_memory_of_its_own() -> None:
    small, spec = SmallTensors(), TensorSpec((2, 2), "int16")
    found = list[torch.Tensor]()
    for number in range(3):
        small.prepare()
        found += [small.tensor(bytes([number, 0] * 4), spec) for _ in range(2)]
    for at, tensor in enumerate(found):
        assert torch.equal(tensor, torch.full((2, 2), at // 2, dtype=torch.int16))
    assert len({tensor.data_ptr() for tensor in found}) == len(found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e5m2])
def test_small_tensors_of_the_dtypes_of_kv_caches_are_what_came(
    dtype: torch.dtype,
) -> None:
    tensor = torch.tensor([[1.5, -0.25], [0.0, 3.0]]).to(dtype)
    small, piece = SmallTensors(), bytes(bytes_of(tensor))
    for _ in range(3):
        found = small.tensor(piece, spec_of(tensor))
        assert found.dtype == dtype and bytes(bytes_of(found)) == piece
        small.prepare()


def test_small_tensors_of_every_shape_are_what_came() -> None:
    small = SmallTensors()
    shapes = [(), (0,), (3,), (1, 2), *((n,) for n in range(4, 20))]
    for _ in range(2):
        for shape in shapes:
            small.prepare()
            piece = bytes(range(TensorSpec(shape, "uint8").nbytes))
            tensor = small.tensor(piece, TensorSpec(shape, "uint8"))
            assert tensor.shape == shape and bytes(tensor.flatten().tolist()) == piece


@pytest.mark.parametrize("shape", [(2,), (3,)])
def test_a_prepared_tensor_takes_no_piece_of_another_length(shape: tuple[int]) -> None:
    small, spec = SmallTensors(), TensorSpec(shape, "uint8")
    small.tensor(bytes(spec.nbytes), spec)
    small.prepare()
    with pytest.raises(ValueError, match="."):
        small.tensor(bytes(5), spec)


async def started(budget: ReceiveBudget, nbytes: int) -> asyncio.Task[None]:
    task = asyncio.create_task(budget.reserve(nbytes))
    await asyncio.sleep(0)
    return task


async def test_what_exceeds_the_bound_is_refused_at_once() -> None:
    with pytest.raises(EntryTooLarge, match="11 bytes"):
        await ReceiveBudget(10).reserve(11)


async def test_it_waits_for_the_memory_that_comes_back() -> None:
    memory = Growth(2**20)
    budget = ReceiveBudget(2**20, memory)
    await budget.reserve(2**20)
    tensor = budget.empty(TensorSpec((2**20,), "uint8"))
    assert memory.arena.handed_out_bytes == (2**20 if has_slabs() else 0)
    budget.release(2**20)
    del tensor
    await memory.aclose()


async def test_who_is_cancelled_while_a_slab_comes_leaves_no_trace() -> None:
    budget = ReceiveBudget(2**20)
    reserving = await started(budget, 2**20)
    reserving.cancel()
    await asyncio.wait({reserving})
    assert reserving.cancelled() is has_slabs()
    assert budget.used_bytes == (0 if has_slabs() else 2**20)


async def test_bytes_are_given_first_come_first_served() -> None:
    budget = ReceiveBudget(10)
    await budget.reserve(8)
    large, small = await started(budget, 9), await started(budget, 1)
    budget.release(7)
    assert not large.done() and not small.done()
    budget.release(1)
    await asyncio.gather(large, small)
    assert budget.used_bytes == 10


async def test_a_cancelled_wait_leaves_no_trace_and_lets_others_pass() -> None:
    budget = ReceiveBudget(10)
    await budget.reserve(8)
    large, small = await started(budget, 9), await started(budget, 1)
    large.cancel()
    await asyncio.wait({large, small})
    assert large.cancelled() and budget.used_bytes == 9


async def test_a_wait_cancelled_in_the_tick_of_its_turn_gives_the_bytes_back() -> None:
    budget = ReceiveBudget(10)
    await budget.reserve(8)
    waiting = await started(budget, 9)
    budget.release(8)
    waiting.cancel()
    await asyncio.wait({waiting})
    assert waiting.cancelled() and budget.used_bytes == 0


async def test_a_wait_is_logged_with_its_bytes_and_the_bound(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("DEBUG", "asynckv.observability.waits")
    budget = ReceiveBudget(10)
    await budget.reserve(8)
    waiting = await started(budget, 9)
    assert "a delivery of 9 bytes waits for room" in caplog.text
    assert "receive bound of 10 bytes" in caplog.text
    budget.release(8)
    await waiting


async def test_room_passes_the_first_in_line_if_it_is_cancelled_then() -> None:
    budget = ReceiveBudget(10)
    await budget.reserve(10)
    first, second = await started(budget, 4), await started(budget, 7)
    first.cancel()
    budget.release(10)  # in the same tick: nobody in the line has run since
    await asyncio.wait({first, second})
    assert first.cancelled() and budget.used_bytes == 7


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
