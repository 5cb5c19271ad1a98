from __future__ import annotations

import pytest
import torch

from asynckv.errors import ChecksumError, RemoteProtocolError
from asynckv.protocol.wire import digest_of
from asynckv.tensors.views import bytes_of, spec_of
from asynckv.transfers import layout as layout_module
from asynckv.transfers.layout import Layout, layout_of
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


KEYS = [bytes_of(KEY)]
DIGESTS = [digest_of(bytes_of(KEY))]


def layout(*names: str) -> Layout:
    return layout_of(dict.fromkeys(names or ["key"], spec_of(KEY)))


def test_what_is_packed_comes_out_again() -> None:
    body = pack(layout(), DIGESTS, TOKENS, ROI, KEYS)
    manifest = unpack(body, inline=True)
    assert manifest.layout.specs == {"key": spec_of(KEY)}
    assert manifest.input_tokens == TOKENS
    assert manifest.roi == ROI
    assert bytes(manifest.inline[0]) == bytes(bytes_of(KEY))


def test_tokens_of_any_strides_are_packed_densely() -> None:
    manifest = unpack(
        pack(layout_of({}), [], as_tokens(torch.arange(10)[::3]), None), inline=False
    )
    assert manifest.input_tokens is not None
    assert manifest.input_tokens.tensor().tolist() == [0, 3, 6, 9]
    assert manifest.roi is None


def test_whoever_keeps_a_tensor_that_rode_along_keeps_no_long_tokens() -> None:
    tokens = as_tokens(torch.arange(1000))
    body = pack(layout("key", "value"), 2 * DIGESTS, tokens, None, 2 * KEYS)
    pieces = unpack(body, inline=True).inline
    assert [bytes(piece) for piece in pieces] == [bytes(key) for key in 2 * KEYS]
    kept = {len(piece.obj) for piece in pieces}  # type: ignore[arg-type]
    assert kept == {2 * len(pieces[0])}


def test_an_entry_may_have_nothing_at_all() -> None:
    manifest = unpack(pack(layout_of({}), [], None, None), inline=True)
    assert manifest.digests == () and manifest.layout.nbytes == 0


@pytest.mark.parametrize("cut", [1, 3, 4, 10, 40])
def test_a_body_that_is_cut_is_refused(cut: int) -> None:
    body = pack(layout(), DIGESTS, TOKENS, ROI, KEYS)
    with pytest.raises(RemoteProtocolError):
        unpack(body[:-cut], inline=True)


def test_every_flipped_bit_is_refused_or_seen_by_the_digest() -> None:
    body = pack(layout(), DIGESTS, None, None, KEYS)
    for bit in range(8 * len(body)):
        flipped = bytearray(body)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            manifest = unpack(bytes(flipped), inline=True)
            digests = verify_inline(manifest)
        except (RemoteProtocolError, ChecksumError):
            continue
        unharmed = manifest.layout == layout() and [*manifest.digests] == DIGESTS
        assert not unharmed and digests, "only names and shapes may pass, as data"


@pytest.mark.parametrize("digests", [[], 2 * DIGESTS])
def test_each_tensor_has_one_digest(digests: list[bytes]) -> None:
    with pytest.raises(RemoteProtocolError, match="digests for 1 tensors"):
        unpack(pack(layout(), digests, None, None), inline=False)


def test_a_layout_that_is_none_is_refused_each_time() -> None:
    body = pack(layout("a tensor"), DIGESTS, None, None)
    for _ in range(2):
        with pytest.raises(RemoteProtocolError, match="no tensor's name"):
            unpack(body, inline=False)


def test_a_changed_byte_is_a_checksum_error() -> None:
    manifest = unpack(
        pack(layout(), DIGESTS, None, None, [memoryview(bytes(12))]), inline=True
    )
    with pytest.raises(ChecksumError, match="key"):
        verify_inline(manifest)


def test_an_empty_digest_is_not_compared() -> None:
    verify("key", b"", b"anything")


def test_the_digest_of_an_entry_tells_tokens_roi_names_and_bytes_apart() -> None:
    digests = {
        content_digest(layout(), DIGESTS, TOKENS, ROI),
        content_digest(layout(), DIGESTS, TOKENS, None),
        content_digest(layout(), DIGESTS, OTHERS, ROI),
        content_digest(layout("value"), DIGESTS, TOKENS, ROI),
        content_digest(layout_of({}), [], TOKENS, ROI),
        content_digest(layout(), DIGESTS, None, None),
        content_digest(layout(), [b""], TOKENS, ROI),
        content_digest(layout_of({"key": spec_of(KEY.T)}), DIGESTS, TOKENS, ROI),
        content_digest(layout_of({"key": spec_of(KEY.half())}), DIGESTS, TOKENS, ROI),
    }
    assert len(digests) == 9


def test_the_digest_of_an_entry_does_not_depend_on_the_order_of_its_tensors() -> None:
    there = layout("key", "value", "hidden"), [b"k", b"v", b"h"], TOKENS, ROI
    other_way = layout("value", "hidden", "key"), [b"v", b"h", b"k"], TOKENS, ROI
    assert content_digest(*there) == content_digest(*other_way)
    swapped = layout("value", "hidden", "key"), [b"k", b"v", b"h"], TOKENS, ROI
    assert content_digest(*there) != content_digest(*swapped)


@pytest.mark.parametrize("missing", ["bfloat16", "int32", "float8_e8m0fnu"])
def test_a_dtype_that_this_torch_lacks_is_refused(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def known(name: str) -> torch.dtype:
        if name == missing:
            raise ValueError(f"{name} is unknown")
        return torch.int8

    monkeypatch.setattr(layout_module, "MISSING_DTYPES", {missing})
    monkeypatch.setattr(layout_module, "dtype_of", known)
    unknown = layout_of({f"extras.{missing}": spec_of(KEY)})  # known to no other test
    body = pack(unknown, DIGESTS, TOKENS, None)
    if missing == "float8_e8m0fnu":
        assert unpack(body, inline=False).layout == unknown
        return
    with pytest.raises(RemoteProtocolError, match="unknown"):
        unpack(body, inline=False)
