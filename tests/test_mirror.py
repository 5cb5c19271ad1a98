from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "asynckv"
WITHOUT_A_MIRROR = {"__init__.py", "__main__.py"}


def test_every_source_file_has_its_test_file() -> None:
    inner = [path.relative_to(PACKAGE) for path in sorted(PACKAGE.rglob("*.py"))]
    missing = [
        f"{path}: tests/{path.parent / f'test_{path.name}'}"
        for path in inner
        if path.name not in WITHOUT_A_MIRROR
        if not (TESTS / path.parent / f"test_{path.name}").exists()
    ]
    assert not missing, "\n".join(missing)


def test_no_folder_of_tests_is_a_package() -> None:
    packages = {path.parent for path in TESTS.rglob("__init__.py")}
    harness = TESTS / "harness"
    assert {p for p in packages if not p.is_relative_to(harness)} == set()
