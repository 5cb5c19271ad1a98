from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from asynckv.security.tls import read_tls
from asynckv.testing.certificates import Authority


def test_what_is_issued_can_be_used(tmp_path: Path) -> None:
    tls = Authority(tmp_path).issue("worker-1")
    keys = read_tls(tls)
    assert len(keys.certificate_digest) == 32
    assert os.stat(tls.key).st_mode & 0o777 == 0o600


def test_each_authority_and_each_certificate_is_another(tmp_path: Path) -> None:
    one, two = Authority(tmp_path), Authority(tmp_path)
    assert one.path != two.path
    digests = {read_tls(each.issue("a")).certificate_digest for each in (one, one, two)}
    assert len(digests) == 3


def test_a_side_may_trust_another_authority(tmp_path: Path) -> None:
    one, two = Authority(tmp_path), Authority(tmp_path)
    assert one.issue(ca=two.path).ca == two.path
    assert one.issue().ca == one.path


def test_without_trustme_it_says_which_extra_brings_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "trustme", None)
    with pytest.raises(ModuleNotFoundError, match=r"\.\[testing\]"):
        Authority(tmp_path)
