from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from asynckv.cli.demo.command import demo
from harness.gpu_processes import why_not

COMMAND = (sys.executable, "-m", "asynckv", "demo", "--model", "random-tiny")


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_every_act_gives_the_same_tokens(tmp_path: Path) -> None:
    page = tmp_path / "demo.html"
    done = subprocess.run(
        [*COMMAND, "--html", page, "--json"], capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    report = json.loads(done.stdout)
    assert report["tokens_identical"]
    assert report["problems"] == []
    assert report["prefill_pid"] != report["decode_pid"]
    assert "every act generated the same tokens" in page.read_text(encoding="utf-8")


def test_a_prompt_that_is_not_there_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo(prompt=tmp_path / "none.txt", html=tmp_path / "page.html") == 1
    assert "none.txt" in capsys.readouterr().out.replace("\n", "")
    assert not (tmp_path / "page.html").exists()


@pytest.mark.skipif(why_not("real") == "", reason="there is a GPU here")
@pytest.mark.parametrize(
    ("device", "words"),
    [("cuda", why_not("real").partition(" (")[0]), ("tpu", "device 'tpu' is unknown")],
)
def test_a_gpu_that_is_not_there_is_an_error_before_any_process_starts(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    words: str,
) -> None:
    monkeypatch.setattr(sys, "executable", "none")  # nothing can be started
    assert demo(model="random-tiny", device=device, html=tmp_path / "page.html") == 1
    assert words in capsys.readouterr().out.replace("\n", " ")
    assert not (tmp_path / "page.html").exists()


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no process be started."""
    monkeypatch.setattr(sys, "executable", "none")


@pytest.mark.usefixtures("nothing_starts")
def test_a_model_that_is_not_there_is_an_error_before_any_process_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo(model=str(tmp_path), html=tmp_path / "page.html") == 1
    out = capsys.readouterr().out
    assert "config.json" in out and len(out.splitlines()) == 1


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize("html", ["", "missing/page.html"])
def test_a_page_that_cannot_be_written_is_an_error_before_any_process_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], html: str
) -> None:
    assert demo(model="random-tiny", html=tmp_path / html) == 1
    out = capsys.readouterr().out
    assert "cannot write" in out and len(out.splitlines()) == 1


@pytest.mark.multiprocess
@pytest.mark.chaos
def test_a_model_without_a_tokenizer_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    assert demo(model=str(tmp_path), html=tmp_path / "page.html") == 1
    assert "Traceback" not in capsys.readouterr().out
