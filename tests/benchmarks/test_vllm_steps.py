from __future__ import annotations

from pathlib import Path

from benchmarks.vllm_steps import _output, _Runner


def test_a_prompt_goes_from_the_fake_runner_to_itself(tmp_path: Path) -> None:
    runner = _Runner(tmp_path)
    try:
        request, output = runner.prefill("first")
        runner.step(output)
        params = runner.finish(request)
        runner.decode("second", request.prompt_token_ids, params)
        steps = (runner.step(_output({}, [])) for _ in range(10**6))
        ended = next(ended for ended in steps if ended.finished_recving)
        assert ended.finished_recving == {"second"} and not ended.failed_recving
    finally:
        runner.close()
