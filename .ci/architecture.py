"""Draws docs/architecture.svg: the floors of asynckv and what each imports.

    python .ci/architecture.py [--check]

Read from ``pyproject.toml`` (the floors, which import-linter enforces) and from the
imports. An arrow that others lead to anyway is left out. ``--check`` fails where the
picture is not up to date.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent
PACKAGE: Final = ROOT / "asynckv"
PICTURE: Final = ROOT / "docs" / "architecture.svg"

Imports = Mapping[str, frozenset[str]]

_WIDTH, _ROW, _BOX, _GAP, _LEFT, _TOP = 980, 46, 116, 14, 70, 12
_STYLE: Final = """
  text { font: 12.5px system-ui, sans-serif; fill: #1f2933 }
  .name { font-weight: 600; text-anchor: middle }
  .what { fill: #52606d }
  rect { fill: #e6f0fa; stroke: #7b9cc0; rx: 5 }
  path { fill: none; stroke: #9aa5b1; stroke-width: 1.2 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e4e7eb } .what { fill: #9aa5b1 }
    rect { fill: #243b53; stroke: #627d98 } path { stroke: #627d98 }
  }
"""


def floors() -> list[list[str]]:
    """Return the names on each floor, the highest first."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    layers = next(one["layers"] for one in contracts if one["id"] == "floors")
    return [layer.split(" | ") for layer in layers if layer != "__main__"]


def imports(names: set[str]) -> dict[str, frozenset[str]]:
    """Return what each of these parts of the package imports of the others."""
    found: dict[str, set[str]] = {name: set() for name in names}
    for path in sorted(PACKAGE.rglob("*.py")):
        inner = path.relative_to(PACKAGE)
        part = inner.parts[0].removesuffix(".py")
        if part in names:
            found[part].update(set(_imported(path)) & names - {part})
    return {name: frozenset(others) for name, others in found.items()}


def needed(graph: Imports) -> list[tuple[str, str]]:
    """Return the arrows that no others lead to anyway."""
    return [
        (name, other)
        for name, others in sorted(graph.items())
        for other in sorted(others)
        if not any(other in _reached(via, graph) for via in others - {other})
    ]


def drawn() -> str:
    """Return the picture, as SVG."""
    rows = floors()
    names = {name for row in rows for name in row}
    at = {
        name: (_LEFT + column * (_BOX + _GAP), _TOP + row * _ROW)
        for row, some in enumerate(rows)
        for column, name in enumerate(some)
    }
    parts = [_arrow(at[upper], at[lower]) for upper, lower in needed(imports(names))]
    for row, some in enumerate(rows):
        parts += [_box(name, *at[name]) for name in some]
        x = _LEFT + len(some) * (_BOX + _GAP) + 6
        y = _TOP + row * _ROW + 18 - 7 * (len(some) - 1)
        for line, what in enumerate(map(_first_line, some)):
            at_y = f'x="{x}" y="{y + 14 * line}"'
            parts.append(f'<text class="what" {at_y}>{escape(what)}</text>')
    height = 2 * _TOP + len(rows) * _ROW
    size = f'viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}"'
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" '
        f'aria-label="The floors of asynckv, and what each imports">\n'
        f"<style>{_STYLE}</style>\n{body}\n</svg>\n"
    )


def _box(name: str, x: int, y: int) -> str:
    return (
        f'<rect x="{x}" y="{y}" width="{_BOX}" height="28"/>'
        f'<text class="name" x="{x + _BOX // 2}" y="{y + 18}">{name}</text>'
    )


def _arrow(upper: tuple[int, int], lower: tuple[int, int]) -> str:
    """Return a line from a box to one below: straight to the next row, else around."""
    (x1, y1), (x2, y2) = upper, lower
    rows = (y2 - y1) // _ROW
    if rows == 1:
        middle = _BOX // 2
        return f'<path d="M{x1 + middle} {y1 + 28} L{x2 + middle} {y2}"/>'
    out = _LEFT - min(10 + 5 * rows, _LEFT - 4)
    return (
        f'<path d="M{x1} {y1 + 14} C{out} {y1 + 14} {out} {y1 + 40} {out} {y1 + 60} '
        f'L{out} {y2 - 30} C{out} {y2 - 10} {out} {y2 + 14} {x2} {y2 + 14}"/>'
    )


def _first_line(name: str) -> str:
    path = PACKAGE / name / "__init__.py"
    if not path.exists():
        path = PACKAGE / f"{name}.py"
    doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return doc.partition("\n")[0].rstrip(".").replace("``", "")


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == "asynckv":
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            package, _, inner = node.module.partition(".")
            if package == "asynckv":
                yield inner.partition(".")[0]


def _reached(name: str, graph: Imports) -> set[str]:
    reached: set[str] = set()
    ahead = [name]
    while ahead:
        new = graph[ahead.pop()] - reached
        reached |= new
        ahead += new
    return reached


def main() -> None:
    """Draw it, or check that it is as it would be drawn."""
    picture = drawn()
    if "--check" not in sys.argv:
        PICTURE.write_text(picture, encoding="utf-8")
    elif picture != PICTURE.read_text(encoding="utf-8"):
        raise SystemExit("docs/architecture.svg is old: python .ci/architecture.py")


if __name__ == "__main__":
    main()
