from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from rich.console import Console

from asynckv.cli.demo.command import demo
from asynckv.cli.demo.live import LiveDisplay, final_table
from asynckv.cli.demo.messages import Computed, Doing, Landed, Progress, Sampled
from asynckv.cli.demo.models import HOST, Place, check_place, place_named
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


ON_NO_GPU = pytest.mark.skipif(why_not("real") == "", reason="there is a GPU here")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prompt": "none.txt"}, "none.txt"),
        ({"model": ""}, "config.json"),
        ({"html": ""}, "cannot write"),
        ({"html": "missing/page.html"}, "cannot write"),
        ({"device": "tpu"}, "device 'tpu' is unknown"),
        pytest.param(
            *({"device": "cuda"}, why_not("real").partition(" (")[0]), marks=ON_NO_GPU
        ),
    ],
)
def test_what_cannot_be_played_is_an_error_before_any_process_starts(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, str],
    words: str,
) -> None:
    monkeypatch.setattr(sys, "executable", "none")  # nothing can be started
    monkeypatch.setenv("COLUMNS", "500")
    given: dict[str, Any] = {"model": "random-tiny", "html": tmp_path / "page.html"}
    for name, value in options.items():
        given[name] = value if name == "device" else tmp_path / value
    assert demo(**{**given, "model": str(given["model"])}) == 1
    out = capsys.readouterr().out
    assert words in out and len(out.splitlines()) == 1
    assert not (tmp_path / "page.html").exists()


@pytest.mark.multiprocess
@pytest.mark.chaos
def test_a_model_without_a_tokenizer_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    assert demo(model=str(tmp_path), html=tmp_path / "page.html") == 1
    assert "Traceback" not in capsys.readouterr().out


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
        display.note(Landed(0))  # outside an act it is nobody's
        display.begin("2  bulk")
        display.note(Landed(0))
        display.end("first token after 20 ms")
    assert len(shown(plain).splitlines()) == 1
    assert shown(plain).startswith("2  bulk: first token after 20 ms")


SAMPLED = Sampled(BackpressureSample(1.0, 84_000_000, 1, 4), 210_000_000)


@pytest.mark.parametrize(
    ("notes", "words"),
    [
        ([Computed(1), Landed(0)], ["computed", "2/30", "1/30"]),
        ([Doing("decoding: token", 12, 48)], ["decoding: token", "12/48"]),
        ([Doing("decoding: token", 48, 48), Computed(6)], ["7/30"]),
        ([SAMPLED], ["84.0 MB of 210.0 MB, 4 inserts wait"]),
    ],
    ids=["layers", "what is done", "layers after that", "a filling buffer"],
)
def test_a_terminal_sees_how_far_an_act_is(
    notes: list[Progress], words: list[str]
) -> None:
    terminal = console(terminal=True)
    with LiveDisplay(terminal) as display:
        display.expect_layers(30)
        display.begin("3  layer-wise")
        for note in notes:
            display.note(note)
    assert [word for word in words if word not in shown(terminal)] == []


def test_a_terminal_sees_what_is_done_before_any_note() -> None:
    terminal = console(terminal=True)
    with LiveDisplay(terminal) as display:
        display.begin("load")
        display.doing("importing torch")
    assert "importing torch" in shown(terminal)


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
