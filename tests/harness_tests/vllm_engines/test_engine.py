from __future__ import annotations

from pathlib import Path

import pytest

from harness.vllm_engines import Engine, make_tiny_model, random_prompt

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.multiprocess,
    pytest.mark.slow,
    pytest.mark.timeout(200),
]


def test_an_engine_that_cannot_start_says_why(tmp_path: Path) -> None:
    with (
        Engine(tmp_path / "nothing", tmp_path / "log") as engine,
        pytest.raises(RuntimeError, match="the engine ended with 1"),
    ):
        engine.wait_ready()


def test_an_engine_answers_aborts_and_tells_how_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A progress bar starts a monitor thread that would outlive the test.
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)
    model = make_tiny_model(tmp_path / "model")
    with Engine(model, tmp_path / "log") as engine:
        engine.wait_ready().tell("time")
        answer = engine.ask(random_prompt(10, seed=1), max_tokens=5)
        assert (len(answer.tokens), answer.finish_reason) == (5, "length")
        request = engine.add(random_prompt(10, seed=2), max_tokens=900)
        assert engine.abort(request).finish_reason == "abort"
        assert engine.state()["free_blocks"] == 255
        assert engine.report("times")["steps"] >= 5
        engine.kill()
        assert not engine.is_alive
        with pytest.raises(RuntimeError, match="the engine ended with -9"):
            engine.ask([3, 4, 5])
