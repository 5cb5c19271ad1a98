"""The demo, and prefills into a buffer, on a real GPU. ``nox -s gpu`` runs it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from asynckv.buffers.lookup import LookupBuffer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        importlib.util.find_spec("cupy") is None,
        reason='CuPy is not installed: pip install ".[cuda12]"',
    ),
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None,
        reason="transformers is not installed",
    ),
]

# Without 0, which pads: generate() would not attend to it.
_PROMPT = 1 + torch.arange(400) % 249


def _demo(*options: object) -> dict[str, Any]:
    command = [sys.executable, "-m", "asynckv", "demo", "--device", "cuda:0", "--json"]
    done = subprocess.run(
        [*command, *map(str, options)], capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@pytest.mark.timeout(300)
def test_both_processes_of_the_demo_share_one_gpu(tmp_path: Path) -> None:
    page = tmp_path / "demo.html"
    report = _demo("--model", "random", "--html", page)
    assert report["tokens_identical"] and report["problems"] == []
    assert report["transport"] == "tcp, cuda_ipc payload"
    assert report["device"].startswith("cuda:0 (")
    assert report["device"] in page.read_text(encoding="utf-8")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    from asynckv.cli.demo.models import load_model, prepare_model

    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # else its thread stays
    return load_model(prepare_model("random", tmp_path).folder, "cuda:0")


async def _continued(model: Any, buffer: LookupBuffer) -> list[int]:
    from asynckv.integrations.transformers import generate_from, prefill

    await prefill(model, _PROMPT, buffer, carry=())
    done = await generate_from(
        model, _PROMPT, buffer, use_carried=False, do_sample=False, max_new_tokens=8
    )
    assert done.prompt_positions_computed == 1
    found: list[int] = done.sequences[0].tolist()
    return found


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
async def test_layers_are_put_after_they_were_computed_whatever_the_stream(
    model: Any, device: str
) -> None:
    ids = _PROMPT.unsqueeze(0).cuda()
    plain = model.generate(ids, do_sample=False, max_new_tokens=8)[0].tolist()
    async with LookupBuffer("256MiB", device=device) as buffer:
        assert await _continued(model, buffer) == plain
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            assert await _continued(model, buffer) == plain
