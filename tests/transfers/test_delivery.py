from __future__ import annotations

import pytest
import torch

from asynckv.errors import ChecksumError
from asynckv.protocol.frames import Offer
from asynckv.protocol.wire import digest_of
from asynckv.tensors.views import bytes_of, spec_of
from asynckv.transfers.delivery import Delivery, SmallTensors
from asynckv.transfers.layout import layout_of
from asynckv.transfers.manifest import INLINE_NBYTES, Manifest, unpack
from asynckv.transfers.queries import as_tokens
from asynckv.types import TensorSpec
from harness.bodies import body_with

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
