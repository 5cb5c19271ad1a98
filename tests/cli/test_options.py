"""Options from flags, the environment and a file, and what is said of wrong ones."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from cyclopts import App, CycloptsError

from asynckv.cli.options import ENVIRONMENT, ServeOptions, from_file
from asynckv.errors import ConfigError
from asynckv.types import KVFingerprint

DEFAULTS = ServeOptions()


def parsed(*arguments: str) -> ServeOptions:
    """Return what ``asynckv serve`` makes of its arguments here."""
    found: list[ServeOptions] = []

    def serve(options: ServeOptions = DEFAULTS) -> None:
        found.append(options)

    app = App(exit_on_error=False, print_error=False, result_action="return_value")
    app.command(App(name="store"))  # one that is named as an option
    app.command(serve, config=[ENVIRONMENT, from_file])
    app(["serve", *arguments])
    return found[0]


def test_without_any_there_are_defaults() -> None:
    assert parsed() == ServeOptions()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("serve.toml", 'store = "8GiB"\ndrain-s = 4\ntier = ["disk:///a?max=1GiB"]'),
        ("serve.toml", 'store = 8589934592\ndrain_s = 4\ntier = "disk:///a?max=1GiB"'),
        ("serve.json", '{"store": "8GiB", "drain_s": 4, "tier": ["disk:///a?max=1G"]}'),
    ],
)
def test_a_file_has_options_by_their_names(
    tmp_path: Path, name: str, text: str
) -> None:
    (tmp_path / name).write_text(text)
    found = parsed("--config", str(tmp_path / name))
    assert (found.store, found.drain_s, len(found.tier)) == (8 * 2**30, 4.0, 1)


def test_flags_count_before_the_environment_and_that_before_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "serve.toml"
    file.write_text('listen = "unix:///file"\nnamespace = "file"\nadmit = "second_use"')
    monkeypatch.setenv("ASYNCKV_CONFIG", str(file))
    monkeypatch.setenv("ASYNCKV_LISTEN", "unix:///env")
    monkeypatch.setenv("ASYNCKV_NAMESPACE", "env")
    found = parsed("--listen", "unix:///flag")
    assert found.listen == "unix:///flag"
    assert found.namespace == "env"
    assert found.admit == "second_use"


def test_tiers_are_a_list_in_each_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    tiers = ("disk:///a?max=1GiB", "disk:///b?max=1GiB")
    assert parsed("--tier", tiers[0], "--tier", tiers[1]).tier == tiers
    monkeypatch.setenv("ASYNCKV_TIER", " ".join(tiers))
    assert parsed().tier == tiers


def test_tenants_are_pairs_and_each_comes_once() -> None:
    found = parsed("--store", "1MiB", "--tenant", "a=b.example", "--tenant", "c=d")
    assert found.tenant == (("a", "b.example"), ("c", "d"))
    twice = dataclasses.replace(found, tenant=(("a", "b"), ("a", "c")))
    with pytest.raises(ConfigError, match="same tenant twice"):
        twice.check()
    for wrong in ("a", "=b", "a="):
        with pytest.raises(CycloptsError, match="is not NAME=CERTIFICATE_NAME"):
            parsed("--tenant", wrong)


def test_variables_of_other_things_are_nobody_s_options(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ASYNCKV_KV_ROLE", "kv_both")
    monkeypatch.setenv("ASYNCKV_SECRET", "x" * 40)
    assert parsed() == ServeOptions()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('stroe = "8GiB"', "stroe"),
        ('store = "many"', "'many' is not a size"),
        ("drain_s = -1", "-1 is not 0 to 86400 seconds"),
        ("drain_s = nan", "nan is not 0 to 86400 seconds"),
        ('drain_s = "soon"', "drain_s"),
        ('admit = "never"', "admit"),
        ('tier = ["dsik:///a?max=1GiB"]', "no tier is called 'dsik' (there are: disk"),
        ('tier = ["disk://a?max=1GiB"]', "three slashes"),
        ("[serve]\nlookup = 1", "serve"),
    ],
)
def test_what_is_wrong_in_a_file_is_said_with_the_name_of_the_file(
    tmp_path: Path, line: str, words: str
) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(line)
    with pytest.raises(CycloptsError) as wrong:
        parsed("--config", str(file))
    assert words in str(wrong.value) and str(file) in str(wrong.value)


@pytest.mark.parametrize(
    ("name", "text"), [("STORE", "many"), ("DRAIN_S", "soon"), ("TIER", "dsik:/a")]
)
def test_what_is_wrong_in_a_variable_is_said_with_its_name(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    monkeypatch.setenv(f"ASYNCKV_{name}", text)
    with pytest.raises(CycloptsError, match=f"ASYNCKV_{name}"):
        parsed()


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("none.toml", None, "No such file"),
        ("bad.toml", b"store =", "Invalid value"),
        ("bad.json", b"{", "Expecting property name"),
        ("bad.toml", b"\xff", "can't decode"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_the_way_out(
    tmp_path: Path, name: str, content: bytes | None, why: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=f"{name}' cannot be read: .*{why}") as wrong:
        parsed("--config", str(tmp_path / name))
    assert wrong.value.hint


def test_a_password_in_a_wrong_tier_is_not_repeated() -> None:
    with pytest.raises(CycloptsError) as wrong:
        parsed("--tier", "disk://user:hunter2@host/a?max=1GiB")
    assert "hunter2" not in str(wrong.value) and "***" in str(wrong.value)


def test_a_fingerprint_is_a_name_or_its_fields() -> None:
    assert parsed("--fingerprint", "llama").fingerprint == KVFingerprint("llama")
    both = KVFingerprint("llama", dtype="bf16")
    text = '{"model": "llama", "dtype": "bf16"}'
    assert parsed("--fingerprint", text).fingerprint == both


@pytest.mark.parametrize("text", ['{"modle": "llama"}', "{", '{"model": 3}'])
def test_what_is_no_fingerprint_is_refused(text: str) -> None:
    with pytest.raises(CycloptsError, match="--fingerprint: not a fingerprint"):
        parsed("--fingerprint", text)
