from __future__ import annotations

from asynckv.config import KVTransferConfig
from asynckv.connectors.options import ConnectorOptions
from harness.engines.toy_model import ToyModel
from harness.engines.toy_pairs import make_engine, pair_configs, toy_shape


def test_each_side_knows_the_other_one_only() -> None:
    prefill, decode = pair_configs(["mem://p"], ["mem://d", "mem://e"])
    assert ConnectorOptions.of(prefill).peers == {"D": ("mem://d", "mem://e")}
    assert ConnectorOptions.of(prefill).consumer_tp_size == 2
    assert ConnectorOptions.of(decode).peers == {"P": ("mem://p",)}


def test_an_engine_has_a_worker_a_rank() -> None:
    model = ToyModel()
    config: KVTransferConfig = pair_configs(["mem://p"], ["mem://d"])[0]
    engine = make_engine("P", config, toy_shape(model, tp_size=2), model)
    assert len(engine.workers) == len(engine.ranks) == 2
