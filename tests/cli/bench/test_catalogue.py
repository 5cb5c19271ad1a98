from __future__ import annotations

from typing import Any

import pytest

from asynckv.cli.bench.catalogue import catalogue, choose, read_shape
from asynckv.cli.bench.settings import FULL, QUICK, Scale, Selection
from asynckv.errors import ConfigError

CASES = {exhibit.subject.case: exhibit.subject for exhibit in catalogue(FULL)}


def test_every_promised_case_is_there() -> None:
    promised = {
        "layers",
        "small",
        "ping",
        "fetch",
        "outstanding-1000",
        "scattered-18432",
        "tail",
        "pairs",
        "lag",
    }
    assert promised <= set(CASES)


def test_titles_say_what_moves() -> None:
    assert CASES["layers"].title == "1 GiB as 64 layers of 16 MiB"
    assert CASES["small"].title == "10,000 tensors of 4 KiB"
    assert CASES[f"entry-{64 * 2**20}"].title == "64 MiB entry"


@pytest.mark.parametrize("scale", [FULL, QUICK], ids=["full", "quick"])
def test_no_two_cases_have_the_same_name(scale: Scale) -> None:
    names = [exhibit.subject.case for exhibit in catalogue(scale)]
    assert len(names) == len(set(names))


def chosen(**options: Any) -> list[str]:
    return [one.subject.case for one in choose(Selection(**options))]


@pytest.mark.parametrize(
    ("cases", "expected"),
    [
        (("ping",), ["ping"]),
        (("entry-1MiB", "lag"), ["entry-1048576", "lag"]),
        (
            ("outstanding-*", "outstanding-1"),
            [f"outstanding-{10**n}" for n in range(4)],
        ),
    ],
)
def test_cases_are_chosen_by_name_size_or_pattern(
    cases: tuple[str, ...], expected: list[str]
) -> None:
    assert chosen(cases=cases) == expected


def test_without_a_choice_all_cases_are_measured() -> None:
    assert chosen() == list(CASES)


def test_a_name_that_fits_no_case_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"no case fits 'pong' .*there are .*ping"):
        choose(Selection(cases=("pong",)))


def test_a_shape_of_one_s_own_is_a_case_alone_or_beside_named_ones() -> None:
    shapes = (read_shape("32x2MiB"),)
    assert shapes == ((32, 2 * 2**20),)
    assert chosen(shapes=shapes) == ["shape-32x2097152"]
    assert chosen(shapes=shapes, cases=("ping",)) == ["ping", "shape-32x2097152"]


@pytest.mark.parametrize("text", ["32", "x2MiB", "0x1KiB", "1x0", "1x2lots", "2x1TiB"])
def test_what_is_no_shape_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        read_shape(text)


def test_of_a_server_that_is_no_bench_less_is_asked() -> None:
    found = choose(Selection(), is_bench=False)
    names = {one.subject.case for one in found}
    assert {"ping", "pairs", "entry-67108864"} <= names
    assert not {"layers", "lag", "tail"} & names
