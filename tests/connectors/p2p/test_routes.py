from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
import pytest

from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.serve import serve
from asynckv.config import KVTransferConfig
from asynckv.connectors.engine import EntryHeader, KVEngine
from asynckv.connectors.options import ConnectorOptions
from asynckv.connectors.p2p.routes import P2PNotifications, P2PRoutes
from asynckv.connectors.requests import LoadRequest, SaveRequest
from asynckv.connectors.transfers import Transfers
from asynckv.errors import ConfigError, IncompatiblePeer, PeerLost
from asynckv.parallel.shapes import EngineShape
from asynckv.testing.blocked import until
from harness.engines.toy_model import ToyModel
from harness.engines.toy_pairs import pair_configs, toy_shape
from harness.fake_devices import FakeDevice

MODEL = ToyModel()
SAVE = SaveRequest("r", "t", "D", (1,), ((0,),))


def routes_of(direction: str, side: int, tp_size: int = 1, rank: int = 0) -> P2PRoutes:
    decode = ["mem://rD", "mem://rD.1"] if side == 0 else ["mem://rD"]
    configs = pair_configs(["mem://rP"], decode, {"direction": direction})
    shape = toy_shape(MODEL, tp_size=tp_size)
    engine = KVEngine(
        engine_id="PD"[side], block_size=16, tp_size=tp_size, rank=rank, shape=shape
    )
    return P2PRoutes(configs[side], engine)


@pytest.mark.parametrize(
    ("direction", "side", "serves"),
    [("pull", 0, True), ("pull", 1, False), ("push", 0, False), ("push", 1, True)],
)
async def test_who_keeps_prompts_serves(
    direction: str, side: int, serves: bool
) -> None:
    routes = routes_of(direction, side)
    assert routes.serves == serves
    await routes.open()
    assert (routes.buffer is not None) == serves
    await routes.aclose()


async def test_a_link_is_up_for_both_sides_whoever_has_dialled() -> None:
    keeps, reads = routes_of("pull", 0), routes_of("pull", 1)
    await keeps.open()
    await reads.open()
    assert keeps.links == reads.links == 0
    (name,) = reads._options.peers
    await reads.peers.find(name, 0)
    assert keeps.links == reads.links == 1
    await reads.aclose()
    await until(lambda: not keeps.links)
    await keeps.aclose()


async def test_a_gpu_has_its_memory_back_from_who_cannot_serve(gpu: FakeDevice) -> None:
    first, second = routes_of("pull", 0), routes_of("pull", 0)
    await first.open()
    with pytest.raises(ConfigError) as refused:
        await second.open(gpu.device)
    await until(lambda: not gpu.process.space._mapped)
    assert refused.value  # whoever keeps it keeps no memory
    await first.aclose()


def test_one_entry_is_read_by_two_ranks_or_pushed_to_each() -> None:
    ((_, entry_id, deliveries),) = routes_of("pull", 0).targets(SAVE)
    assert (entry_id, deliveries) == ("t", 2)
    pushed = routes_of("push", 0).targets(SAVE)
    assert [(name, count) for _, name, count in pushed] == [("t#0", 1)] * 2


def staged(direction: str, ranks: int, stages: tuple[int, ...]) -> P2PRoutes:
    urls = [f"mem://sD.{rank}" for rank in range(ranks)]
    extra = {"direction": direction, "consumer_tp_size": None}
    config = pair_configs(["mem://sP"], urls, extra)[0]
    shape = msgspec.structs.replace(toy_shape(ToyModel(layers=2)), stages=stages)
    rank = len(stages) - 1
    engine = KVEngine(engine_id="P", block_size=16, rank=rank, shape=shape)
    return P2PRoutes(config, engine)


@pytest.mark.parametrize(
    ("ranks", "stages", "targets"), [(2, (1, 1), 1), (4, (1, 1), 2), (2, (2,), 2)]
)
def test_a_stage_pushes_to_each_rank_of_its_stage(
    ranks: int, stages: tuple[int, ...], targets: int
) -> None:
    assert len(staged("push", ranks, stages).targets(SAVE)) == targets


def test_a_stage_saves_for_the_same_stage_of_an_engine_with_as_many() -> None:
    ((_, _, deliveries),) = staged("pull", 2, (1, 1)).targets(SAVE)
    assert deliveries == 1
    with pytest.raises(IncompatiblePeer) as caught:
        staged("push", 3, (1, 1)).targets(SAVE)
    assert caught.value.field == "ranks"


def test_a_rank_reads_from_every_rank_that_has_a_part() -> None:
    order = LoadRequest("r", "t", "P", ((1,),), shape=toy_shape(MODEL, tp_size=2))
    reads, sources = routes_of("push", 1).sources(order)
    assert list(reads) == [0, 1]
    assert [name for _, name in sources.values()] == ["t#0", "t#1"]


async def test_without_a_buffer_there_is_nothing_to_read_from() -> None:
    routes = routes_of("push", 1)
    _, sources = routes.sources(
        LoadRequest("r", "t", "", ((1,),), shape=toy_shape(MODEL))
    )
    find, _ = sources[0]
    with pytest.raises(PeerLost):
        await find()


def asked(shape: EngineShape, peer: str = "P") -> LoadRequest:
    return LoadRequest("r", "t", peer, ((1,),), shape=shape)


@pytest.mark.parametrize(
    "shape",
    [
        toy_shape(MODEL, tp_size=4),
        msgspec.structs.replace(toy_shape(MODEL, tp_size=2), stages=(2, 2)),
    ],
)
@pytest.mark.parametrize("peer", ["P", "who says its name"])
def test_no_request_chooses_more_ranks_than_are_configured(
    shape: EngineShape, peer: str
) -> None:
    routes = routes_of("pull", 1, tp_size=2)
    with pytest.raises(IncompatiblePeer, match="configuration 2") as caught:
        routes.sources(asked(shape, peer))
    assert caught.value.field == "ranks"
    reads, _ = routes.sources(asked(toy_shape(MODEL, tp_size=2), peer))
    assert list(reads) == [0]


def test_ranks_whose_urls_are_configured_may_be_more_than_there_are_here() -> None:
    urls = [f"mem://rP.{rank}" for rank in range(4)]
    config = pair_configs(urls, ["mem://rD"], {"direction": "pull"})[1]
    engine = KVEngine(engine_id="D", block_size=16, shape=toy_shape(MODEL))
    routes = P2PRoutes(config, engine)
    reads, _ = routes.sources(asked(toy_shape(MODEL, tp_size=4)))
    assert list(reads) == [0, 1, 2, 3]


@pytest.mark.parametrize(("direction", "may_lead"), [("push", True), ("pull", False)])
def test_only_what_is_pushed_may_lead_to_a_gpu_of_a_peer(
    gpu: FakeDevice, direction: str, may_lead: bool
) -> None:
    routes = routes_of(direction, 0)
    routes.peers.device = gpu.device
    assert routes.may_lead_to_gpu(SAVE, gpu.device.name) == may_lead
    assert not routes.may_lead_to_gpu(SAVE, "cuda:7")


def test_one_reader_with_a_gpu_is_enough_and_who_cannot_read_has_none(
    gpu: FakeDevice,
) -> None:
    routes, name = routes_of("push", 0), gpu.device.name
    routes.peers.device = gpu.device
    routes.peers.line(SAVE.peer, 0).device = None
    assert routes.may_lead_to_gpu(SAVE, name)
    routes.peers.line(SAVE.peer, 1).device = None
    assert not routes.may_lead_to_gpu(SAVE, name)
    assert not staged("push", 3, (1, 1)).may_lead_to_gpu(SAVE, name)


@pytest.mark.parametrize(
    ("direction", "side", "has_memory"),
    [("push", 0, True), ("push", 1, False), ("pull", 1, True)],
)
async def test_who_pushes_or_fetches_has_memory_of_the_gpu_for_its_peers(
    direction: str, side: int, has_memory: bool, gpu: FakeDevice
) -> None:
    routes = routes_of(direction, side)
    await routes.open(gpu.device)
    assert (routes.peers.device is gpu.device) == has_memory
    await routes.aclose()


async def test_closed_routes_reach_nobody() -> None:
    routes = routes_of("push", 0)
    await routes.aclose()
    with pytest.raises(PeerLost, match="closed"):
        await routes.peers.find("D", 0)


@pytest.mark.parametrize("direction", ["push", "pull"])
async def test_only_who_reads_what_was_pushed_is_hung_up_on(direction: str) -> None:
    routes = routes_of(direction, 0)
    async with LookupBuffer() as buffer, serve("mem://rD", lookup=buffer):
        peer = await routes.peers.find("D", 0)
        routes.hang_up(SAVE)
        assert peer.is_connected == (direction == "pull")
        await routes.aclose()


CONFIG = KVTransferConfig(
    kv_role="kv_both",
    kv_connector_extra_config={
        "direction": "pull",
        "listen": "mem://notifications",
        "peers": {"D": "mem://nobody"},
    },
)


@pytest.fixture
async def routes() -> AsyncIterator[P2PRoutes]:
    engine = KVEngine(engine_id="P", block_size=4)
    yield (routes := P2PRoutes(CONFIG, engine))
    await routes.aclose()


@pytest.fixture
async def transfers() -> AsyncIterator[Transfers]:
    yield (transfers := Transfers())
    await transfers.aclose()


@pytest.fixture
def notifications(transfers: Transfers, routes: P2PRoutes) -> P2PNotifications:
    return P2PNotifications(transfers, routes, ConnectorOptions.of(CONFIG))


async def served(routes: P2PRoutes) -> LookupBuffer:
    await routes.open()
    assert routes.buffer is not None
    return routes.buffer


async def test_no_number_of_transfers_that_there_are_not_is_waited_for(
    notifications: P2PNotifications, transfers: Transfers
) -> None:
    for number in range(1100):
        notifications.release(LoadRequest("r", f"{number}", "D", ()))
    await until(lambda: transfers.others == 1024)


async def test_of_a_failure_there_is_an_entry_where_it_would_have_been(
    notifications: P2PNotifications, transfers: Transfers, routes: P2PRoutes
) -> None:
    header = EntryHeader(engine_id="P", rank=0, block_size=4, layers=("a",))
    buffer = await served(routes)
    notifications.report_failure(
        SaveRequest("r", "t", "", (1,), ((0,),)), header, "no room"
    )
    async with buffer.drop_select(entry_id="t") as entry:
        assert EntryHeader.of(entry.extras["asynckv"]).failure == "no room"
    await transfers.wait_others()


async def test_what_was_saved_for_nobody_is_withdrawn(
    notifications: P2PNotifications, transfers: Transfers, routes: P2PRoutes
) -> None:
    buffer = await served(routes)
    await buffer.insert([1], None, None, None, None, entry_id="t")
    for transfer_id in ("t", "unknown"):
        notifications.withdraw(SaveRequest("r", transfer_id, "", (), ()))
    await transfers.wait_others()
    assert buffer.statistics().entries == 0


async def test_those_that_no_plan_leads_to_are_told_nothing(
    notifications: P2PNotifications, transfers: Transfers
) -> None:
    notifications.release(LoadRequest("r", "t", "D", (), shape=toy_shape(ToyModel())))
    assert transfers.others == 0
