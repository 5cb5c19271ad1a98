from __future__ import annotations

import functools
from pathlib import Path

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "asynckv"
WITHOUT_A_MIRROR = {"__init__.py", "__main__.py"}


def test_every_source_file_is_tested_in_its_mirror() -> None:
    """By a file of its name, or by the tests of its folder that import it."""
    inner = [path.relative_to(PACKAGE) for path in sorted(PACKAGE.rglob("*.py"))]
    missing = [
        f"{path}: tests/{path.parent / f'test_{path.name}'}"
        for path in inner
        if path.name not in WITHOUT_A_MIRROR
        if not (TESTS / path.parent / f"test_{path.name}").exists()
        if not any(imports(test, path) for test in read_tests_in(path.parent))
    ]
    assert not missing, "\n".join(missing)


@functools.cache
def read_tests_in(folder: Path) -> list[str]:
    return [path.read_text() for path in (TESTS / folder).glob("test_*.py")]


def imports(test: str, source: Path) -> bool:
    module = ".".join(("asynckv", *source.with_suffix("").parts))
    return f"from {module} import" in test


def test_no_folder_of_tests_is_a_package() -> None:
    packages = {path.parent for path in TESTS.rglob("__init__.py")}
    harness = TESTS / "harness"
    assert {p for p in packages if not p.is_relative_to(harness)} == set()
