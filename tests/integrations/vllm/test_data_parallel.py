"""One ``vllm serve`` with two data parallel ranks prefills, another one decodes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.vllm_engines import random_prompt
from harness.vllm_engines.commands import OPTIONS, Command, get

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.multiprocess,
    pytest.mark.slow,
    pytest.mark.timeout(400),
]

EXAMPLE = Path(__file__).parents[3] / "examples" / "vllm_prefill_decode"
PREFILL, DECODE = "http://127.0.0.1:8100", "http://127.0.0.1:8200"


PORTS = 14579, 14580
TRANSFER = {
    "kv_connector": "AsyncKVConnector",
    "kv_connector_module_path": "asynckv.integrations.vllm",
    "kv_role": "kv_consumer",
    "kv_connector_extra_config": {
        "peers": [f"tcp://127.0.0.1:{port}" for port in PORTS]
    },
}


def test_a_decoder_loads_what_either_rank_has_computed(
    model: Path, tmp_path: Path
) -> None:
    prefill = [str(EXAMPLE / "prefill.sh"), str(model), *OPTIONS]
    prefill += ["--data-parallel-size", "2", "--api-server-count", "1"]
    decode = ["vllm", "serve", str(model), *OPTIONS, "--port", "8200"]
    decode += ["--kv-transfer-config", json.dumps(TRANSFER)]
    with (
        Command(prefill, tmp_path / "prefill.log") as first,
        Command(decode, tmp_path / "decode.log") as second,
    ):
        first.wait_ready(f"{PREFILL}/health")
        second.wait_ready(f"{DECODE}/health")
        computed_at = [_transfer(model, random_prompt(100, seed=n)) for n in range(8)]
        assert len(set(computed_at)) == 2
        assert _loads() == 8


def _transfer(model: Path, prompt: list[int]) -> str:
    """Return who has computed the prompt that was decoded elsewhere."""
    asked = {"do_remote_decode": True}
    carried = _ask(PREFILL, model, prompt, asked)["kv_transfer_params"]
    _ask(DECODE, model, prompt, carried)
    peer: str = carried["peer"]
    return peer


def _ask(url: str, model: Path, prompt: list[int], params: Any) -> Any:
    body = {"model": str(model), "prompt": prompt, "max_tokens": 1, "temperature": 0}
    body["kv_transfer_params"] = params
    return json.loads(get(f"{url}/v1/completions", body))


def _loads() -> float:
    name = "vllm:asynckv_loads_total{"
    lines = get(f"{DECODE}/metrics").splitlines()
    (found,) = [line for line in lines if line.startswith(name)]
    return float(found.rpartition(" ")[2])
