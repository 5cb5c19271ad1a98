"""No module of the package imports another that imports it: read, or imagined."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_no_modules_of_the_package_import_each_other() -> None:
    sources = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path.read_text()
        for path in (ROOT / "asynckv").rglob("*.py")
    }
    assert len(sources) > 100
    assert circle_in(sources) == []


@pytest.mark.parametrize(
    "back",
    [
        "import pkg.a",
        "from pkg.a import name",
        "from pkg import a",
        "if TYPE_CHECKING:\n    from pkg.a import Name",
        "def later():\n    from pkg.a import name",
    ],
)
def test_a_circle_is_found_wherever_it_is_closed(back: str) -> None:
    sources = {"pkg.a": "import pkg.b", "pkg.b": "from pkg.c import x", "pkg.c": back}
    assert sorted(set(circle_in(sources))) == ["pkg.a", "pkg.b", "pkg.c"]


def test_what_a_package_hands_on_is_no_circle() -> None:
    face, inner = "from pkg.a import A", "from pkg import __version__"
    assert circle_in({"pkg.__init__": face, "pkg.a": inner}) == []


def circle_in(sources: Mapping[str, str]) -> list[str]:
    """Return modules that import each other, the first one again as the last."""
    graph = {
        name: set(imported(ast.parse(text))) & set(sources) - {name}
        for name, text in sources.items()
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as exc:
        return list(exc.args[1])
    return []


def imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module and not node.level, "a relative import"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
