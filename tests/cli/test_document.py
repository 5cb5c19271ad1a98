from __future__ import annotations

from pathlib import Path

import pytest

from asynckv.cli.document import check_writable, write_document
from asynckv.errors import ConfigError


@pytest.mark.parametrize("package", ["asynckv.cli.demo", "asynckv.cli.bench"])
def test_a_document_is_whole_and_fetches_nothing(package: str) -> None:
    document = write_document("A title", package, "<p>words</p>")
    assert document.startswith("<!DOCTYPE html>") and document.endswith("</html>\n")
    assert "<title>A title</title>" in document
    assert "<main>\n<p>words</p>\n</main>" in document
    assert ":root" in document and "http" not in document


def test_a_path_that_can_be_written_is_let_through_and_nothing_is_created(
    tmp_path: Path,
) -> None:
    check_writable(tmp_path / "page.html")
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("name", ["", "missing/page.html"], ids=["folder", "nowhere"])
def test_a_path_that_cannot_be_written_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot write"):
        check_writable(tmp_path / name)
