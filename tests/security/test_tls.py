from __future__ import annotations

import dataclasses
import ssl
import subprocess
from pathlib import Path
from typing import Any

import pytest

from asynckv.errors import AuthError, ConfigError, PeerLost
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
