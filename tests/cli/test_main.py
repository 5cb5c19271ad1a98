from __future__ import annotations

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


def test_help_names_every_sub_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "demo" in capsys.readouterr().out


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
