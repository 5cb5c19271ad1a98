from __future__ import annotations

import msgspec
import pytest

from asynckv.cli.demo.report import DemoReport
from asynckv.cli.demo.wording import (
    figures_of,
    first_token_bars,
    write_bytes,
    write_fall,
    write_seconds,
    write_tail,
    write_transport,
)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.0, "0.0 ms"), (0.0134, "13.4 ms"), (0.25, "250 ms"), (2.4472, "2.45 s")],
)
def test_a_duration_has_the_unit_that_suits_it(seconds: float, words: str) -> None:
    assert write_seconds(seconds) == words


def test_bytes_are_megabytes() -> None:
    assert write_bytes(83_957_760) == "84.0 MB"


def test_all_ways_to_a_first_token_count_from_the_request(
    sample_report: DemoReport,
) -> None:
    sums = [sum(bar.stages_s) for bar in first_token_bars(sample_report)]
    assert sums == pytest.approx([2.45, 2.54, 2.43])


def test_a_tail_is_written_with_its_sign(sample_report: DemoReport) -> None:
    assert write_tail(sample_report.bulk).endswith("110 ms after the prefill's compute")
    assert "25.0 ms before" in write_tail(sample_report.layerwise)


def test_a_second_request_that_is_slower_is_called_later(
    sample_report: DemoReport,
) -> None:
    assert write_fall(sample_report.second).endswith("250 ms after the request "
        "instead of 2.50 s, 90% earlier")  # fmt: skip
    slow = msgspec.structs.replace(sample_report.second, first_token_s=5.0)
    assert write_fall(slow).endswith("100% later")


def test_how_payload_moved_is_said_in_words() -> None:
    assert write_transport("tcp, map payload").startswith("read from memory")
    assert write_transport("tcp, new payload") == "new, control over tcp"


def test_the_figures_shout_when_tokens_differ(sample_report: DemoReport) -> None:
    bulk = msgspec.structs.replace(sample_report.bulk, tokens=(1,))
    report = msgspec.structs.replace(sample_report, bulk=bulk)
    values = {figure.name: figure.value for figure in figures_of(report)}
    assert values["tokens identical"] == "NO"
