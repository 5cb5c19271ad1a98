from __future__ import annotations

import re
from pathlib import Path

import pytest

import asynckv
from harness.forks import ForkServer

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*/*.md"))
)
README = (ROOT / "README.md").read_text()


def python_snippets() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


@pytest.mark.multiprocess
async def test_the_first_snippet_does_what_it_says(forks: ForkServer) -> None:
    assert await forks.printed_by(python_snippets()[0]) == "1500 True\n"


def test_every_name_that_the_readme_promises_is_there() -> None:
    pages = README + (ROOT / "docs" / "from-vllm.md").read_text()
    named = set(re.findall(r"asynckv\.(\w+)(?!\w|\.\w)", pages)) - {"abc"}
    assert named <= set(asynckv.__all__)


def test_no_page_and_no_hint_installs_what_cannot_be_had() -> None:
    """Until asynckv is published it is installed from a checkout."""
    files = [*PAGES, *(ROOT / "asynckv").rglob("*.py")]
    named = re.compile(r"pip install (-\S+ \S+ )*[\"']?asynckv\b")
    assert [file for file in files if named.search(file.read_text())] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.name))
def test_every_link_to_a_file_leads_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text())
    assert [t for t in targets if not (page.parent / t).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.name))
def test_every_source_file_that_a_page_names_exists(page: Path) -> None:
    named = set(re.findall(r"\basynckv[/.][\w./]+\.py\b", page.read_text()))
    example = {"asynckv/x/y.py"}  # CONTRIBUTING.md says where its test would lie
    assert [path for path in named - example if not (ROOT / path).exists()] == []


@pytest.mark.multiprocess
async def test_the_fastapi_snippet_is_an_app(forks: ForkServer) -> None:
    snippet = next(text for text in python_snippets() if "FastAPI(" in text)
    code = snippet + "print(*app.openapi()['paths'])"
    assert await forks.printed_by(code) == "/decode\n"
