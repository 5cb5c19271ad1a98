from __future__ import annotations

import msgspec
import pytest

from asynckv.cli.demo.report import DemoReport
from asynckv.cli.demo.wording import figures_of, write_bytes, write_seconds


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.0, "0.0 ms"), (0.0134, "13.4 ms"), (0.25, "250 ms"), (2.4472, "2.45 s")],
)
def test_a_duration_has_the_unit_that_suits_it(seconds: float, words: str) -> None:
    assert write_seconds(seconds) == words


def test_bytes_are_megabytes() -> None:
    assert write_bytes(83_957_760) == "84.0 MB"


def test_the_figures_tell_how_much_sooner(sample_report: DemoReport) -> None:
    remarks = {figure.name: figure.remark for figure in figures_of(sample_report)}
    assert remarks["first token, bulk"] == "17 times sooner"
    assert remarks["first token, layer-wise"] == "81 times sooner"


def test_the_figures_shout_when_tokens_differ(sample_report: DemoReport) -> None:
    bulk = msgspec.structs.replace(sample_report.bulk, tokens=(1,))
    report = msgspec.structs.replace(sample_report, bulk=bulk)
    values = {figure.name: figure.value for figure in figures_of(report)}
    assert values["tokens identical"] == "NO"
