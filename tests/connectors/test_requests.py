from __future__ import annotations

from typing import Any

import msgspec
import pytest

from asynckv.abc import KVRequest
from asynckv.config import KVTransferConfig
from asynckv.connectors.engine import KVEngine
from asynckv.connectors.options import ConnectorOptions
from asynckv.connectors.requests import (
    LoadRequest,
    P2PMetadata,
    P2PParams,
    P2PRequest,
    SampledPrompts,
    SaveRequest,
    StoreMetadata,
    StorePart,
    StoreRequest,
)
from harness.engines.toy_model import ToyModel
from harness.engines.toy_pairs import toy_shape

PREFILLED = {"do_remote_prefill": True, "transfer_id": "t"}


def read(params: dict[Any, Any] | None, **options: object) -> P2PRequest:
    options = {"direction": "pull", "peers": {"P": "tcp://127.0.0.1:1"}, **options}
    config = KVTransferConfig(kv_role="kv_both", kv_connector_extra_config=options)
    known = P2PRequest(KVRequest("r", tuple(range(10)), params))
    engine = KVEngine(engine_id="E", block_size=4)
    P2PParams(engine, ConnectorOptions.of(config)).read(known)
    return known


def test_what_was_prefilled_elsewhere_is_to_be_loaded_from_there() -> None:
    known = read({**PREFILLED, "num_tokens": 7})
    assert (known.is_to_load, known.is_to_save) == (True, False)
    assert (known.transfer_id, known.peer, known.num_tokens) == ("t", "P", 7)


def test_what_is_decoded_elsewhere_is_to_be_saved_under_a_name_of_its_own() -> None:
    one, other = (read({"do_remote_decode": True}) for _ in range(2))
    assert one.is_to_save and not one.is_to_load
    assert one.transfer_id and one.transfer_id != other.transfer_id


def test_a_request_that_says_nothing_has_no_transfer() -> None:
    for known in (read(None), read({})):
        assert not known.is_to_load and not known.is_to_save


def test_who_pushes_is_not_dialled_and_may_have_any_name() -> None:
    assert read({**PREFILLED, "peer": "Q"}, direction="push").peer == "Q"
    with pytest.raises(ValueError, match="none of the 1 configured peers"):
        read({**PREFILLED, "peer": "Q"})


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("\ud800", PREFILLED),  # no text that could be encoded: it raises a ValueError
        ("r", {**PREFILLED, "peer": "\n"}),
        ("r", {"do_remote_prefill": True}),
        ("r", {"do_remote_decode": True}),
    ],
)
def test_a_request_whose_transfer_is_none_is_neither_loaded_nor_saved(
    name: str, given: dict[str, object]
) -> None:
    known = P2PRequest(KVRequest(name, (1, 2), given))
    options = ConnectorOptions.of(KVTransferConfig(kv_role="kv_both"))
    params = P2PParams(KVEngine(engine_id="E", block_size=4), options)
    with pytest.raises(ValueError):
        params.read(known)
    assert not known.is_to_load and not known.is_to_save


def test_a_peer_that_cannot_have_its_ranks_is_not_loaded_from() -> None:
    peers = {"P": ["mem://a", "mem://b", "mem://c"]}
    config = KVTransferConfig(
        kv_role="kv_both", kv_connector_extra_config={"peers": peers}
    )
    shape = toy_shape(ToyModel())
    engine = KVEngine(engine_id="E", block_size=shape.block_size, shape=shape)
    known = P2PRequest(KVRequest("r", (1, 2), PREFILLED))
    with pytest.raises(ValueError, match="cannot be divided over tp_size=3"):
        P2PParams(engine, ConnectorOptions.of(config)).read(known)
    assert not known.is_to_load


def test_what_is_pushed_goes_to_one_of_the_configuration() -> None:
    saved = {"do_remote_decode": True}
    assert read(saved, direction="push").peer == "P"
    assert read(saved, direction="pull").peer == ""
    with pytest.raises(ValueError, match="none of the 1 configured peers"):
        read({**saved, "peer": "Q"}, direction="push")


def test_the_shape_that_a_request_says_is_taken_before_ours() -> None:
    shape = toy_shape(ToyModel(), tp_size=2)
    said = {**PREFILLED, "shape": msgspec.to_builtins(shape)}
    assert read(said).shape == shape


def test_without_a_shape_a_peer_is_cut_as_this_engine_over_its_ranks() -> None:
    ours, urls = toy_shape(ToyModel()), ["mem://a", "mem://b"]
    options = ConnectorOptions.of(
        KVTransferConfig(
            kv_role="kv_both",
            kv_connector_extra_config={"direction": "pull", "peers": {"P": urls}},
        )
    )
    known = P2PRequest(KVRequest("r", tuple(range(10)), dict(PREFILLED)))
    P2PParams(KVEngine(engine_id="E", block_size=16, shape=ours), options).read(known)
    assert known.shape == toy_shape(ToyModel(), tp_size=2)


@pytest.mark.parametrize("name", ["a\nb", "x" * 10_000])
@pytest.mark.parametrize("field", ["transfer_id", "peer"])
def test_names_that_could_not_be_sent_or_logged_are_refused(
    name: str, field: str
) -> None:
    with pytest.raises(ValueError, match="characters"):
        read({**PREFILLED, field: name}, direction="push")


SAMPLE = KVRequest("0_a", (1, 2, 3), {"do_remote_decode": True}, parent_id="a")
SECOND = msgspec.structs.replace(SAMPLE, request_id="1_a")


def test_samples_of_one_prompt_share_a_transfer_also_when_one_has_ended() -> None:
    prompts = SampledPrompts()
    first = prompts.join(SAMPLE, "t", "D")
    first.unfinished -= 1
    assert prompts.join(SECOND, "u", "D") is first
    assert (first.transfer_id, first.unfinished) == ("t", 1)


@pytest.mark.parametrize(
    ("other", "peer"),
    [
        (msgspec.structs.replace(SECOND, token_ids=(1, 2, 4)), "D"),
        (msgspec.structs.replace(SECOND, salt="s"), "D"),
        (msgspec.structs.replace(SECOND, parent_id="b"), "D"),
        (msgspec.structs.replace(SECOND, parent_id=""), "D"),
        (msgspec.structs.replace(SECOND, kv_transfer_params={"transfer_id": "u"}), "D"),
        (SECOND, "E"),
        (SAMPLE, "D"),  # again: then its siblings come again too
    ],
)
def test_whatever_may_be_another_prompt_has_a_transfer_of_its_own(
    other: KVRequest, peer: str
) -> None:
    prompts = SampledPrompts()
    prompts.join(SAMPLE, "t", "D")
    assert prompts.join(other, "u", peer).transfer_id == "u"


def test_what_was_withdrawn_is_not_shared_with_who_comes_later() -> None:
    prompts = SampledPrompts()
    saved = prompts.join(SAMPLE, "t", "D")
    saved.request = order = SaveRequest("0_a", "t", "D", (), ())
    assert saved.withdraw() is None  # one may still be answered with it
    saved.unfinished -= 1
    assert (saved.withdraw(), saved.withdraw()) == (order, None)
    assert prompts.join(SECOND, "u", "D").transfer_id == "u"


def test_prompts_are_not_remembered_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asynckv.connectors.requests._REMEMBERED", 2)
    prompts = SampledPrompts()
    for parent in "abc":
        sample = msgspec.structs.replace(SAMPLE, parent_id=parent)
        prompts.join(sample, parent, "D")
    assert prompts.join(SECOND, "u", "D").transfer_id == "u"


BLOCKS = StoreRequest("r", ("k",), ((1,), (2,)))


@pytest.mark.parametrize(
    "metadata",
    [
        P2PMetadata(
            loads=(LoadRequest("r", "t", "P", ((1, 2),), shape=toy_shape(ToyModel())),),
            saves=(SaveRequest("s", "t", "", (1, 2), ((3,),)),),
            aborts=("x",),
        ),
        StoreMetadata((BLOCKS,), (BLOCKS,), ("x",)),
    ],
)
def test_orders_cross_processes(metadata: P2PMetadata | StoreMetadata) -> None:
    encoded = msgspec.msgpack.encode(metadata)
    assert msgspec.msgpack.decode(encoded, type=type(metadata)) == metadata


@pytest.mark.parametrize(
    ("num_blocks", "first", "parts"),
    [
        (1, 2, [("a", 2, ((7,),), 0), ("b", 3, ((8,),), 0)]),
        (2, 4, [("a", 2, ((7, 8),), 0), ("b", 3, ((9, 5),), 0)]),
        (2, 5, [("a", 2, ((7,),), 1), ("b", 3, ((8, 9),), 0)]),
        (16, 15, [("a", 0, ((0,),), 15), ("b", 1, (tuple(range(1, 17)),), 0)]),
        (16, 20, [("a", 1, (tuple(range(12)),), 4)]),
    ],
)
def test_each_value_has_its_own_blocks_of_a_request(
    num_blocks: int, first: int, parts: list[tuple[Any, ...]]
) -> None:
    blocks = tuple(block for _, _, (some,), _ in parts for block in some)
    keys = tuple(key for key, _, _, _ in parts)
    request = StoreRequest("r", keys, (blocks, blocks), first)
    assert list(request.parts(num_blocks)) == [
        StorePart(key, number, (some, some), begin)
        for key, number, (some,), begin in parts
    ]


@pytest.mark.parametrize(("first", "count"), [(0, 31), (0, 33), (5, 26), (5, 28)])
def test_blocks_that_are_not_those_of_the_values_are_refused(
    first: int, count: int
) -> None:
    right, wrong = tuple(range(32 - first)), tuple(range(count))
    request = StoreRequest("r", ("a", "b"), (right, wrong), first)
    with pytest.raises(ValueError, match=f"2 values have {32 - first} blocks"):
        list(request.parts(16))
