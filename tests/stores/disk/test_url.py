"""The URL of a disk tier says where it is, and how large it may be."""

from __future__ import annotations

from pathlib import Path

import pytest

from asynckv.errors import ConfigError
from asynckv.stores.disk import DiskTier
from asynckv.stores.disk.url import parse_disk_url


@pytest.mark.parametrize(
    ("url", "path", "max_bytes"),
    [
        ("disk:///var/kv?max=100GiB", "/var/kv", 100 * 2**30),
        ("disk:///a%20b?max=1e9", "/a b", 10**9),
        ("disk:/var/kv?max=64MiB", "/var/kv", 64 * 2**20),
    ],
)
def test_a_url_names_a_directory_and_a_bound(
    url: str, path: str, max_bytes: int
) -> None:
    assert parse_disk_url(url) == (Path(path), max_bytes)


@pytest.mark.parametrize(
    "url",
    [
        "redis:///var/kv?max=1GiB",
        "disk://var/kv?max=1GiB",
        "disk:///?max=1GiB",
        "disk:?max=1GiB",
        "disk:///var/kv",
        "disk:///var/kv?max=",
        "disk:///var/kv?max=much",
        "disk:///var/kv?max=1GiB&max=2GiB",
        "disk:///var/kv?max=1GiB&min=1",
        "disk:///var/kv?max",
        "disk:///var/kv?max=1GiB#there",
    ],
)
def test_what_is_wrong_with_a_url_is_said_with_a_hint(url: str) -> None:
    with pytest.raises(ConfigError, match="100GiB"):
        parse_disk_url(url)


def test_a_tier_is_made_of_a_url(tmp_path: Path) -> None:
    tier = DiskTier.from_url(f"disk://{tmp_path}/kv?max=2MiB")
    assert (tier.path, tier.max_bytes) == (tmp_path / "kv", 2 * 2**20)


def test_a_bound_that_nothing_fits_in_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="1MiB"):
        DiskTier.from_url(f"disk://{tmp_path}/kv?max=1000")
