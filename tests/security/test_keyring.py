from __future__ import annotations

import contextlib
import copy
import itertools
import os
import pickle  # noqa: TID251 - to see it refused
import resource
import secrets
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from asynckv.errors import ConfigError
from asynckv.security.keyring import NO_KEYS, Keyring, Keys
from asynckv.security.private_files import check_private, read_private
from asynckv.security.shared_secret import (
    NONCE_BYTES,
    LaneProofs,
    Secret,
    Transcript,
    new_nonce,
    read_secrets,
    secret_file_from,
    secrets_from,
    who_proved,
)
from asynckv.testing.certificates import Authority


def mac_of(keys: Keys) -> bytes:
    assert keys.first_secret is not None
    return keys.first_secret.sign(b"message")


def test_without_keys_nothing_is_read() -> None:
    assert NO_KEYS.fresh() == NO_KEYS.current() == Keys()
    assert Keys().first_secret is None
    assert not NO_KEYS.has_secret
    assert repr(NO_KEYS) == "<Keyring of no keys>"


def test_secrets_that_were_given_are_there_at_once() -> None:
    secret = Secret(secrets.token_bytes(32))
    keyring = Keyring(secrets=(secret,))
    assert keyring.has_secret
    assert repr(keyring) == "<Keyring of a secret>"
    assert keyring.fresh() == keyring.current() == Keys((secret,))


def test_a_file_is_read_when_it_is_asked_for(make_secret: Callable[..., Path]) -> None:
    keyring = Keyring(secret_file=str(make_secret()))
    assert keyring.has_secret
    assert keyring.fresh() is None
    assert keyring.current() is keyring.current() is keyring.fresh()


def test_a_file_that_never_was_good_is_refused_each_time(
    make_secret: Callable[..., Path],
) -> None:
    path = make_secret("short")
    keyring = Keyring(secret_file=str(path))
    for _ in range(2):
        with pytest.raises(ConfigError, match="less than 32"):
            keyring.current()
    path.write_text(secrets.token_hex(32))
    assert keyring.current().first_secret is not None


def test_a_path_that_can_be_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be read: .*embedded null"):
        Keyring(secret_file="a\0b").current()


def test_a_file_that_has_changed_is_read_again(
    make_secret: Callable[..., Path],
) -> None:
    path, other = make_secret(), make_secret()
    keyring = Keyring(secret_file=str(path))
    before = mac_of(keyring.current())
    other.rename(path)
    assert mac_of(keyring.current()) != before


def test_a_file_that_has_gone_bad_leaves_the_old_keys_in_use(
    make_secret: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    path = make_secret()
    keyring = Keyring(secret_file=str(path))
    before = mac_of(keyring.current())
    os.unlink(path)
    assert mac_of(keyring.current()) == mac_of(keyring.current()) == before
    assert caplog.text.count("the old stay") == 1
    path.touch(0o600)
    path.write_text(secrets.token_hex(32))
    assert mac_of(keyring.current()) != before


def test_a_new_file_is_read_once_it_is_private_as_its_error_asks_for(
    make_secret: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    path, other = make_secret(), make_secret()
    keyring = Keyring(secret_file=str(path))
    before = mac_of(keyring.current())
    other.chmod(0o644)
    other.rename(path)
    assert mac_of(keyring.current()) == mac_of(keyring.current()) == before
    assert caplog.text.count(f"chmod 600 {path}") == 1
    path.chmod(0o600)
    assert mac_of(keyring.current()) == read_secrets(str(path))[0].sign(b"message")


def test_a_key_is_read_once_it_is_private(authority: Authority) -> None:
    tls = authority.issue()
    keyring = Keyring(tls=tls)
    before = keyring.current().tls
    for mode, is_read in ((0o644, False), (0o600, True)):
        os.chmod(tls.key, mode)
        assert (keyring.current().tls is not before) == is_read


def test_a_read_that_fails_once_is_tried_again(
    make_secret: Callable[..., Path],
) -> None:
    path, other = make_secret(), make_secret()
    keyring = Keyring(secret_file=str(path))
    before = mac_of(keyring.current())
    other.rename(path)
    with no_more_files():
        assert mac_of(keyring.current()) == before
    assert mac_of(keyring.current()) != before


@contextlib.contextmanager
def no_more_files() -> Iterator[None]:
    """Let this process open nothing."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "private"
    file.write_bytes(b"contents")
    file.chmod(0o600)
    return file


def test_a_private_file_is_read(path: Path) -> None:
    check_private(str(path))
    assert read_private(str(path)) == b"contents"
    path.chmod(0o400)
    assert read_private(str(path)) == b"contents"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610, 0o601, 0o777])
def test_a_file_that_others_can_touch_is_refused_with_what_to_do(
    path: Path, mode: int
) -> None:
    path.chmod(mode)
    with pytest.raises(ConfigError, match=f"its mode is 0{mode:o}") as caught:
        read_private(str(path))
    assert caught.value.hint == f"chmod 600 {path}"
    with pytest.raises(ConfigError):
        check_private(str(path))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_file_of_another_user_is_refused_also_by_root(path: Path) -> None:
    os.chown(path, 12345, -1)
    with pytest.raises(ConfigError, match="belongs to another user"):
        read_private(str(path))


def test_no_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_private(str(tmp_path / "none"))


def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(ConfigError, match="is no file"):
            read_private(str(path))


def test_a_link_is_judged_by_what_it_leads_to(path: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(path)
    assert read_private(str(link)) == b"contents"
    path.chmod(0o644)
    with pytest.raises(ConfigError):
        read_private(str(link))


def test_no_more_than_64_kib_are_read(path: Path) -> None:
    path.write_bytes(b"x" * 100_000)
    assert len(read_private(str(path))) == 64 * 1024


TEXT = "correct horse battery staple 0123".replace(" ", "-")
OTHER = TEXT[::-1]


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "secret"
    path.write_text(text)
    path.chmod(0o600)
    return str(path)


def shown_of(error: BaseException) -> str:
    """What a traceback with variables shows, but for those of the test itself."""
    shown = traceback.TracebackException.from_exception(error, capture_locals=True)
    return "".join(line for line in shown.format() if __file__ not in line)


def mac_by(text: str) -> bytes:
    return Secret(text.encode()).sign(b"message")


@pytest.mark.parametrize("text", [TEXT, f"{TEXT}\n", f"  \t{TEXT}\r\n\n"])
def test_a_secret_is_trimmed(tmp_path: Path, text: str) -> None:
    (secret,) = read_secrets(write(tmp_path, text))
    assert secret.sign(b"message") == mac_by(TEXT)


def test_a_file_holds_two_secrets_while_they_are_exchanged(tmp_path: Path) -> None:
    first, second = read_secrets(write(tmp_path, f"{TEXT}\n{OTHER}\n"))
    assert first.sign(b"message") == mac_by(TEXT)
    assert second.sign(b"message") == mac_by(OTHER)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds 0 secrets"),
        (f"{TEXT}\n{OTHER}\n{TEXT}", "holds 3 secrets"),
        (TEXT[:31], "less than 32 bytes"),
        (f"{TEXT} short", "less than 32 bytes"),
        ("a" * 64, "anybody could guess"),
        (TEXT + "\u00e9", "not ASCII"),
    ],
)
def test_what_is_no_secret_is_refused_with_how_to_make_one(
    tmp_path: Path, text: str, message: str
) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_secrets(path)
    assert path in str(caught.value)
    assert "openssl rand" in caught.value.hint
    with pytest.raises(ConfigError, match=f"ASYNCKV_SECRET .*{message}"):
        secrets_from({"ASYNCKV_SECRET": text})


def test_the_environment_holds_a_secret_or_the_path_of_one() -> None:
    assert secrets_from({}) == ()
    assert secret_file_from({}) is None
    (secret,) = secrets_from({"ASYNCKV_SECRET": TEXT})
    assert secret.sign(b"message") == mac_by(TEXT)
    assert secret_file_from({"ASYNCKV_SECRET_FILE": "/run/secret"}) == "/run/secret"


def test_two_places_at_once_are_refused() -> None:
    environ = {"ASYNCKV_SECRET": TEXT, "ASYNCKV_SECRET_FILE": "/run/secret"}
    with pytest.raises(ConfigError, match="both"):
        secret_file_from(environ)


def test_a_secret_does_not_show_itself() -> None:
    secret = Secret(TEXT.encode())
    shown = f"{secret} {secret!r} {[secret]} {secret.derive(b'lanes')}"
    assert shown == "<Secret> <Secret> [<Secret>] <Secret>"
    for copies in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="not pickled"):
            copies(secret)


@pytest.mark.parametrize("text", [f"{TEXT} {TEXT} {TEXT}", f"{TEXT} short", TEXT + "é"])
def test_no_traceback_shows_a_secret(tmp_path: Path, text: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        read_secrets(path)
    assert TEXT not in shown_of(caught.value)


@pytest.mark.parametrize("byte", ["\udcff", "\ud800"])
def test_an_environment_that_is_no_text_does_not_show_its_secret(byte: str) -> None:
    environ = {"ASYNCKV_SECRET": TEXT + byte}
    with pytest.raises(ConfigError, match="not ASCII") as caught:
        secrets_from(environ)
    assert caught.value.__context__ is None
    assert shown_of(caught.value).count(TEXT) == 0


def test_only_its_own_mac_is_its_own() -> None:
    secret = Secret(TEXT.encode())
    mac = secret.sign(b"message")
    assert len(mac) == 32
    assert secret.has_signed(b"message", mac)
    assert not secret.has_signed(b"massage", mac)
    assert not secret.has_signed(b"message", mac[:-1])
    assert not secret.has_signed(b"message", b"")
    assert not Secret(OTHER.encode()).has_signed(b"message", mac)
    assert not secret.derive(b"lanes").has_signed(b"message", mac)


OURS, ANOTHER = Secret(b"o" * 32), Secret(b"x" * 32)


def transcript_of(*said: bytes, binding: bytes = b"") -> Transcript:
    transcript = Transcript(binding)
    for each in said:
        transcript.add(each)
    return transcript


@pytest.mark.refusal
def test_a_proof_is_good_for_its_secret_its_side_and_its_words_only() -> None:
    here, there = transcript_of(b"a", b"b"), transcript_of(b"a", b"b")
    proof = here.prove(OURS, "dialling")
    assert there.is_proved(OURS, "dialling", proof)
    assert not there.is_proved(OURS, "listening", proof)
    assert not there.is_proved(ANOTHER, "dialling", proof)
    assert not there.is_proved(OURS, "dialling", proof[:-1])
    there.add(b"c")
    assert not there.is_proved(OURS, "dialling", proof)


@pytest.mark.refusal
@given(st.lists(st.binary(max_size=4), max_size=4), st.lists(st.binary(max_size=4)))
def test_other_words_make_another_proof(
    first: list[bytes], second: list[bytes]
) -> None:
    proof = transcript_of(*first).prove(OURS, "dialling")
    is_same = transcript_of(*second).is_proved(OURS, "dialling", proof)
    assert is_same == (first == second)


@pytest.mark.refusal
def test_the_same_words_over_another_connection_prove_nothing() -> None:
    proof = transcript_of(b"a", binding=b"one").prove(OURS, "dialling")
    assert not transcript_of(b"a").is_proved(OURS, "dialling", proof)
    assert not transcript_of(b"a", binding=b"two").is_proved(OURS, "dialling", proof)
    assert transcript_of(b"a", binding=b"one").is_proved(OURS, "dialling", proof)


def test_either_of_two_secrets_is_found() -> None:
    for secret in (OURS, ANOTHER):
        transcript = transcript_of(b"a")
        proof = transcript.prove(secret, "dialling")
        assert who_proved([OURS, ANOTHER], transcript, "dialling", proof) is secret
    assert who_proved([OURS], transcript, "dialling", proof) is None
    assert who_proved([], transcript, "dialling", b"") is None


@pytest.mark.refusal
def test_a_lane_is_proved_by_number_side_and_link() -> None:
    key = transcript_of(b"a").lane_key(OURS)
    links = [LaneProofs(key), LaneProofs(transcript_of(b"b").lane_key(OURS))]
    claims = list(itertools.product(links, ("dialling", "listening"), range(2)))
    proofs = [link.prove(role, lane) for link, role, lane in claims]  # type: ignore[arg-type]
    assert len(set(proofs)) == len(proofs)
    for (link, role, lane), proof in itertools.product(claims, proofs):
        good = link.prove(role, lane) == proof  # type: ignore[arg-type]
        assert link.is_proved(role, lane, proof) == good  # type: ignore[arg-type]


@pytest.mark.refusal
def test_without_a_key_there_is_nothing_to_prove() -> None:
    proofs = LaneProofs()
    assert proofs.prove("dialling", 0) == b""
    assert proofs.is_proved("dialling", 0, b"")
    assert not proofs.is_proved("dialling", 0, b"x")


def test_no_nonce_comes_twice() -> None:
    nonces = {new_nonce() for _ in range(1000)}
    assert len(nonces) == 1000
    assert {len(nonce) for nonce in nonces} == {NONCE_BYTES}
