"""What is read out of an URL by redis-py, and what it cannot use."""

from __future__ import annotations

import asyncio
import builtins
import concurrent.futures
from collections.abc import Callable, Mapping, Sequence

import pytest

from asynckv.errors import ConfigError
from asynckv.stores.redis.lane import command
from asynckv.stores.redis.server import RedisServer
from asynckv.stores.redis.url import parse_redis_url
from asynckv.stores.threads import Stopped
from harness.redis_servers import RedisProcess, free_port


def server_of(url: str) -> RedisServer:
    return RedisServer(parse_redis_url(url), None, lambda: False, 1.0)


@pytest.mark.parametrize(
    "options",
    [
        *("socket_timeout=soon", "protocol=9", "colour=red", "ssl_ca_certs=/none"),
        *("ssl_cert_reqs=perhaps", "ssl_validate_ocsp=1", "ssl_ciphers=none"),
    ],
)
def test_options_that_redis_py_cannot_use_are_refused(options: str) -> None:
    with pytest.raises(ConfigError) as refused:
        server_of(f"rediss://host?{options}").look()
    assert refused.value.hint


def test_without_redis_py_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    imported = builtins.__import__

    def without(
        name: str,
        globals: Mapping[str, object] | None = None,
        locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] = (),
        level: int = 0,
    ) -> object:
        if name.partition(".")[0] == "redis":
            raise ImportError(name)
        return imported(name, globals, locals, fromlist, level)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError) as refused:
        server_of("redis://host").look()
    assert ".[redis]" in refused.value.hint


def test_who_is_not_there_is_told_as_such() -> None:
    server = server_of(f"redis://127.0.0.1:{free_port()}")
    with pytest.raises(OSError):
        server.look()
    with pytest.raises(OSError):
        server.connect(server.address_of(b"k1/a"))


def test_no_node_of_a_cluster_is_asked_when_nobody_needs_it_any_more() -> None:
    place = parse_redis_url(f"redis+cluster://127.0.0.1:{free_port()}")
    with pytest.raises(Stopped):
        RedisServer(place, None, lambda: True, 1.0).look()


def test_before_it_was_looked_at_nobody_knows_where_it_is() -> None:
    server = server_of("redis://127.0.0.1")
    with pytest.raises(OSError):
        server.address_of(b"k1/a")
    with pytest.raises(OSError):
        server.connect(("127.0.0.1", 1))


async def off_loop(work: Callable[[], None]) -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        await asyncio.get_running_loop().run_in_executor(pool, work)


async def test_a_lane_has_the_database_and_the_name_of_the_url(
    server: RedisProcess,
) -> None:
    def look() -> None:
        asked = server_of(f"{server.unix_url}?db=3&client_name=kv")
        assert asked.look() == {"noeviction"}
        lane = asked.connect(asked.address_of(b"k1/a"))
        lane.send([command(b"CLIENT", b"INFO")])
        told = lane.read_reply()
        lane.close()
        assert isinstance(told, bytes)
        assert b" db=3 " in told
        assert b" name=kv " in told

    await off_loop(look)


@pytest.mark.parametrize("options", ["", "?ssl_cert_reqs=required"])
async def test_a_certificate_of_somebody_else_is_not_believed(
    options: str, tls_url: str
) -> None:
    def look() -> None:
        asked = server_of(tls_url.partition("?")[0] + options)
        with pytest.raises(OSError):
            asked.look()
        with pytest.raises(OSError):
            asked.connect(asked.address_of(b"k1/a"))

    await off_loop(look)


async def test_who_wants_no_certificate_gets_a_lane(tls_url: str) -> None:
    def look() -> None:
        asked = server_of(tls_url.partition("?")[0] + "?ssl_cert_reqs=none")
        assert asked.look() == {"noeviction"}
        asked.connect(asked.address_of(b"k1/a")).close()

    await off_loop(look)
