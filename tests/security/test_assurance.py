from __future__ import annotations

from asynckv.security.names import NO_ASSURANCE, Assurance, CertifiedNames


def test_a_plain_connection_proves_nothing() -> None:
    assert NO_ASSURANCE == Assurance(names=None, binding=b"")
    assert Assurance(CertifiedNames(("a",))) != NO_ASSURANCE
