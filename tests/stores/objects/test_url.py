"""The URL of an object tier says where it is, and never who may go there."""

from __future__ import annotations

import pytest

from asynckv.errors import ConfigError
from asynckv.stores.objects.url import ObjectPlace, parse_object_url


def test_a_bucket_and_its_options_are_read() -> None:
    place = parse_object_url(
        "s3://models/kv/a%20b?region=eu-west-1&endpoint=http://127.0.0.1:9000"
        "&allow_http=true&skip_signature=1&retries=0&patience=0.5"
    )
    assert place == ObjectPlace(
        *("s3://models/kv/a%20b", "models", "kv/a b"),
        region="eu-west-1",
        endpoint="http://127.0.0.1:9000",
        allow_http=True,
        skip_signature=True,
        retries=0,
        patience_s=0.5,
    )


def test_a_bucket_alone_is_enough() -> None:
    assert parse_object_url("s3://models") == ObjectPlace("s3://models", "models", "")


def test_a_folder_is_read() -> None:
    place = parse_object_url("file:///mnt/kv/?patience=1")
    assert place == ObjectPlace("file:///mnt/kv", "", "mnt/kv", patience_s=1.0)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("gs://bucket", "scheme is 'gs'"),
        ("s3:///kv", "no bucket"),
        ("file:///", "no directory"),
        ("file://mnt/kv", "three slashes"),
        ("s3://bucket/a/../b", "path"),
        ("s3://bucket/a//b", "path"),
        ("s3://bucket#a", "path"),
        ("s3://bucket?color=red", "no option 'color'"),
        ("file:///kv?region=x", "no option 'region'"),
        ("s3://bucket?retries=0&retries=1", "twice"),
        ("s3://bucket?region", "name=value"),
        ("s3://bucket?retries=10", "retries is 0 or 1"),
        ("s3://bucket?patience=0", "in seconds"),
        ("s3://bucket?patience=soon", "in seconds"),
        ("s3://bucket?patience=nan", "in seconds"),
        ("s3://bucket?allow_http=yes", "true or false"),
        ("s3://bucket?endpoint=127.0.0.1:9000", "endpoint is https"),
        ("s3://bucket?endpoint=http://127.0.0.1:9000", "allow_http=true"),
    ],
)
def test_what_says_nothing_of_use_is_refused(url: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        parse_object_url(url)


@pytest.mark.parametrize(
    "url",
    [
        "s3://someone:geheim@bucket/kv",
        "s3://someone:ge/heim@bucket/kv",
        "s3://bucket?endpoint=https://someone:geheim@host",
        "s3://bucket?secret_access_key=geheim",
        "s3://bucket?geheim",
    ],
)
def test_credentials_in_an_url_are_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_object_url(url)
    assert "geheim" not in str(caught.value)
