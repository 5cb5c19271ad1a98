from __future__ import annotations

import pytest
import torch

from asynckv.errors import ChecksumError, RemoteProtocolError
from asynckv.protocol.values import TensorRecord
from asynckv.protocol.wire import digest_of
from asynckv.tensors.views import bytes_of, spec_of
from asynckv.transfers import manifest as manifest_module
from asynckv.transfers.manifest import (
    content_digest,
    pack,
    unpack,
    verify,
    verify_inline,
)
from asynckv.transfers.queries import as_mask, as_tokens

TOKENS = as_tokens(torch.arange(5, dtype=torch.int32))
OTHERS = as_tokens(torch.arange(1, 6, dtype=torch.int32))
ROI = as_mask(torch.tensor([1, 0, 1, 1, 0], dtype=torch.bool), TOKENS)
KEY = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)


def record(name: str = "key") -> TensorRecord:
    return TensorRecord(name, spec_of(KEY), digest_of(bytes_of(KEY)))


def test_what_is_packed_comes_out_again() -> None:
    body = pack([record()], TOKENS, ROI, [bytes_of(KEY)])
    manifest = unpack(body, inline=True)
    assert manifest.specs == {"key": spec_of(KEY)}
    assert manifest.input_tokens == TOKENS
    assert manifest.roi == ROI
    assert bytes(manifest.inline[0]) == bytes(bytes_of(KEY))


def test_tokens_of_any_strides_are_packed_densely() -> None:
    manifest = unpack(pack([], as_tokens(torch.arange(10)[::3]), None), inline=False)
    assert manifest.input_tokens is not None
    assert manifest.input_tokens.tensor().tolist() == [0, 3, 6, 9]
    assert manifest.roi is None


def test_whoever_keeps_a_tensor_that_rode_along_keeps_no_long_tokens() -> None:
    tokens = as_tokens(torch.arange(1000))
    body = pack([record("key"), record("value")], tokens, None, 2 * [bytes_of(KEY)])
    pieces = unpack(body, inline=True).inline
    assert [bytes(piece) for piece in pieces] == 2 * [bytes(bytes_of(KEY))]
    kept = {len(piece.obj) for piece in pieces}  # type: ignore[arg-type]
    assert kept == {2 * len(pieces[0])}


def test_an_entry_may_have_nothing_at_all() -> None:
    manifest = unpack(pack([], None, None), inline=True)
    assert manifest.records == () and manifest.nbytes == 0


@pytest.mark.parametrize("cut", [1, 3, 4, 10, 40])
def test_a_body_that_is_cut_is_refused(cut: int) -> None:
    body = pack([record()], TOKENS, ROI, [bytes_of(KEY)])
    with pytest.raises(RemoteProtocolError):
        unpack(body[:-cut], inline=True)


def test_every_flipped_bit_is_refused_or_seen_by_the_digest() -> None:
    body = pack([record()], None, None, [bytes_of(KEY)])
    for bit in range(8 * len(body)):
        flipped = bytearray(body)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            manifest = unpack(bytes(flipped), inline=True)
            digests = verify_inline(manifest)
        except (RemoteProtocolError, ChecksumError):
            continue
        unharmed = manifest.records == (record(),)
        assert not unharmed and digests, "only names and shapes may pass, as data"


def test_a_name_may_not_come_twice() -> None:
    with pytest.raises(RemoteProtocolError, match="twice"):
        unpack(pack([record(), record()], None, None), inline=False)


def test_a_changed_byte_is_a_checksum_error() -> None:
    manifest = unpack(
        pack([record()], None, None, [memoryview(bytes(12))]), inline=True
    )
    with pytest.raises(ChecksumError, match="key"):
        verify_inline(manifest)


def test_an_empty_digest_is_not_compared() -> None:
    verify(TensorRecord("key", spec_of(KEY)), b"anything")


def test_the_digest_of_an_entry_tells_tokens_roi_names_and_bytes_apart() -> None:
    digests = {
        content_digest([record()], TOKENS, ROI),
        content_digest([record()], TOKENS, None),
        content_digest([record()], OTHERS, ROI),
        content_digest([record("value")], TOKENS, ROI),
        content_digest([], TOKENS, ROI),
        content_digest([record()], None, None),
        content_digest([TensorRecord("key", spec_of(KEY))], TOKENS, ROI),
        content_digest([TensorRecord("key", spec_of(KEY.T))], TOKENS, ROI),
        content_digest([TensorRecord("key", spec_of(KEY.half()))], TOKENS, ROI),
    }
    assert len(digests) == 9


def test_the_digest_of_an_entry_does_not_depend_on_the_order_of_its_tensors() -> None:
    both = [record("key"), record("value")]
    assert content_digest(both, TOKENS, ROI) == content_digest(both[::-1], TOKENS, ROI)


@pytest.mark.parametrize("missing", ["bfloat16", "int32", "float8_e8m0fnu"])
def test_a_dtype_that_this_torch_lacks_is_refused(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def known(name: str) -> torch.dtype:
        if name == missing:
            raise ValueError(f"{name} is unknown")
        return torch.int8

    monkeypatch.setattr(manifest_module, "MISSING_DTYPES", {missing})
    monkeypatch.setattr(manifest_module, "dtype_of", known)
    body = pack([record()], TOKENS, None)
    if missing == "float8_e8m0fnu":
        assert unpack(body, inline=False).records == (record(),)
        return
    with pytest.raises(RemoteProtocolError, match="unknown"):
        unpack(body, inline=False)
