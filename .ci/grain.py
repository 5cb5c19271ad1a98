"""The grain of the package: how many files, how large, how tied. Figures, no verdict.

``python .ci/grain.py [--circles]``. A statement is any ``ast.stmt`` but a docstring;
a circle is a set of modules that import each other, also under TYPE_CHECKING and inside
functions.
"""

from __future__ import annotations

import ast
import dataclasses
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

__all__ = ("Module", "circles_of", "read")

ROOT = Path(__file__).resolve().parents[1]
SHORT_LINES = 60
WIDE_FILES = 15
DEFINES = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclasses.dataclass(frozen=True)
class Module:
    """One file: its place below the package, its size, and what it imports."""

    path: Path
    lines: int
    statements: int
    imports: frozenset[str]

    @property
    def name(self) -> str:
        """As it is imported."""
        return ".".join(self.path.with_suffix("").parts).removesuffix(".__init__")

    @property
    def part(self) -> str:
        """The package that it is a part of, "asynckv/links" for one."""
        return "/".join(self.path.parts[:2]) if len(self.path.parts) > 2 else "asynckv"


def read(root: Path) -> list[Module]:
    """Read every file of the package that lies below ``root``."""
    return [_module(path, root) for path in sorted((root / "asynckv").rglob("*.py"))]


def circles_of(modules: list[Module]) -> list[list[str]]:
    """Return each set of modules of which every one imports every other, at last."""
    names = {module.name for module in modules}
    # The face of a package hands names on: a child that imports it is no circle.
    faces = {module.name for module in modules if module.path.name == "__init__.py"}
    graph = {
        module.name: (module.imports & names) - {module.name}
        if module.name not in faces
        else frozenset[str]()
        for module in modules
    }
    reached = {name: _reached(name, graph) for name in graph}
    found = {
        frozenset({name, *(other for other in reached[name] if name in reached[other])})
        for name in graph
        if name in reached[name]
    }
    return sorted((sorted(circle) for circle in found), key=len, reverse=True)


def main() -> None:
    """Print the figures of this checkout."""
    modules = read(ROOT)
    parts: dict[str, list[Module]] = defaultdict(list)
    folders: dict[Path, int] = defaultdict(int)
    for module in modules:
        parts[module.part].append(module)
        folders[module.path.parent] += module.path.name != "__init__.py"
    print(
        f"{'part':24}{'files':>8}{'lines':>8}{'statements':>12}{'median':>8}{'short':>7}"
    )
    for part, inside in sorted(parts.items()):
        print(f"{part:24}{_figures(inside)}")
    print(f"{'in the wheel':24}{_figures(modules)}")
    wide = sorted((-n, str(folder)) for folder, n in folders.items() if n > WIDE_FILES)
    print("folders of more files than 15:", *(f"{name} {-n}," for n, name in wide))
    print("files of more lines than 600:", *(m.path for m in modules if m.lines > 600))
    circles = circles_of(modules)
    print(f"circles: {len(circles)}, of {[len(circle) for circle in circles]} files")
    if "--circles" in sys.argv:
        for circle in circles:
            print(" ", *circle)


def _figures(modules: list[Module]) -> str:
    lines = [module.lines for module in modules]
    short = sum(n < SHORT_LINES for n in lines)
    statements = sum(module.statements for module in modules)
    median = statistics.median(lines)
    return f"{len(lines):8}{sum(lines):8}{statements:12}{median:8.0f}{short:7}"


def _module(path: Path, root: Path) -> Module:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    nodes = list(ast.walk(tree))
    documented = (node for node in nodes if isinstance(node, DEFINES))
    statements = sum(isinstance(node, ast.stmt) for node in nodes) - sum(
        ast.get_docstring(node, clean=False) is not None for node in documented
    )
    imports = frozenset(_imports(nodes))
    return Module(path.relative_to(root), text.count("\n"), statements, imports)


def _imports(nodes: list[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _reached(name: str, graph: Mapping[str, frozenset[str]]) -> set[str]:
    """All that importing ``name`` imports; itself, if it comes back to it."""
    reached: set[str] = set()
    ahead = list(graph[name])
    while ahead:
        if (one := ahead.pop()) not in reached:
            reached.add(one)
            ahead += graph[one]
    return reached


if __name__ == "__main__":
    main()
