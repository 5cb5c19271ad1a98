from __future__ import annotations

from typing import Any

import pytest

from asynckv.errors import AuthError
from asynckv.security.names import CertifiedNames, names_in


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
