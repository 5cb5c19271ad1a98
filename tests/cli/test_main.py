"""What is called from a shell, in this process and in others."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path

import pytest

import asynckv
from asynckv.cli.checking import check_config
from asynckv.cli.document import check_writable, write_document
from asynckv.cli.main import main
from asynckv.errors import ConfigError
from harness.forks import ForkServer


def status_of(*arguments: str) -> str | int | None:
    """Return the exit status of a command."""
    with pytest.raises(SystemExit) as ended:
        main([*arguments])
    return ended.value.code


def test_the_version_is_the_package_s(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of("--version") == 0
    assert capsys.readouterr().out.strip() == asynckv.__version__


@pytest.mark.parametrize("columns", ["40", "80", "200"])
def test_help_has_a_line_for_every_command_at_any_width(
    columns: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert status_of("--help") == 0
    shown = capsys.readouterr().out
    for name in ("bench", "check-config", "demo", "ping", "serve", "store"):
        assert re.search(rf"│ {name} +[A-Z]\w+ ", shown), name


def test_help_of_a_command_is_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of("serve", "--help") == 0
    assert "until SIGTERM or Ctrl-C" in capsys.readouterr().out


def test_a_demo_has_another_one_below_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of("demo", "--help") == 0
    assert re.search(r"│ cache +Two engines", capsys.readouterr().out)
    assert status_of("demo", "cache", "--help") == 0
    shown = capsys.readouterr().out
    assert "--model" in shown and "kill one of them" in shown


def test_without_the_extra_one_line_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cyclopts", None)
    assert status_of("serve", "--store", "8MiB") == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1
    assert '".[cli]"' in shown.err and "cyclopts" in shown.err


@pytest.mark.multiprocess
async def test_a_url_at_which_nobody_listens_is_one_line(forks: ForkServer) -> None:
    url = "unix:///nobody/listens/here"
    code = "from asynckv.cli.main import main\nmain()"
    async with forks.running(
        code, "bench", url, "--quick", stderr=subprocess.STDOUT
    ) as process:
        said = (await process.stdout.read()).decode()
        assert await process.wait() == 1
    assert said == (
        f"the bench failed: nobody listens at {url} "
        "(start the other side first, or check the address)\n"
    )


def test_an_unknown_option_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of("demo", "--no-such-option") == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1
    assert shown.err.startswith("asynckv: Unknown option: --no-such-option")


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("demo", b"--prompt"),
        ("demo cache", b"--model"),
        ("bench", b"--shape"),
        ("serve", b"--tier"),
        ("store", b"rm"),
        ("ping", b"--count"),
    ],
)
def test_help_needs_no_torch(command: str, option: bytes) -> None:
    code = (
        "import sys\n"
        "from asynckv.cli.main import main\n"
        f"try:\n    main('{command} --help'.split())\n"
        "finally:\n    assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert option in done.stdout


GOOD = (
    '{"kv_connector": "StoreConnector", "kv_role": "kv_both", '
    '"kv_connector_extra_config": '
    '{"store": "tcp://127.0.0.1:7000", "fingerprint": "toy"}}'
)


@pytest.mark.parametrize("given", [GOOD, "@config.json", "-"])
def test_a_config_that_works_is_explained(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    given: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(GOOD)
    monkeypatch.setattr("sys.stdin", io.StringIO(GOOD))
    assert check_config(given) == 0
    assert "the store at tcp://127.0.0.1:7000" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("{", "not JSON"),
        ('{"kv_roll": "kv_both"}', "kv_role"),
        ('{"kv_role": "kv_both"}', '{"peer_url": "tcp://HOST:PORT"}'),
        ("[" * 100_000 + "]" * 100_000, "nested too deeply"),
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
    assert status_of("check-config", "-") == 0
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


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nofile.json", "No such file or directory"),
        (".", "Is a directory"),
        ("binary", "it is not text in UTF-8"),
        ("a\0b", "embedded null byte"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_the_way_out(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    why: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff")
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


def test_no_problem_shows_a_password(capsys: pytest.CaptureFixture[str]) -> None:
    found = problems_of(
        '{"kv_role": "kv_both", "kv_port": "x", "kv_connector_extra_config": '
        '{"store": "redis://u:hunter2@h", "tls": {"password": "hunter2"}}}',
        capsys,
    )
    assert any("redis://u:***@h" in one for one in found)
    assert any("unknown field `password`" in one for one in found)
    assert "hunter2" not in "".join(found)


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


@pytest.mark.parametrize("package", ["asynckv.cli.demo", "asynckv.cli.bench"])
def test_a_document_is_whole_and_fetches_nothing(package: str) -> None:
    document = write_document("A title", package, "<p>words</p>")
    assert document.startswith("<!DOCTYPE html>") and document.endswith("</html>\n")
    assert "<title>A title</title>" in document
    assert "<main>\n<p>words</p>\n</main>" in document
    assert ":root" in document and "http" not in document


def test_a_path_that_can_be_written_is_let_through_and_nothing_is_created(
    tmp_path: Path,
) -> None:
    check_writable(tmp_path / "page.html")
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("name", ["", "missing/page.html"], ids=["folder", "nowhere"])
def test_a_path_that_cannot_be_written_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot write"):
        check_writable(tmp_path / name)


FAR = "tcp://192.0.2.1:1"


@pytest.mark.parametrize(
    "command",
    [
        ("ping", FAR),
        ("store", "stat", FAR, "key"),
        ("bench", FAR, "--loop", "asyncio"),
        ("serve", "--store", "1MiB", "--listen", "tcp://0.0.0.0:0"),
    ],
    ids=lambda command: command[0],
)
def test_a_hint_names_a_flag_where_the_library_s_names_an_argument(
    command: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    assert status_of(*command) == 1
    said = "".join(capfd.readouterr())
    assert "(use tls://, or pass --secret-file; on one host use unix://)" in said


def test_a_hint_names_the_flag_that_allows_plaintext(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    secret.write_text("s" * 64)
    assert status_of("ping", FAR, "--secret-file", str(secret)) == 1
    assert "or pass --allow-plaintext if" in capsys.readouterr().err


def test_a_hint_names_the_flags_of_certificates(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert status_of("ping", "tls://192.0.2.1:1") == 1
    said = capsys.readouterr().err
    assert "tls:// and --certificate, --key and --ca belong together" in said
