from __future__ import annotations

import re
from pathlib import Path

import pytest

from asynckv import testing
from asynckv.testing import faults
from asynckv.testing.faults import hostile

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "testing.md").read_text()


def test_the_example_on_the_page_is_the_one_that_runs() -> None:
    snippets = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert snippets[0] == (ROOT / "examples" / "testing_a_scheduler.py").read_text()


@pytest.mark.parametrize("name", [name for name in faults.__all__ if name.islower()])
def test_the_page_says_what_a_fault_models(name: str) -> None:
    assert re.search(rf"^\| `{name}\(", PAGE, re.MULTILINE)


def test_every_fixture_and_every_kit_is_on_the_page() -> None:
    kits = [name for name in testing.__all__ if name.startswith("check_")]
    for name in ("kv_pair", "kv_tcp_pair", "kv_faults", *kits):
        assert f"| `{name}" in PAGE


def test_every_name_on_the_page_is_there() -> None:
    assert {n for n in re.findall(r"\bfaults\.(\w+)", PAGE) if n != "hostile"} <= {
        *faults.__all__
    }
    named = re.findall(r"`(\w+)\(", PAGE)
    known = {*dir(faults), *dir(testing), *testing.__all__, *hostile.__all__}
    assert set(named) - {"begin", "end"} <= known


def test_every_link_to_a_file_leads_somewhere() -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#]+)\)", PAGE)
    assert [t for t in targets if not (ROOT / "docs" / t).exists()] == []
