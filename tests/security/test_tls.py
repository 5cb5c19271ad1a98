from __future__ import annotations

import dataclasses
import ssl
import subprocess
from pathlib import Path
from typing import Any

import pytest

from asynckv.errors import AuthError, ConfigError, PeerLost
from asynckv.security.names import CertifiedNames, names_in
from asynckv.security.tls import (
    TLS,
    digest_of_certificate,
    read_tls,
    tls_failure,
)
from asynckv.testing.certificates import Authority


def changed(tls: TLS, **changes: Any) -> TLS:
    return dataclasses.replace(tls, **changes)


def test_only_tls_1_3_with_certificates_of_both_sides(authority: Authority) -> None:
    keys = read_tls(authority.issue())
    for context in (keys.listening, keys.dialling):
        assert context.minimum_version == ssl.TLSVersion.TLSv1_3
        assert context.verify_mode == ssl.CERT_REQUIRED
        assert len(context.get_ca_certs()) == 1  # not those of the system
    assert keys.dialling.check_hostname
    assert keys.listening.num_tickets == 0


def test_a_common_name_names_nobody(authority: Authority) -> None:
    keys = read_tls(authority.issue())
    assert keys.dialling.check_hostname
    assert not keys.dialling.hostname_checks_common_name


def test_what_is_allowed_is_kept(authority: Authority) -> None:
    tls = changed(authority.issue(), allowed_peers=("a",), server_name="b")
    keys = read_tls(tls)
    assert (keys.allowed_peers, keys.server_name) == (("a",), "b")
    assert "PRIVATE" not in repr(keys) + repr(tls)


def test_allowed_peers_are_several(authority: Authority) -> None:
    with pytest.raises(ConfigError, match=r"write \('worker-1',\)"):
        changed(authority.issue(), allowed_peers="worker-1")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(
            (field, path)
            for field in ("certificate", "key", "ca")
            for path in (5, "\0")
        ),
        *(("allowed_peers", names) for names in (5, (5,), ("a", None), iter("ab"))),
        *(("server_name", name) for name in (5, ".x", "a..b", "x\0y", "\u00e4" * 70)),
    ],
)
def test_what_can_be_none_is_refused_where_it_is_said(field: str, value: Any) -> None:
    files: dict[str, Any] = {"certificate": "a", "key": "b", "ca": "c"}
    with pytest.raises(ConfigError, match=f"{field} is ") as caught:
        TLS(**files | {field: value})
    assert caught.value.hint


def test_the_first_certificate_of_a_chain_is_ones_own(
    authority: Authority, tmp_path: Path
) -> None:
    tls = authority.issue()
    chain = tmp_path / "chain.pem"
    chain.write_text(Path(tls.certificate).read_text() + authority.path.read_text())
    own = read_tls(tls).certificate_digest
    assert read_tls(changed(tls, certificate=chain)).certificate_digest == own
    der = ssl.PEM_cert_to_DER_cert(authority.path.read_text())
    assert digest_of_certificate(der) != own


def test_a_key_that_others_can_read_is_refused(authority: Authority) -> None:
    tls = authority.issue()
    Path(tls.key).chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_tls(tls)


@pytest.mark.parametrize("field", ["certificate", "key", "ca"])
def test_a_file_that_is_missing_or_nonsense_is_named(
    authority: Authority, tmp_path: Path, field: str
) -> None:
    nonsense = tmp_path / "nonsense.pem"
    nonsense.write_text("nonsense")
    nonsense.chmod(0o600)
    for path in (nonsense, tmp_path / "none.pem"):
        with pytest.raises(ConfigError, match=path.name):
            read_tls(changed(authority.issue(), **{field: path}))


def test_a_key_of_another_certificate_is_refused(authority: Authority) -> None:
    other = authority.issue()
    with pytest.raises(ConfigError, match="KEY_VALUES_MISMATCH"):
        read_tls(changed(authority.issue(), key=other.key))


def test_a_key_with_a_password_is_refused_and_nobody_asked_for_it(
    authority: Authority, tmp_path: Path
) -> None:
    key, tls = tmp_path / "key.pem", authority.issue()
    subprocess.run(
        f"openssl ec -aes256 -passout pass:word -in {tls.key} -out {key}".split(),
        check=True,
        capture_output=True,
    )
    key.chmod(0o600)
    with pytest.raises(ConfigError, match="cannot be used for TLS"):
        read_tls(changed(tls, key=key))


def failure(kind: type[ssl.SSLError] = ssl.SSLError, **attributes: Any) -> ssl.SSLError:
    error = kind(1, "text that nobody reads")
    for name, value in attributes.items():
        setattr(error, name, value)
    return error


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        ("WRONG_VERSION_NUMBER", "does not speak TLS"),
        ("HTTP_REQUEST", "does not speak TLS"),
        ("UNSUPPORTED_PROTOCOL", "no version of TLS in common"),
        ("TLSV1_ALERT_PROTOCOL_VERSION", "no version of TLS in common"),
        ("TLSV13_ALERT_CERTIFICATE_REQUIRED", "refuses our certificate"),
        ("TLSV1_ALERT_UNKNOWN_CA", "refuses our certificate"),
        ("PEER_DID_NOT_RETURN_A_CERTIFICATE", "TLS failed: PEER_DID_NOT"),
        (None, "TLS failed: SSLError"),
    ],
)
def test_a_failure_says_what_it_means(reason: str | None, message: str) -> None:
    error = tls_failure(failure(reason=reason))
    assert isinstance(error, AuthError)
    assert message in str(error)


def test_a_certificate_that_is_refused_says_why() -> None:
    exc = failure(ssl.SSLCertVerificationError, verify_message="it has expired")
    assert "it has expired" in str(tls_failure(exc))


@pytest.mark.parametrize("kind", [ssl.SSLEOFError, ssl.SSLZeroReturnError])
def test_a_hang_up_is_a_lost_peer(kind: type[ssl.SSLError]) -> None:
    assert isinstance(tls_failure(failure(kind, reason=None)), PeerLost)


@pytest.mark.parametrize(
    ("listed", "names"),
    [
        ([("DNS", "Worker-1.Example")], ("worker-1.example",)),
        ([("URI", "spiffe://kv/ns/Prefill")], ("spiffe://kv/ns/Prefill",)),
        ([("IP Address", "10.0.0.1")], ("10.0.0.1",)),
        ([("IP Address", "0:0:0:0:0:0:0:1\n")], ("::1",)),
        ([("DNS", "b"), ("DNS", "a")], ("b", "a")),
        ([("DNS", "*.example"), ("email", "a@b"), ("URI", "http://u@h/")], ()),
        ([("IP Address", "<invalid>"), ("DNS", ""), ("othername", "x")], ()),
        ([("DNS", "a\nb"), ("URI", "x://\x1b[31m"), ("DNS", "\u202ea")], ()),
        ([], ()),
    ],
)
def test_the_names_are_those_that_tell_who_it_is(
    listed: list[tuple[str, str]], names: tuple[str, ...]
) -> None:
    assert names_in({"subjectAltName": tuple(listed)}) == names


@pytest.mark.parametrize("certificate", [{}, {"subjectAltName": None}])
def test_a_certificate_may_name_nobody(certificate: dict[str, Any]) -> None:
    names = CertifiedNames(names_in(certificate))
    with pytest.raises(AuthError, match="names nobody"):
        names.check_allowed(())


def test_a_peer_is_allowed_by_any_of_its_names() -> None:
    names = CertifiedNames(("a", "b", "::1", "spiffe://kv/A"))
    names.check_allowed(())
    for allowed in ("b", "B", "0:0::1", "spiffe://kv/A"):
        names.check_allowed(("x", allowed))
    with pytest.raises(AuthError, match="allowed peer"):
        names.check_allowed(("spiffe://kv/a",))
    with pytest.raises(AuthError, match="allowed peer"):
        names.check_allowed(("x", "ab", "a.b"))


@pytest.mark.parametrize(
    ("claimed", "full"),
    [
        ("engine", "engine@worker"),
        ("worker", "worker"),
        ("10.0.0.1", "10.0.0.1"),
        ("engine@worker", "engine@worker"),
        ("engine@10.0.0.1", "engine@10.0.0.1"),
        ("a@b@worker", "a@b@worker"),
        ("", "@worker"),
    ],
)
def test_a_peer_is_called_what_it_proves(claimed: str, full: str) -> None:
    assert CertifiedNames(("worker", "10.0.0.1")).full_name(claimed) == full


@pytest.mark.parametrize(
    "claimed", ["engine@other", "worker@other", "@", "worker@", "engine@worker2"]
)
def test_a_name_that_the_certificate_does_not_prove_is_refused(claimed: str) -> None:
    with pytest.raises(AuthError, match="not in its certificate"):
        CertifiedNames(("worker",)).full_name(claimed)


def test_no_two_peers_have_one_name() -> None:
    claims = ["engine", "a", "b", "engine@a", "engine@b", "a@b", "b@a"]
    called = []
    for names in (("a",), ("b",)):
        for claim in claims:
            try:
                called.append({CertifiedNames(names).full_name(claim)})
            except AuthError:
                called.append(set())
    of_a, of_b = set().union(*called[:7]), set().union(*called[7:])
    assert of_a
    assert of_b
    assert not of_a & of_b
