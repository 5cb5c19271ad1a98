from __future__ import annotations

import os
from pathlib import Path

import pytest

from asynckv.errors import ConfigError
from asynckv.security.private_files import check_private, read_private


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
