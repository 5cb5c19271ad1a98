from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from rich.console import Console

from asynckv.cli.demo.command import demo
from asynckv.cli.demo.live import LiveDisplay, final_table
from asynckv.cli.demo.messages import Computed, Doing, Landed, Sampled
from asynckv.cli.demo.place import HOST, Place, check_place, place_named
from asynckv.cli.demo.report import BackpressureSample, DemoReport
from asynckv.errors import ConfigError, GPUUnavailable
from harness.fake_devices import fake_device
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


ON_NO_GPU = pytest.mark.skipif(why_not("real") == "", reason="there is a GPU here")


def test_the_host_is_asked_for_nothing() -> None:
    assert place_named("cpu") is HOST
    assert (HOST.name, HOST.describe(), HOST.is_gpu) == ("cpu", "cpu", False)
    HOST.settle()


def test_a_gpu_is_the_one_of_its_number_or_of_the_local_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert place_named("cuda:2").name == "cuda:2"
    monkeypatch.setenv("LOCAL_RANK", "1")
    place = place_named("cuda")
    assert (place.name, place.computes_on, place.is_gpu) == ("cuda:1", "cuda:1", True)


@pytest.mark.parametrize("name", ["tpu", "cuda:", "0"])
def test_another_device_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="is unknown"):
        place_named(name)


async def test_a_gpu_that_is_there_is_good_enough() -> None:
    with fake_device() as gpu:
        await check_place(Place("cpu", gpu.device))
    await check_place(HOST)


@ON_NO_GPU
async def test_a_gpu_that_is_not_there_is_told() -> None:
    assert not torch.cuda.is_available()
    with pytest.raises(GPUUnavailable):
        await check_place(place_named("cuda"))


def console(*, terminal: bool) -> Console:
    return Console(file=io.StringIO(), width=110, force_terminal=terminal)


def shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_without_a_terminal_each_act_is_one_line() -> None:
    plain = console(terminal=False)
    with LiveDisplay(plain) as display:
        display.begin("2  bulk")
        display.note(Landed(0))
        display.end("first token after 20 ms")
    assert len(shown(plain).splitlines()) == 1
    assert shown(plain).startswith("2  bulk: first token after 20 ms")


def test_in_a_terminal_layers_are_counted_while_they_come() -> None:
    terminal = console(terminal=True)
    with LiveDisplay(terminal) as display:
        display.expect_layers(4)
        display.begin("3  layer-wise")
        display.note(Computed(1))
        display.note(Landed(0))
    assert "computed" in shown(terminal)
    assert "2/4" in shown(terminal)
    assert "1/4" in shown(terminal)


def test_in_a_terminal_it_is_said_what_is_done_and_how_far_it_is() -> None:
    terminal = console(terminal=True)
    with LiveDisplay(terminal) as display:
        display.begin("load")
        display.doing("importing torch")
        display._live.refresh()
        display.note(Doing("decoding: token", 12, 48))
    assert "importing torch" in shown(terminal)
    assert "decoding: token" in shown(terminal) and "12/48" in shown(terminal)


def test_layers_that_are_computed_end_what_was_done_before() -> None:
    terminal = console(terminal=True)
    with LiveDisplay(terminal) as display:
        display.expect_layers(30)
        display.begin("4  second request")
        display.note(Doing("decoding: token", 48, 48))
        display.note(Computed(6))
    assert "7/30" in shown(terminal)


def test_in_a_terminal_a_filling_buffer_is_shown() -> None:
    terminal = console(terminal=True)
    with LiveDisplay(terminal) as display:
        display.begin("4  slow decoder")
        display.note(Sampled(BackpressureSample(1.0, 84_000_000, 1, 4), 210_000_000))
    assert "84.0 MB of 210.0 MB, 4 inserts wait" in shown(terminal)


def test_progress_outside_an_act_is_nobody_s() -> None:
    with LiveDisplay(console(terminal=False)) as display:
        display.note(Landed(0))


def test_the_final_table_has_numbers_and_text(sample_report: DemoReport) -> None:
    plain = console(terminal=False)
    plain.print(final_table(sample_report))
    assert "1,822" in shown(plain)
    assert "decoder computes 1 position" in shown(plain)
    assert "90% earlier" in " ".join(shown(plain).split())
    assert "sooner" not in shown(plain)
    assert "They built a rope" in shown(plain)


def test_the_final_table_names_problems(sample_report: DemoReport) -> None:
    plain = console(terminal=False)
    bad = msgspec.structs.replace(sample_report, problems=("Bulk: tokens differ",))
    plain.print(final_table(bad))
    assert "problem: Bulk: tokens differ" in shown(plain)
