"""Options from flags, the environment and a file, and what is said of wrong ones."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from cyclopts import App, CycloptsError

from asynckv.cli.options import (
    ENVIRONMENT,
    NO_KEY_OPTIONS,
    KeyOptions,
    ServeOptions,
    from_file,
)
from asynckv.errors import ConfigError
from asynckv.types import KVFingerprint

DEFAULTS = ServeOptions()


def parsed(*arguments: str) -> ServeOptions:
    """Return what ``asynckv serve`` makes of its arguments here."""
    return parsed_with_keys(*arguments)[0]


def parsed_with_keys(*arguments: str) -> tuple[ServeOptions, KeyOptions]:
    found: list[tuple[ServeOptions, KeyOptions]] = []

    def serve(
        options: ServeOptions = DEFAULTS, keys: KeyOptions = NO_KEY_OPTIONS
    ) -> None:
        found.append((options, keys))

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


OPTIONS = {
    "listen": ("mem://a", "mem://b", "mem://c"),
    "lookup": ("1MiB", "2MiB", "3MiB"),
    "store": ("1MiB", "2MiB", "3MiB"),
    "tier": ("disk:///a?max=1GiB", "disk:///b?max=1GiB", "disk:///c?max=1GiB"),
    "admit": ("second_use", "always", "second_use"),
    "namespace": ("a", "b", "c"),
    "tenant": ("a=a", "b=b", "c=c"),
    "fingerprint": ("a", "b", "c"),
    "http": ("a:1", "b:1", "c:1"),
    "drain_s": ("1", "2", "3"),
    "log_level": ("debug", "error", "warning"),
    "secret_file": ("/a", "/b", "/c"),
    "certificate": ("/a", "/b", "/c"),
    "key": ("/a", "/b", "/c"),
    "ca": ("/a", "/b", "/c"),
}
"""Of each option, what a flag, the environment and a file say."""


@pytest.mark.parametrize("name", OPTIONS)
def test_flags_count_before_the_environment_and_that_before_the_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flag, variable, line = OPTIONS[name]
    option = "--" + name.replace("_", "-")

    def taken(*arguments: str) -> object:
        options, keys = parsed_with_keys(*arguments)
        return {**vars(options), **vars(keys)}[name]

    by_flags = {text: taken(option, text) for text in OPTIONS[name]}
    file = tmp_path / "serve.toml"
    file.write_text(f'{name} = "{line}"')
    assert taken() != taken("--config", f"{file}") == by_flags[line]
    monkeypatch.setenv("ASYNCKV_CONFIG", str(file))
    assert taken() == by_flags[line]
    monkeypatch.setenv(f"ASYNCKV_{name.upper()}", variable)
    assert taken() == by_flags[variable]
    assert taken(option, flag) == by_flags[flag]


def test_a_switch_of_the_environment_counts_before_that_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "serve.toml"
    file.write_text("allow_plaintext = true")
    arguments = ("--config", str(file))
    assert parsed_with_keys(*arguments)[1].allow_plaintext
    monkeypatch.setenv("ASYNCKV_ALLOW_PLAINTEXT", "false")
    assert not parsed_with_keys(*arguments)[1].allow_plaintext
    assert parsed_with_keys(*arguments, "--allow-plaintext")[1].allow_plaintext


def test_of_every_option_it_is_known_what_counts() -> None:
    known = {*vars(DEFAULTS), *vars(NO_KEY_OPTIONS)}
    assert known == {*OPTIONS, "config", "allow_plaintext"}


@pytest.mark.parametrize("name", ["tier", "tenant"])
def test_an_empty_list_is_empty(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(f"{name} = []")
    assert vars(parsed("--config", str(file)))[name] == ()
    monkeypatch.setenv(f"ASYNCKV_{name.upper()}", "")
    assert parsed() == ServeOptions()


def test_a_file_does_not_name_another_one(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text('config = "other.toml"')
    with pytest.raises(ConfigError, match=f"config is no option .*{file}"):
        parsed("--config", str(file))


def test_a_secret_of_the_environment_and_a_file_of_one_are_refused_but_for_a_flag(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ASYNCKV_SECRET", "x" * 40)
    monkeypatch.setenv("ASYNCKV_SECRET_FILE", "/b")
    with pytest.raises(ConfigError, match="both ASYNCKV_SECRET_FILE and"):
        parsed()
    monkeypatch.delenv("ASYNCKV_SECRET_FILE")
    file = tmp_path / "serve.toml"
    file.write_text('secret_file = "/c"')
    with pytest.raises(ConfigError, match=f"both secret_file in {file} and"):
        parsed("--config", str(file))
    assert parsed_with_keys("--secret-file", "/a")[1].secret_file == Path("/a")


def test_tiers_are_a_list_in_each_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    tiers = ("disk:///a?max=1GiB", "disk:///b?max=1GiB")
    assert parsed("--tier", tiers[0], "--tier", tiers[1]).tier == tiers
    monkeypatch.setenv("ASYNCKV_TIER", " ".join(tiers))
    assert parsed().tier == tiers


def test_tenants_are_pairs_and_each_comes_once() -> None:
    found = parsed("--store", "1MiB", "--tenant", "a=b.example", "--tenant", "c=d")
    assert found.tenant == (("a", "b.example"), ("c", "d"))
    twice = dataclasses.replace(found, tenant=(("a", "b"), ("a", "c")))
    keys = KeyOptions(certificate=Path("a"), key=Path("b"), ca=Path("c"))
    with pytest.raises(ConfigError, match="same tenant twice"):
        twice.check(keys)
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
        ("deep.json", b"[" * 100_000, "recursion"),
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


@pytest.mark.parametrize("text", ["3", '["config"]', "null"])
def test_a_file_that_holds_no_options_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "serve.json"
    file.write_text(text)
    with pytest.raises(CycloptsError, match="must be a mapping"):
        parsed("--config", str(file))


@pytest.mark.parametrize(
    "url",
    [
        "disk://user:hunter2@host/a?max=1GiB",
        "redis://user:hunter2/@host:1",
        "redis://user:hunter2\u2100@host",
    ],
)
def test_a_password_in_a_wrong_tier_is_not_repeated(url: str) -> None:
    with pytest.raises(CycloptsError) as wrong:
        parsed("--tier", url)
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
