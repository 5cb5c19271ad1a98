from __future__ import annotations

import io

import msgspec
from rich.console import Console

from asynckv.cli.demo.live import LiveDisplay, final_table
from asynckv.cli.demo.messages import Computed, Doing, Landed, Sampled
from asynckv.cli.demo.report import BackpressureSample, DemoReport


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
