from __future__ import annotations

from asynckv.config import KVTransferConfig
from asynckv.connectors.engine import KVEngine
from asynckv.connectors.keys import EntryHeader
from asynckv.connectors.options import ConnectorOptions
from asynckv.connectors.p2p.routes import P2PNotifications, P2PRoutes
from asynckv.connectors.requests import LoadOrder, SaveOrder
from asynckv.connectors.transfers import Transfers
from asynckv.testing.blocked import until
from harness.engines.toy_model import ToyModel
from harness.engines.toy_pairs import toy_shape

CONFIG = KVTransferConfig(
    kv_role="kv_both",
    kv_connector_extra_config={
        "direction": "pull",
        "listen": "mem://notices",
        "peers": {"D": "mem://nobody"},
    },
)


def notices_of(engine: KVEngine) -> tuple[P2PNotifications, Transfers, P2PRoutes]:
    transfers, routes = Transfers(), P2PRoutes(CONFIG, engine)
    options = ConnectorOptions.of(CONFIG)
    return P2PNotifications(transfers, routes, options), transfers, routes


async def test_no_number_of_transfers_that_there_are_not_is_waited_for() -> None:
    notices, transfers, routes = notices_of(KVEngine(engine_id="P", block_size=4))
    for number in range(1100):
        notices.release(LoadOrder("r", f"{number}", "D", ()))
    await until(lambda: transfers.others == 1024)
    await transfers.aclose()
    await routes.aclose()


async def test_of_a_failure_there_is_an_entry_where_it_would_have_been() -> None:
    notices, transfers, routes = notices_of(KVEngine(engine_id="P", block_size=4))
    header = EntryHeader(engine_id="P", rank=0, block_size=4, layers=("a",))
    await routes.open()
    assert routes.buffer is not None
    notices.report_failure(SaveOrder("r", "t", "", (1,), ((0,),)), header, "no room")
    async with routes.buffer.drop_select(entry_id="t") as entry:
        assert EntryHeader.of(entry.extras["asynckv"]).failure == "no room"
    await transfers.wait_others()
    await routes.aclose()


async def test_what_was_saved_for_nobody_is_withdrawn() -> None:
    notices, transfers, routes = notices_of(KVEngine(engine_id="P", block_size=4))
    await routes.open()
    assert routes.buffer is not None
    await routes.buffer.insert([1], None, None, None, None, entry_id="t")
    for transfer_id in ("t", "unknown"):
        notices.withdraw(SaveOrder("r", transfer_id, "", (), ()))
    await transfers.wait_others()
    assert routes.buffer.statistics().entries == 0
    await routes.aclose()


async def test_those_that_no_plan_leads_to_are_told_nothing() -> None:
    shape = toy_shape(ToyModel())
    notices, transfers, _ = notices_of(KVEngine(engine_id="P", block_size=4))
    notices.release(LoadOrder("r", "t", "D", (), shape=shape))
    assert transfers.others == 0
