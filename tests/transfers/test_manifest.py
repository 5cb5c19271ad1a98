from __future__ import annotations

from collections.abc import Mapping

import msgspec
import pytest
import torch

from asynckv.errors import ChecksumError, RemoteProtocolError
from asynckv.protocol.wire import digest_of
from asynckv.tensors.blocks import KVMemory
from asynckv.tensors.views import bytes_of, spec_of
from asynckv.transfers import manifest as manifest_module
from asynckv.transfers.manifest import (
    Layout,
    check_names,
    content_digest,
    flatten,
    layout_of,
    names_in,
    pack,
    read_layout,
    unflatten,
    unpack,
    verify,
    verify_inline,
)
from asynckv.transfers.tokens import as_mask, as_tokens
from asynckv.types import TensorSpec

ONE = torch.ones(1)


def tensors_in(named: Mapping[str, KVMemory]) -> list[tuple[str, torch.Tensor]]:
    return [(n, one) for n, one in named.items() if isinstance(one, torch.Tensor)]


def test_fields_come_back_from_their_names() -> None:
    key, value = {"0": torch.zeros(1), "a.key": torch.zeros(2)}, torch.zeros(3)
    named = flatten(key, value, ONE, {"x.key": torch.zeros(4)})
    assert list(named) == ["0.key", "a.key.key", "value", "hidden", "extras.x.key"]
    fields = unflatten([*tensors_in(named), ("from a later version", ONE)])
    assert isinstance(fields[0], Mapping)
    assert list(fields[0]) == ["0", "a.key"]
    assert fields[1] is value
    assert fields[2] is ONE
    assert list(fields[3]) == ["x.key"]


def test_a_layered_value_comes_back_too() -> None:
    values = {"0": torch.zeros(1), "1": ONE}
    assert unflatten(tensors_in(flatten(ONE, values, None, None))) == (
        ONE,
        values,
        None,
        {},
    )


def test_nothing_is_an_entry_too() -> None:
    assert flatten(None, None, None, None) == {}
    assert unflatten([]) == (None, None, None, {})


@pytest.mark.parametrize("layer", ["extras", "extras.a", ""])
def test_a_layer_that_cannot_be_told_from_the_extras_is_refused(layer: str) -> None:
    with pytest.raises(ValueError, match="extras|no tensor's name"):
        flatten({layer: ONE}, None, None, None)


def test_a_layer_called_by_a_number_is_refused() -> None:
    with pytest.raises(TypeError, match="write '0'"):
        flatten({0: ONE}, None, None, None)  # type: ignore[dict-item]


def test_what_is_no_tensor_is_refused() -> None:
    with pytest.raises(TypeError, match=r"hidden is a list.*pass a torch tensor"):
        flatten(None, None, [1], None)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["keys", ".key", "0.hidden", "a" * 513, ""])
def test_names_that_no_entry_has_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="name"):
        check_names([name])


@pytest.mark.parametrize("name", ["extras.{}", "{}.value"])
def test_a_name_is_not_longer_than_512_characters(name: str) -> None:
    most = "a" * (512 - len(name.format("")))
    check_names([name.format(most)])
    with pytest.raises(ValueError, match="longer than 512"):
        check_names([name.format(most + "a")])


def test_an_entry_has_only_so_many_tensors() -> None:
    with pytest.raises(ValueError, match="at most 16384"):
        check_names(f"{layer}.key" for layer in range(16385))


def test_a_field_is_whole_or_one_a_layer() -> None:
    with pytest.raises(ValueError, match="not both"):
        check_names(["key", "0.key"])
    check_names(["key", "0.value", "extras.key"])


SPEC = TensorSpec((2, 3), "bfloat16")


def encoded(*names: str) -> bytes:
    return msgspec.msgpack.encode([(name, SPEC) for name in names])


def test_a_layout_is_read_as_it_was_made() -> None:
    made = layout_of({"1.key": SPEC, "0.key": TensorSpec((5,), "uint8")})
    assert read_layout(made.encoded) == made
    assert (made.sizes, made.nbytes, made.by_name) == ((12, 5), 17, (1, 0))


def test_the_same_layout_is_made_and_read_once() -> None:
    assert layout_of({"key": SPEC}) is layout_of({"key": SPEC})
    assert read_layout(encoded("key")) is read_layout(encoded("key"))
    layers = encoded(*(f"{layer}.key" for layer in range(64)))
    assert read_layout(layers) is read_layout(layers)


def test_the_layout_of_a_model_of_eighty_layers_is_read_once() -> None:
    spec = TensorSpec((16, 8, 128), "bfloat16")
    prefixes = [f"model.layers.{layer}.self_attn.attn" for layer in range(80)]
    named = [(f"{p}.{field}", spec) for p in prefixes for field in ("key", "value")]
    layers = msgspec.msgpack.encode(named)
    assert read_layout(layers) is read_layout(layers)


def test_only_the_last_few_layouts_that_were_made_here_are_kept() -> None:
    kept = layout_of({"0.key": SPEC})
    for other in range(1, 16):
        layout_of({f"{other}.key": SPEC})
    assert layout_of({"0.key": SPEC}) is kept
    for other in range(1, 17):
        layout_of({f"{other}.key": SPEC})
    assert layout_of({"0.key": SPEC}) is not kept


def test_a_peer_cannot_make_us_keep_many_layouts_nor_a_very_long_one() -> None:
    first, many = encoded("0.key"), encoded(*(f"{n}.key" for n in range(1000)))
    kept = read_layout(first)
    for other in range(1, 65):
        read_layout(encoded(f"{other}.key"))
    assert read_layout(first) is not kept and read_layout(first) == kept
    assert read_layout(many) is not read_layout(many)


@pytest.mark.parametrize(
    ("hostile", "why"),
    [
        (encoded("key", "key"), "twice"),
        (encoded("a name"), "no tensor's name"),
        (encoded("key", "0.key"), "not both"),
        (msgspec.msgpack.encode([("key", ((2**49,), "uint8"))]), "cannot be sent"),
        (msgspec.msgpack.encode([("key", ((1,), "text"))]), "cannot be sent"),
        (msgspec.msgpack.encode([("key", ((-1,), "uint8"))]), "negative"),
        (encoded("key")[:-1], "truncated"),
    ],
)
def test_what_is_no_layout_is_refused_each_time(hostile: bytes, why: str) -> None:
    for _ in range(2):
        with pytest.raises((ValueError, msgspec.MsgspecError), match=why):
            read_layout(hostile)


def test_a_layout_that_was_written_in_another_way_goes_on_as_ours() -> None:
    longer = encoded("key").replace(b"\x92\x02\x03", b"\x92\xcc\x02\xcc\x03")
    assert read_layout(longer) == read_layout(encoded("key"))


def test_nobody_changes_a_layout_that_others_share() -> None:
    specs = {"key": SPEC}
    layout = layout_of(specs)
    specs.clear()
    with pytest.raises(TypeError):
        layout.specs["value"] = SPEC  # type: ignore[index]
    assert [*layout.specs] == ["key"]


def test_a_message_names_some_tensors_and_counts_the_others() -> None:
    assert names_in(["key", "value"]) == "key, value" and not names_in([])
    many = names_in([f"layer.{i}.key" for i in range(2_000)])
    assert many.endswith("layer.15.key and 1,984 more")


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

    monkeypatch.setattr(manifest_module, "MISSING_DTYPES", {missing})
    monkeypatch.setattr(manifest_module, "dtype_of", known)
    unknown = layout_of({f"extras.{missing}": spec_of(KEY)})  # known to no other test
    body = pack(unknown, DIGESTS, TOKENS, None)
    if missing == "float8_e8m0fnu":
        assert unpack(body, inline=False).layout == unknown
        return
    with pytest.raises(RemoteProtocolError, match="unknown"):
        unpack(body, inline=False)
