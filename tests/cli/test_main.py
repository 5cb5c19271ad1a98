from __future__ import annotations

import re
import subprocess
import sys

import pytest

import asynckv
from asynckv.cli.main import main


def test_the_version_is_the_package_s(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.strip() == asynckv.__version__


@pytest.mark.parametrize("columns", ["40", "80", "200"])
def test_help_has_a_line_for_every_command_at_any_width(
    columns: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    for name in ("bench", "check-config", "demo", "serve"):
        assert re.search(rf"│ {name} +[A-Z]\w+ ", shown), name


def test_help_of_a_command_is_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    assert "until Ctrl-C" in capsys.readouterr().out


def test_without_the_extra_one_line_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cyclopts", None)
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--store", "8MiB"])
    assert ended.value.code == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1
    assert '".[cli]"' in shown.err and "cyclopts" in shown.err


@pytest.mark.multiprocess
def test_a_url_at_which_nobody_listens_is_one_line() -> None:
    url = "unix:///nobody/listens/here"
    done = subprocess.run(
        [sys.executable, "-m", "asynckv", "bench", url, "--quick"],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout == (
        f"the bench failed: nobody listens at {url} "
        "(start the other side first, or check the address)\n"
    )


def test_an_unknown_option_is_an_error() -> None:
    with pytest.raises(SystemExit) as ended:
        main(["demo", "--no-such-option"])
    assert ended.value.code not in (0, None)


@pytest.mark.multiprocess
def test_help_needs_no_torch() -> None:
    code = (
        "import sys\n"
        "from asynckv.cli.main import main\n"
        "try:\n    main(['demo', '--help'])\n"
        "finally:\n    assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert b"--model" in done.stdout
