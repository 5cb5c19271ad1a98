from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
SHOWN = {
    "consumer": "consumer: 15 MiB for 'Prompt 7",
    "fastapi_streaming": "second client: all 12 layers\ngiven back: 1",
    "fastapi_service": "120 MiB came; meanwhile /healthz took",
    "paged_engine": "KV equal",
    "pipe": "prefill: 'And who waits?' goes on with [63, 115, 116]",
    "testing_a_scheduler": " 6 passed",
    "prefix_cache": "the other process: the store saved 99.5% of the prefill",
    "transformers_handoff": "the same as alone: True",
    "producer": "'Prompt 7: why is the sky blue?' is in",
}

each_example = pytest.mark.parametrize(
    "path", EXAMPLES, ids=lambda path: str(path.stem)
)


@each_example
def test_an_example_is_under_80_lines(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 80


# In this process, which has imported all they need; as their own: nox -s examples.
@pytest.mark.slow
@pytest.mark.multiprocess
@each_example
def test_an_example_runs_without_arguments_and_ends(
    path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(path)])
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as exc:
        assert not exc.code
    assert SHOWN[path.stem] in capfd.readouterr().out
