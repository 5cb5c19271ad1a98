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


def problems_of(given: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert check_config(given) == 1
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith("wrong: ") for line in lines)
    return [line.removeprefix("wrong: ") for line in lines]


def test_a_file_that_cannot_be_read_is_named_with_the_way_out(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff")
    for name, why in (
        ("nofile.json", "No such file or directory"),
        (str(tmp_path), "Is a directory"),
        (str(binary), "it is not text in UTF-8"),
        ("a\0b", "embedded null byte"),
    ):
        (problem,) = problems_of(f"@{name}", capsys)
        assert problem.startswith(f"{name!r} cannot be read: {why} (write @ and the")


def test_every_field_and_option_that_is_malformed_is_named_in_one_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = problems_of(
        '{"kv_prt": 1, "kv_role": "producer", "kv_port": "x", "kv_rank": -1, '
        '"kv_buffer_size": "lots", "kv_connector": "StorConnector", '
        '"kv_buffer_device": "tpu", '
        '"kv_connector_extra_config": {"secret": "s", "lisen": "mem://a", "ttl_s": 0, '
        '"store": "redis://h", "store_timeout": 0, "allow_plaintext": 3}}',
        capsys,
    )
    words = ("'kv_prt' is no", "kv_role is", "kv_port is", "kv_rank is -1")
    options = ("secret is no option", "lisen is no option", "ttl_s is 0", "store: ")
    more = ("kv_buffer_size: 'lots'", "store_timeout is 0", "allow_plaintext is 3")
    read = ("no connector 'StorConnector'", "kv_buffer_device 'tpu'")
    for word in (*words, *options, *more, *read):
        assert len([one for one in found if word in one]) == 1, (word, found)
    assert len(found) == len((*words, *options, *more, *read))


def test_the_environment_s_malformed_fields_are_all_named_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ASYNCKV_KV_PORT", "many")
    monkeypatch.setenv("ASYNCKV_KV_ROLE", "both")
    monkeypatch.setenv("ASYNCKV_KV_CONNECTOR_EXTRA_CONFIG", '{"local_rank": "x"}')
    assert check_config() == 1
    found = capsys.readouterr().out
    for word in ("ASYNCKV_KV_PORT is 'many'", "kv_role is 'both'", "local_rank is 'x'"):
        assert found.count(word) == 1
