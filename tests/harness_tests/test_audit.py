"""What is audited here happens in functions that claim to be a package's own."""

from __future__ import annotations

import marshal  # noqa: TID251 - to be caught
import os
import pickle  # noqa: TID251 - to be caught
import subprocess
import sys
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

import asynckv
from harness.audit import Audit

PACKAGE = "/made/up/"
OURS = "/made/up/module.py"
CODE = compile("1", "somewhere", "eval")


@pytest.fixture
def audit(tmp_path: Path) -> Iterator[Audit]:
    audit = Audit(tmp_path, PACKAGE)
    audit.begin()
    yield audit
    audit.end()


def as_if_in(path: str) -> Callable[..., Any]:
    """Return a function of that file which calls what it is given."""
    names: dict[str, Any] = {}
    source = "def call(function, *arguments):\n    return function(*arguments)\n"
    exec(compile(source, path, "exec"), names)  # noqa: S102 - this is a test of that
    call: Callable[..., Any] = names["call"]
    return call


def test_this_very_run_is_audited() -> None:
    assert (Path(os.environ["ASYNCKV_AUDIT"]) / "sitecustomize.py").exists()


@pytest.mark.parametrize(
    ("event", "function", "argument"),
    [
        ("pickle.find_class", pickle.loads, pickle.dumps(Fraction(1, 2))),
        ("marshal.loads", marshal.loads, marshal.dumps(CODE)),
        ("exec", eval, CODE),
        ("compile", eval, "1 + 1"),
    ],
)
def test_what_the_package_does_is_found(
    audit: Audit, event: str, function: Callable[..., Any], argument: object
) -> None:
    as_if_in(OURS)(function, argument)
    assert any(where.startswith(f"{event} for {OURS}:2") for where in audit.found())


def test_what_others_unpickle_for_the_package_is_found(audit: Audit) -> None:
    data = pickle.dumps(Fraction(1, 2))
    as_if_in(OURS)(as_if_in("/lib/other.py"), pickle.loads, data)
    assert list(audit.found()) == [f"pickle.find_class for {OURS}:2"]


def test_what_others_do_by_themselves_is_theirs(audit: Audit) -> None:
    other = as_if_in("/lib/other.py")
    other(pickle.loads, pickle.dumps(Fraction(1, 2)))
    other(eval, "1 + 1")
    as_if_in(OURS)(other, eval, "1 + 1")
    assert not audit.found()


def test_importing_is_no_code_from_data(
    audit: Audit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "imported_once.py").write_text("value = 1")
    monkeypatch.syspath_prepend(tmp_path)
    for _ in range(2):  # from its source, and from what was kept of it
        assert as_if_in(OURS)(__import__, "imported_once").value == 1
        del sys.modules["imported_once"]
    assert not audit.found()


@pytest.mark.multiprocess
@pytest.mark.parametrize("forks", [False, True])
def test_what_a_process_does_that_is_started_meanwhile_is_found(
    audit: Audit, forks: bool
) -> None:
    code = f"""
import os
if not {forks} or os.fork() == 0:
    exec(compile("eval('1 + 1')", {OURS!r}, "exec"))
else:
    os.wait()
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    assert audit.found() == {f"compile for {OURS}:1": 1, f"exec for {OURS}:1": 1}


def test_what_is_started_afterwards_is_as_it_was_before(tmp_path: Path) -> None:
    before = dict(os.environ)
    audit = Audit(tmp_path, PACKAGE)
    audit.begin()
    assert dict(os.environ) != before
    audit.end()
    assert dict(os.environ) == before


@pytest.mark.multiprocess
@pytest.mark.parametrize("workers", ["0", "1"])
@pytest.mark.parametrize("argument", ["'1'", "1"])
def test_a_run_in_which_data_became_code_fails(
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    argument: str,
    workers: str,
) -> None:
    if watching := os.environ.get("ASYNCKV_AUDIT"):  # this very run is not to fail
        paths = os.environ["PYTHONPATH"].split(os.pathsep)
        paths.remove(watching)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
        monkeypatch.delenv("ASYNCKV_AUDIT")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take seconds
    path = str(Path(asynckv.__file__).parent / "made_up.py")
    pytester.makepyfile(
        f"""
        code = "def call(value):\\n    return eval(value) if value == '1' else 1"
        names = {{}}
        exec(compile(code, {path!r}, "exec"), names)

        def test_it():
            assert names["call"]({argument}) == 1
        """
    )
    plugins = ("-p", "xdist", "-p", "harness.audit")
    result = pytester.runpytest_subprocess(*plugins, "-n", workers)
    result.assert_outcomes(passed=1)
    assert result.ret == (argument == "'1'")
    if result.ret:
        result.stdout.fnmatch_lines(["data became code: compile for *made_up.py:2*"])
