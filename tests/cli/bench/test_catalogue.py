from __future__ import annotations

import pytest

from asynckv.cli.bench.catalogue import catalogue
from asynckv.cli.bench.settings import FULL, QUICK, Scale

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
