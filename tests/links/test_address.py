from __future__ import annotations

import pytest

from asynckv.errors import ConfigError
from asynckv.links.address import Address, host_in, parse_url


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("tcp://10.0.0.1:7000", Address("tcp", host="10.0.0.1", port=7000)),
        ("tcp://:0", Address("tcp", host="127.0.0.1")),
        ("tcp://localhost:1", Address("tcp", host="127.0.0.1", port=1)),
        ("tls://kv.example:1", Address("tls", host="kv.example", port=1)),
        (
            "tls://localhost:1",
            Address("tls", host="127.0.0.1", port=1, name="localhost"),
        ),
        ("tcp://[::1]:7000/", Address("tcp", host="::1", port=7000)),
        ("unix:///run/a%20b.sock", Address("unix", place="/run/a b.sock")),
        ("mem://name", Address("mem", place="name")),
        ("mem://", Address("mem")),
        ("mem://a%2520b", Address("mem", place="a%20b")),
        ("TCP://h:1", Address("tcp", host="h", port=1)),
        (
            "tcp://h:1?payload=inline",
            Address("tcp", host="h", port=1, payload="inline"),
        ),
    ],
)
def test_a_url_says_where_a_peer_is(url: str, address: Address) -> None:
    assert parse_url(url) == address


@pytest.mark.parametrize(
    "url",
    [
        "tcp://127.0.0.1",
        "tcp://host:70000",
        "tcp://host:x",
        "tcp://host:1/path",
        "tcp://user@host:1",
        "tls://user@host:1",
        "tls://host:1/path",
        "tls://host",
        "tcp://host:1#part",
        "tcp://host:1?lanes=3",
        "unix://relative/path",
        "unix:",
        "unix:///nul%00",
        "unix:///" + "x" * 120,
        "http://host:1",
        "host:1",
        "",
        "tcp://[::1:1",
        "tcp://127.0.0.1:70\n00",
        "mem:name",
        "mem:@",
        "unix:/a/b",
        "unix:///\ud800",
    ],
)
def test_what_is_no_address_says_so(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_url(url)
    assert repr(url) in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "tcp://127.0.0.1:7000",
        "tcp://[::1]:7",
        "tls://host:1",
        "unix:///a/b",
        "unix:///a%20b%3Fc%25",
        "unix:///%FF",
        "mem://name",
        "mem://a%23b/c",
    ],
)
def test_an_address_is_written_as_it_was_read(url: str) -> None:
    assert str(parse_url(url)) == url


@pytest.mark.parametrize(
    ("name", "host"),
    [
        (("10.0.0.2", 7000), "10.0.0.2"),
        (("::1", 7000, 0, 0), "::1"),
        (("::ffff:10.0.0.2", 7000, 0, 0), "10.0.0.2"),
        ("/run/asynckv.sock", ""),
        (b"\0abstract", ""),
    ],
)
def test_what_a_socket_says_of_an_end_has_a_host(name: object, host: str) -> None:
    assert host_in(name) == host


def test_an_option_that_is_there_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="twice"):
        parse_url("tcp://127.0.0.1:1?payload=inline&payload=map")


def test_what_is_no_text_is_no_url() -> None:
    with pytest.raises(TypeError, match="a URL is a str, not None"):
        parse_url(None)  # type: ignore[arg-type]
