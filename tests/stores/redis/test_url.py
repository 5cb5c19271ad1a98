"""An URL of a Redis tier is redis-py's, but for what is said here."""

from __future__ import annotations

import re

import pytest

from asynckv.errors import ConfigError
from asynckv.stores.redis.url import RedisPlace, parse_redis_url


@pytest.mark.parametrize(
    ("url", "inner"),
    [
        ("redis://host", "redis://host"),
        ("redis://me:s3%2Fcret@host:6380/2", "redis://me:s3%2Fcret@host:6380/2"),
        ("rediss://host?ssl_ca_certs=%2Fca", "rediss://host?ssl_ca_certs=%2Fca"),
        ("redis+unix:///run/r.sock?db=1", "unix:///run/r.sock?db=1"),
        ("redis+unix://:pw@/run/r.sock", "unix://:pw@/run/r.sock"),
        ("redis://host?lanes=5&retain_s=9&patience_s=1", "redis://host"),
    ],
)
def test_an_url_is_given_to_redis_py_without_what_is_ours(url: str, inner: str) -> None:
    assert parse_redis_url(url).url == inner


def test_a_cluster_is_named_by_its_scheme() -> None:
    place = parse_redis_url("rediss+cluster://:s3cret@host:7000?retain_s=60")
    shown = "rediss+cluster://host:7000"
    assert place == RedisPlace("rediss://:s3cret@host:7000", shown, True, 60.0)


@pytest.mark.parametrize(
    "url",
    [
        *(
            "memcached://host",
            "redis://",
            "redis:///0",
            "redis+unix://",
            "redis+unix:///",
        ),
        *(
            "redis+unix://host/run/r.sock",
            "redis://host?lanes=2",
            "redis://host?lanes=9",
        ),
        *(
            "redis://host?lanes=many",
            "redis://host?retain_s=0",
            "redis://host?retain_s=-1",
        ),
        *(
            "redis://host?retain_s=inf",
            "redis://host?retain_s=nan",
            "redis://host?patience_s=0",
            "redis://host#x",
        ),
        *("redis://host?lanes=4&lanes=5", "redis://[::1", "redis://host:port"),
    ],
)
def test_an_url_that_says_nothing_of_use_is_refused(url: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_redis_url(url)
    assert refused.value.hint


@pytest.mark.parametrize(
    "url",
    [
        "redis://me:s3cret@host?lanes=99&password=s3cret",
        "redis://:s3cret/x@host:1",
        "redis://me:s3cret?x@host:1/0",
        "redis://me:s3cret#x@host:1",
        "redis+cluster://me:s3cret/x@host:1",
        "redis+unix://:s3cret/x@/run/r.sock",
        "redis://host:x/0?password=s3@cret",
        "redis://me:s3c\u2100ret@host",
        "redis://me:1?lanes=s3cret@host",
    ],
)
def test_no_error_shows_a_password(url: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_redis_url(url)
    assert not re.search("s3c|cret", str(refused.value))
    assert refused.value.__cause__ is None


@pytest.mark.parametrize(
    "url", ["redis://me:123/45@host:1", "redis://me:12?3@host", "redis://me:12#3@host"]
)
def test_a_password_of_digits_is_not_taken_for_a_port(url: str) -> None:
    with pytest.raises(ConfigError, match="cannot be read") as refused:
        parse_redis_url(url)
    assert "12" not in str(refused.value) and "%2F" in refused.value.hint


def test_a_place_does_not_show_its_password() -> None:
    assert "s3cret" not in repr(parse_redis_url("redis://me:s3cret@host"))


@pytest.mark.parametrize("url", [None, 6379, b"redis://host"])
def test_what_is_no_text_is_no_url(url: str) -> None:
    with pytest.raises(TypeError, match="a URL is a str, not"):
        parse_redis_url(url)
