"""What redis-py knows of a server: where its keys are, who we are there, how it is set.

Everything here blocks. redis-py is imported when the first tier is opened; only names
that it documents are used.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import random
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, TypeAlias

from asynckv.errors import ConfigError
from asynckv.stores.redis.lane import Lane, ServerError, command
from asynckv.stores.redis.url import RedisPlace
from asynckv.stores.threads import Stopped

__all__ = ("Address", "Credentials", "NodeAway", "RedisServer")

logger = logging.getLogger(__name__)

Address: TypeAlias = tuple[str, int] | str
"""Host and port, or the path of a unix socket."""

_TIMEOUT_S: Final = 1.0


class NodeAway(OSError):
    """Nobody answers for a part of the cluster; the others may."""

    def __init__(self) -> None:
        super().__init__("nobody answers for this part of the cluster now")


class Credentials(Protocol):
    """As redis-py's ``CredentialProvider``: asked by every connection that is made."""

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """Return a password, or a name and a password."""


@dataclasses.dataclass(frozen=True)
class _Client:
    """What redis-py has read out of the URL."""

    redis: Any
    pool: Any
    address: Address
    db: int
    name: str | None
    credentials: Credentials | None
    tls: ssl.SSLContext | None


class RedisServer:
    """One server, or a cluster of them. Connections are made by any thread."""

    def __init__(
        self,
        place: RedisPlace,
        credentials: Credentials | None,
        is_stopping: Callable[[], bool],
        stall_s: float,
    ) -> None:
        self._place = place
        self._credentials = credentials
        self._is_stopping = is_stopping
        self._stall_s = stall_s
        self._client: _Client | None = None
        self._nodes: set[Address] = set()
        """Who may say where keys are, beside the one that the URL names."""
        self._slots: list[Address | None] = []
        self._silent: set[Address] = set()

    def look(self) -> set[str]:
        """Ask how memory is given up, and where keys are; one thread at a time.

        :raises Stopped: nobody needs it any more
        :raises ConfigError: it cannot be used as it was configured
        :raises OSError: it is not there now
        """
        client = self._client
        if client is None:
            client = self._client = self._read_url()
        errors = client.redis.exceptions
        try:
            if self._place.is_cluster:
                return self._look_at_cluster(client)
            redis = client.redis.Redis(connection_pool=client.pool)
            try:
                return {str(redis.info("memory").get("maxmemory_policy"))}
            finally:
                client.pool.disconnect()
        except (errors.AuthenticationError, errors.NoPermissionError) as exc:
            raise ConfigError(
                f"{self._place.shown} refuses us: {exc}",
                hint="give name and password in the URL, or credentials=",
            ) from exc
        except errors.RedisError as exc:
            raise OSError(f"{self._place.shown}: {exc}") from exc

    def address_of(self, key: bytes) -> Address:
        """Return who has ``key``.

        :raises NodeAway: it is a node of a cluster that does not answer
        :raises OSError: nobody knows
        """
        client = self._read_client
        if not self._place.is_cluster:
            return client.address
        address: Address | None = None
        if self._slots:
            address = self._slots[client.redis.crc.key_slot(key)]
        if address is None:
            raise NodeAway
        return address

    def partition_by_address(
        self, keys: Sequence[bytes]
    ) -> dict[Address, Sequence[int]]:
        """Return who has which of ``keys``, by their places; some may be away.

        :raises OSError: it has not been looked at yet
        """
        client = self._read_client
        if not self._place.is_cluster:
            return {client.address: range(len(keys))}
        groups: dict[Address, list[int]] = {}
        for place, key in enumerate(keys):
            with contextlib.suppress(NodeAway):
                groups.setdefault(self.address_of(key), []).append(place)
        return {**groups}

    def addresses(self) -> list[Address]:
        """Return all who have keys.

        :raises OSError: nobody knows who has some of them
        """
        client = self._read_client
        if not self._place.is_cluster:
            return [client.address]
        if not self._slots or None in self._slots:
            raise NodeAway
        return [one for one in dict.fromkeys(self._slots) if one is not None]

    def note_moved(self, error: ServerError) -> None:
        """``MOVED 3999 host:port``: that one has the slot now."""
        with contextlib.suppress(ValueError, IndexError):
            _, slot, place = str(error).split(" ")
            host, _, port = place.rpartition(":")
            if host:
                self._slots[int(slot)] = (host, int(port))

    def connect(self, address: Address) -> Lane:
        """Return a new lane, on which we are who we should be.

        :raises ServerError: the server does not want us
        :raises OSError: it is not there
        """
        client = self._read_client
        sock = _open_socket(address, client.tls)
        try:
            lane = Lane(sock, self._is_stopping, self._stall_s)
            self._greet(lane, client)
        except BaseException:
            sock.close()
            raise
        return lane

    @property
    def _read_client(self) -> _Client:
        if self._client is None:
            raise OSError(f"{self._place.shown} was never there")
        return self._client

    def _greet(self, lane: Lane, client: _Client) -> None:
        commands = []
        if client.credentials is not None:
            given = client.credentials.get_credentials()
            commands.append(command(b"AUTH", *(one.encode() for one in given)))
        if client.db and not self._place.is_cluster:
            commands.append(command(b"SELECT", client.db))
        if client.name:
            commands.append(command(b"CLIENT", b"SETNAME", client.name.encode()))
        lane.send(commands)
        for answer in lane.read_replies(len(commands)):
            if isinstance(answer, ServerError):
                raise answer

    def _read_url(self) -> _Client:
        redis = _import_redis()
        try:
            pool = redis.ConnectionPool.from_url(
                self._place.url, **self._options(redis)
            )
            sample = pool.make_connection()
            return _Client(
                redis=redis,
                pool=pool,
                address=getattr(sample, "path", "") or (sample.host, sample.port),
                db=int(sample.db),
                name=sample.client_name,
                credentials=self._credentials_of(redis, sample),
                tls=_tls_of(redis, sample),
            )
        except (redis.RedisError, TypeError, ValueError, OSError) as exc:
            raise ConfigError(
                f"redis-py cannot use {self._place.shown}: {exc}",
                hint="options after ? are those of redis.Redis.from_url",
            ) from exc

    def _options(self, redis: Any) -> dict[str, object]:
        options: dict[str, object] = {
            "protocol": 2,
            "retry": redis.retry.Retry(redis.backoff.NoBackoff(), 0),
            "socket_timeout": _TIMEOUT_S,
            "socket_connect_timeout": _TIMEOUT_S,
        }
        if self._credentials is not None:
            options["credential_provider"] = self._credentials
        return options

    def _credentials_of(self, redis: Any, sample: Any) -> Credentials | None:
        found: Credentials | None = sample.credential_provider
        if found is None and (sample.username or sample.password):
            found = redis.UsernamePasswordCredentialProvider(
                sample.username, sample.password
            )
        return found

    def _look_at_cluster(self, client: _Client) -> set[str]:
        errors, slots = client.redis.exceptions, self._ask_for_slots(client)
        silent: set[Address] = set()
        policies = set()
        for address in {one for one in slots if one is not None}:
            try:
                with self._node_at(client, address) as node:
                    policies.add(str(node.info("memory").get("maxmemory_policy")))
            except (errors.ConnectionError, errors.TimeoutError) as exc:
                # Who asked it for a key would wait, and keep others from theirs.
                silent.add(address)
                if address not in self._silent:
                    logger.warning(
                        "%s: its node %s:%s does not answer: %s",
                        *(self._place.shown, *address, exc),
                    )
            except errors.RedisError:
                pass  # it does not tell everybody
        self._slots = [None if one in silent else one for one in slots]
        self._silent = silent
        return policies

    def _ask_for_slots(self, client: _Client) -> list[Address | None]:
        """Ask one node after the other until it is known who has what."""
        slots: list[Address | None] = [None] * client.redis.crc.REDIS_CLUSTER_HASH_SLOTS
        error = client.redis.RedisError("it has no slots")
        nodes: set[Address] = set()
        asked = [*{client.address, *self._nodes}]
        random.shuffle(asked)
        for address in asked:
            try:
                with self._node_at(client, address) as node:
                    told = node.execute_command("CLUSTER SLOTS")
            except client.redis.RedisError as exc:
                error = exc
                continue
            for first, last, *ends in told:
                there = [(end[0] or address[0], int(end[1])) for end in ends]
                nodes.update(there)
                for slot in range(first, min(last + 1, len(slots))):
                    slots[slot] = there[0]
            if None not in slots:
                break
        if not nodes:
            raise error
        self._nodes = nodes
        return slots

    def _node_at(self, client: _Client, address: Address) -> Any:
        """Return redis-py's client of one node of a cluster."""
        if self._is_stopping():
            raise Stopped
        options = {
            **client.pool.connection_kwargs,
            "host": address[0],
            "port": address[1],
            "db": 0,
            "decode_responses": True,
        }
        pool = client.redis.ConnectionPool(
            connection_class=client.pool.connection_class, **options
        )
        return client.redis.Redis.from_pool(pool)


def _import_redis() -> Any:
    try:
        import redis
        import redis.backoff
        import redis.crc
        import redis.retry
    except ImportError as exc:
        raise ConfigError(
            "a Redis tier needs the package redis, which is not installed",
            hint='in a checkout of asynckv: python -m pip install ".[redis]"',
        ) from exc
    return redis


def _tls_of(redis: Any, sample: Any) -> ssl.SSLContext | None:
    """Return the context that a connection of redis-py's would make for itself."""
    if not isinstance(sample, redis.SSLConnection):
        return None
    if sample.ssl_validate_ocsp or sample.ssl_validate_ocsp_stapled:
        raise ValueError("OCSP is not checked by lanes")
    context = ssl.create_default_context()
    context.check_hostname = sample.check_hostname
    context.verify_mode = sample.cert_reqs
    if sample.certfile or sample.keyfile:
        context.load_cert_chain(
            sample.certfile, sample.keyfile, sample.certificate_password
        )
    if sample.ca_certs or sample.ca_path or sample.ca_data:
        context.load_verify_locations(sample.ca_certs, sample.ca_path, sample.ca_data)
    for flag in getattr(sample, "ssl_include_verify_flags", None) or ():
        context.verify_flags |= flag
    for flag in getattr(sample, "ssl_exclude_verify_flags", None) or ():
        context.verify_flags &= ~flag
    if sample.ssl_min_version is not None:
        context.minimum_version = sample.ssl_min_version
    if sample.ssl_ciphers:
        context.set_ciphers(sample.ssl_ciphers)
    return context


def _open_socket(address: Address, tls: ssl.SSLContext | None) -> socket.socket:
    if isinstance(address, str):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(_TIMEOUT_S)
    else:
        sock = socket.create_connection(address, timeout=_TIMEOUT_S)
    try:
        if isinstance(address, str):
            sock.connect(address)
            return sock
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if tls is not None:
            return tls.wrap_socket(sock, server_hostname=address[0])
    except BaseException:
        sock.close()
        raise
    return sock
