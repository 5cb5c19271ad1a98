from __future__ import annotations

import io
from pathlib import Path

import pytest

from asynckv.cli.checking import check_config
from asynckv.cli.main import main

GOOD = (
    '{"kv_connector": "StoreConnector", "kv_role": "kv_both", '
    '"kv_connector_extra_config": '
    '{"store": "tcp://127.0.0.1:7000", "fingerprint": "toy"}}'
)


def test_a_config_that_works_is_explained(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "config.json"
    file.write_text(GOOD)
    monkeypatch.setattr("sys.stdin", io.StringIO(GOOD))
    for given in (GOOD, f"@{file}", "-"):
        assert check_config(given) == 0
        assert "the store at tcp://127.0.0.1:7000" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("{", "not JSON"),
        ('{"kv_roll": "kv_both"}', "kv_role"),
        ('{"kv_role": "kv_both"}', '{"peer_url": "tcp://HOST:PORT"}'),
        ("@no such file", "No such file"),
    ],
)
def test_what_is_wrong_is_said_and_is_the_exit_status(
    given: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check_config(given) == 1
    assert words in capsys.readouterr().out


def test_the_command_takes_a_dash_for_standard_input(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(GOOD))
    with pytest.raises(SystemExit) as ended:
        main(["check-config", "-"])
    assert ended.value.code == 0
    assert "the store at" in capsys.readouterr().out


def test_without_one_the_environment_is_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ASYNCKV_KV_ROLE", "kv_producer")
    assert check_config() == 0
    assert "prefills for others" in capsys.readouterr().out
