from __future__ import annotations

import pytest

from asynckv.cli.document import write_document


@pytest.mark.parametrize("package", ["asynckv.cli.demo", "asynckv.cli.bench"])
def test_a_document_is_whole_and_fetches_nothing(package: str) -> None:
    document = write_document("A title", package, "<p>words</p>")
    assert document.startswith("<!DOCTYPE html>") and document.endswith("</html>\n")
    assert "<title>A title</title>" in document
    assert "<main>\n<p>words</p>\n</main>" in document
    assert ":root" in document and "http" not in document
