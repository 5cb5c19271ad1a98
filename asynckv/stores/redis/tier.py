"""A tier of a store in Redis, or in what speaks its protocol: one key a value.

Small commands go by one lane, so that they never wait behind payload; payload goes by
others, from and to where it stays. The first read of a value brings its header. What
follows is read in pieces, each with the header once more behind it: a value that was
replaced meanwhile is read again, by one command. Nothing is believed of a server: what
it does not answer as it should is a miss.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeVar

import anyio

from asynckv.abc.tiers import (
    StoreTier,
    TierFacts,
    TierMemory,
    TierPrefix,
    TierResult,
    TierValue,
    WantedValue,
)
from asynckv.affinity import LoopBound
from asynckv.stores.redis.lane import Lane, NotRedis, Reply, ServerError, command
from asynckv.stores.redis.lanes import Lanes, process_lanes
from asynckv.stores.redis.server import Address, Credentials, NodeAway, RedisServer
from asynckv.stores.redis.url import parse_redis_url
from asynckv.stores.threads import READ, Stopped, TierThreads, ask
from asynckv.types import as_timeout

__all__ = ("RedisStatistics", "RedisTier")

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_FIRST_NBYTES: Final = 16 * 1024
"""So much of a value comes with its header."""
_ALONE_NBYTES: Final = 4 * 2**20
_PIECE_NBYTES: Final = 2**20
"""What is longer than the one is read in pieces of the other."""
_KEYS_AT_ONCE: Final = 64
_SCANNED_AT_ONCE: Final = 512
_MAX_NBYTES: Final = 512 * 2**20 - 64 * 1024
"""Redis takes no more in one value, if it is not told to."""
_LONGEST_S: Final = 3e9
"""For ever, so to speak: servers refuse what ends too far from now."""
_STALL_S: Final = 1.0
"""A lane on which nothing moves for so long ends."""
_LOOK_AGAIN_S: Final = 1.0
_KEEPING: Final = frozenset(("allkeys-lru", "allkeys-lfu"))
_MOVED: Final = frozenset(("MOVED", "ASK", "READONLY", "CLUSTERDOWN", "TRYAGAIN"))


@dataclasses.dataclass(frozen=True)
class RedisStatistics:
    """What a Redis tier has seen since it was opened.

    ``replaced``: values that were replaced while they were read, and read again.
    ``unverified``: keys that hold no value, or one of another length. ``no_room``: what
    the server did not take as its memory is full. ``idle_lanes`` wait for work.
    """

    replaced: int
    unverified: int
    no_room: int
    idle_lanes: int


class _Replaced(Exception):
    """The pieces of a value do not fit together."""


class RedisTier(LoopBound, StoreTier):
    """Values in the Redis of ``url``, each under one key, until it gives them up.

    ``credentials`` is a ``CredentialProvider`` of redis-py's, asked for each lane.
    Whether a value's bytes are right is for the caller to see, by the digest in its
    header.

    :raises ConfigError: (also when it is opened) it cannot be used as it was configured
    """

    def __init__(
        self,
        url: str,
        *,
        credentials: Credentials | None = None,
        stall_s: float = _STALL_S,
    ) -> None:
        stall_s = as_timeout(stall_s, "stall_s")
        self._place = parse_redis_url(url)
        self._is_closed = False
        self._server = RedisServer(
            *(self._place, credentials, lambda: self._is_closed, stall_s)
        )
        self._lanes = Lanes(self._server.connect)
        self._threads: dict[str, TierThreads[None]] = {}
        self._left = 0
        self._counting = threading.Lock()
        self._looking: asyncio.Future[set[str]] | None = None
        self._looked_s = 0.0
        self._replaced = self._unverified = self._no_room = 0
        self._said: set[str] = set()

    @classmethod
    def from_url(cls, url: str) -> RedisTier:
        """Make the tier that ``redis://host:6379/0`` names.

        :raises ConfigError: it names none
        """
        return cls(url)

    def statistics(self) -> RedisStatistics:
        """Say what it has seen. Never waits."""
        return RedisStatistics(
            *(self._replaced, self._unverified, self._no_room, len(self._lanes))
        )

    def counts(self) -> Mapping[str, float]:
        return dataclasses.asdict(self.statistics())

    async def probe(self) -> TierFacts:
        loop = self._check_loop()
        if self._is_closed:
            raise OSError("the tier is closed")
        if not self._threads:
            self._start(loop)
        policies = await asyncio.shield(self._look())
        if not self._place.is_cluster:
            (answer,) = await self._ask([""], b"ECHO")
            if isinstance(answer, Exception):
                raise OSError(f"{self._place.shown}: {answer}") from answer
        poor = policies - _KEEPING
        if poor:
            self._say(
                "policy",
                "its maxmemory-policy is %s: with allkeys-lru or allkeys-lfu it gives "
                "up what is used least when it is full",
                ", ".join(sorted(poor)),
            )
        return TierFacts(
            max_value_nbytes=_MAX_NBYTES, patience_s=self._place.patience_s
        )

    async def contains(self, keys: Sequence[str]) -> Sequence[TierResult]:
        answers = await self._ask(keys, b"EXISTS")
        done, missing = TierResult.DONE, TierResult.MISSING
        return [
            (done if one else missing) if isinstance(one, int) else self._failed(one)
            for one in answers
        ]

    async def touch(self, keys: Sequence[str]) -> None:
        await self._ask(keys, b"TOUCH")

    async def delete(self, keys: Sequence[str]) -> Sequence[TierResult]:
        answers = await self._ask(keys, b"UNLINK")
        return [
            TierResult.DONE if isinstance(one, int) else self._failed(one)
            for one in answers
        ]

    async def clear(self, prefix: TierPrefix) -> TierResult:
        """As of every tier. All keys of the database are looked through, 512 at once;
        in a cluster those of each master.
        """
        self._check_loop()
        if not self._threads:
            return TierResult.FAILED
        begin = prefix.prefix.encode()
        try:
            for address in self._server.addresses():
                cursor = b""
                while cursor != b"0":
                    delete = functools.partial(_delete_some, begin, cursor or b"0")
                    cursor = await ask(
                        *(self._threads["probe"], READ),
                        lambda own: self._lanes.use(address, delete),  # noqa: B023
                    )
                    prefix.moved_nbytes += 1
        except Exception as exc:  # noqa: BLE001 - also what only a bug would raise
            self._failed(exc)
            return TierResult.FAILED
        return TierResult.DONE

    async def fetch(self, wanted: Sequence[WantedValue]) -> Sequence[TierResult]:
        results: list[TierResult] = []
        for start in range(0, len(wanted), _KEYS_AT_ONCE):
            some = wanted[start : start + _KEYS_AT_ONCE]
            heads = await self._ask(
                *([one.key for one in some], b"GETRANGE", 0, _FIRST_NBYTES - 1)
            )
            for one, head in zip(some, heads, strict=True):
                one.moved_nbytes += len(head) if isinstance(head, bytes) else 0
            results += await asyncio.gather(*map(self._read, some, heads))
        return results

    async def store(self, values: Sequence[TierValue]) -> Sequence[TierResult]:
        self._check_loop()
        # Of two with one key the last one is to win.
        by_key: dict[str, list[TierValue]] = {}
        for value in values:
            by_key.setdefault(value.key, []).append(value)
        results: dict[TierValue, TierResult] = {}

        async def write(some: Sequence[TierValue]) -> None:
            for value in some:
                results[value] = await self._write(value)

        await asyncio.gather(*map(write, by_key.values()))
        return [results[value] for value in values]

    async def aclose(self) -> None:
        self.abort()
        with anyio.move_on_after(_STALL_S, shield=True) as scope:
            for threads in self._threads.values():
                await threads.is_over.wait()
        if scope.cancelled_caught:
            logger.warning("a thread of %s hangs", self._place.shown)

    def abort(self) -> None:
        self._is_closed = True
        for threads in self._threads.values():
            threads.stop()

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        lanes = self._place.lanes
        process_lanes.take(lanes)
        stores = (lanes - 1) // 2
        counts = {"small": 1, "stores": stores, "loads": lanes - 1 - stores, "probe": 1}
        self._left = len(counts)
        self._threads = {
            name: TierThreads(
                *(count, loop, self._ended, lambda: None), name=f"Redis {name}"
            )
            for name, count in counts.items()
        }

    def _ended(self) -> None:
        """Some of the threads have ended, or there were none of them."""
        with self._counting:
            self._left -= 1
            if self._left:
                return
        self._lanes.close()
        process_lanes.give_back(self._place.lanes)

    def _look(self) -> asyncio.Future[set[str]]:
        """See where keys are; once for all who ask for it meanwhile."""
        if self._looking is None or self._looking.done():
            self._looked_s = time.monotonic()
            self._looking = ask(
                self._threads["probe"], READ, lambda own: self._server.look()
            )
            self._looking.add_done_callback(_forget)
        return self._looking

    async def _ask(
        self, keys: Sequence[str], name: bytes, *after: int
    ) -> Sequence[Reply | Exception]:
        """Send a small command for each key; return what came of each."""
        self._check_loop()
        if not keys:
            return []
        if not self._threads:
            return [OSError("it was never opened")] * len(keys)
        try:
            return await ask(
                self._threads["small"],
                READ,
                lambda own: self._ask_all(keys, name, after),
            )
        except Exception as exc:  # noqa: BLE001 - it is what came of it
            return [exc] * len(keys)

    def _ask_all(
        self, keys: Sequence[str], name: bytes, after: Sequence[int]
    ) -> Sequence[Reply | Exception]:
        # By hand, as there may be thousands of them.
        begin = command(name, b"", *after).partition(b"$0\r\n")[0]
        end = b"\r\n" + b"".join(command(one).partition(b"\r\n")[2] for one in after)
        encoded = [key.encode() for key in keys]
        groups = self._server.partition_by_address(encoded)
        commands = {
            address: [
                b"%b$%d\r\n%b%b" % (begin, len(key), key, end)
                for key in map(encoded.__getitem__, places)
            ]
            for address, places in groups.items()
        }
        found: list[Reply | Exception] = [NodeAway()] * len(keys)
        for address, told in self._lanes.ask(commands).items():
            for number, at in enumerate(groups[address]):
                found[at] = told if isinstance(told, Exception) else told[number]
        return found

    async def _read(self, wanted: WantedValue, head: Reply | Exception) -> TierResult:
        if not isinstance(head, bytes):
            return self._failed(head)
        if not head:
            return TierResult.MISSING
        try:
            memory = await wanted.place(head)
            if memory is None:
                return TierResult.REFUSED
            total = wanted.header_nbytes + memory.nbytes
            is_whole = len(head) < _FIRST_NBYTES
            if len(head) > total or (is_whole and len(head) < total):
                return self._disbelieve("a value of another length")
            _fill(memory, head[wanted.header_nbytes :])
            if len(head) < total or not is_whole:
                await self._read_rest(wanted, head, memory)
        except _Replaced:
            return await self._read_again(wanted)
        except ValueError:  # it was all that there is of the header
            return self._disbelieve("no value of ours")
        except Exception as exc:  # noqa: BLE001 - also what only a bug would raise
            return self._failed(exc)
        return TierResult.DONE

    async def _read_rest(
        self, wanted: WantedValue, head: bytes, memory: TierMemory
    ) -> None:
        """Read what follows ``head``, by several lanes if it is much."""
        total, done = wanted.header_nbytes + memory.nbytes, len(head)
        each = total if total <= _ALONE_NBYTES else _PIECE_NBYTES
        starts = range(done, max(total, done + 1), each)
        key, header = wanted.key.encode(), head[: wanted.header_nbytes]
        moved = self._mover(wanted)

        def read(lane: Lane, start: int, stop: int) -> None:
            at = start - len(header)
            into = _cut(memory.pieces, at, at + stop - start)
            # One byte more, where there should be none.
            lane.send(
                [
                    command(b"GETRANGE", key, start, stop - (stop < total)),
                    command(b"GETRANGE", key, 0, len(header) - 1),
                ]
            )
            try:
                nbytes = lane.begin_payload()
            except ServerError:
                lane.read_reply(line_nbytes=64)  # the second answer, too
                raise
            if nbytes != stop - start:
                raise _Replaced
            lane.read_into(into, moved)
            lane.end_payload()
            if lane.read_reply(line_nbytes=64) != header:
                raise _Replaced

        reads = [
            self._by_lane(
                *("loads", key),
                functools.partial(read, start=start, stop=min(start + each, total)),
            )
            for start in starts
        ]
        # All of them: the memory is the caller's when this ends.
        results = await asyncio.gather(*reads, return_exceptions=True)
        for one in results:
            if isinstance(one, BaseException) and not isinstance(one, _Replaced):
                raise one
        if any(isinstance(one, _Replaced) for one in results):
            raise _Replaced

    async def _read_again(self, wanted: WantedValue) -> TierResult:
        """Read a value by one command: it comes as it is at one moment."""
        self._replaced += 1
        key = wanted.key.encode()
        threads = self._threads["loads"]

        def begin(own: None) -> tuple[Address, Lane, int, bytes]:
            address = self._server.address_of(key)
            lane = self._lanes.take(address)
            try:
                lane.send([command(b"GET", key)])
                nbytes = lane.begin_payload()
                head = bytearray(max(min(nbytes, _FIRST_NBYTES), 0))
                lane.read_into([memoryview(head)])
            except BaseException:
                lane.close()
                raise
            return address, lane, nbytes, bytes(head)

        def end(lane: Lane, rest: Sequence[memoryview]) -> None:
            lane.read_into(rest, self._mover(wanted))
            lane.end_payload()

        try:
            address, lane, nbytes, head = await ask(threads, READ, begin)
        except Exception as exc:  # noqa: BLE001 - also what only a bug would raise
            return self._failed(exc)
        is_kept = False
        try:
            if nbytes < 0:
                return TierResult.MISSING
            memory = await wanted.place(head)
            if memory is None:
                return TierResult.REFUSED
            if wanted.header_nbytes + memory.nbytes != nbytes:
                return self._disbelieve("a value of another length")
            there = _fill(memory, head[wanted.header_nbytes :])
            rest = _cut(memory.pieces, there, memory.nbytes)
            await ask(threads, READ, lambda own: end(lane, rest))
            is_kept = True
            return TierResult.DONE
        except ValueError:
            return self._disbelieve("no value of ours")
        except Exception as exc:  # noqa: BLE001 - also what only a bug would raise
            return self._failed(exc)
        finally:
            if is_kept:
                self._lanes.give_back(address, lane)
            else:
                lane.close()

    async def _write(self, value: TierValue) -> TierResult:
        if value.nbytes > _MAX_NBYTES:
            return TierResult.REFUSED
        expiry: list[bytes] = []
        left_s = self._place.retain_s
        if value.expires_at_s is not None:
            until_s = value.expires_at_s - time.time()
            left_s = until_s if left_s is None else min(left_s, until_s)
        if left_s is not None:
            if left_s < 0.001:
                return TierResult.REFUSED
            expiry = [b"PX", b"%d" % (min(left_s, _LONGEST_S) * 1000)]
        key = value.key.encode()
        before = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n%b" % (
            *(3 + len(expiry), len(key), key, value.nbytes, value.header),
        )
        after = b"\r\n" + b"".join(b"$%d\r\n%b\r\n" % (len(a), a) for a in expiry)
        moved = self._mover(value)

        def write(lane: Lane) -> None:
            told = 0

            def sent(nbytes: int) -> None:
                # What has left us may lie in buffers on its way: it is not all said
                # to have moved before the server says so.
                nonlocal told
                told += nbytes // 4
                moved(nbytes // 4)

            lane.send([before, *value.memory.pieces, after], sent)
            answer = lane.read_reply(line_nbytes=64)
            if isinstance(answer, ServerError):
                raise answer
            if answer != b"OK":
                raise NotRedis("an answer that is not OK")
            moved(max(value.nbytes - told, 0))

        try:
            await self._by_lane("stores", key, write)
        except Exception as exc:  # noqa: BLE001 - also what only a bug would raise
            return self._failed(exc)
        return TierResult.DONE

    def _by_lane(
        self, threads: str, key: bytes, work: Callable[[Lane], _T]
    ) -> asyncio.Future[_T]:
        if not self._threads:
            raise OSError("it was never opened")

        def use(own: None) -> _T:
            return self._lanes.use(self._server.address_of(key), work)

        return ask(self._threads[threads], READ, use)

    def _mover(self, moving: WantedValue | TierValue) -> Callable[[int], None]:
        def moved(nbytes: int) -> None:
            with self._counting:  # several lanes may bring pieces of one value
                moving.moved_nbytes += nbytes

        return moved

    def _disbelieve(self, what: str) -> TierResult:
        self._unverified += 1
        self._say("unverified", "there is %s under a key of ours", what)
        return TierResult.MISSING

    def _failed(self, error: Reply | Exception) -> TierResult:
        """Return what an error is to the caller, and say what it was, once a kind."""
        if isinstance(error, ServerError):
            if error.code == "WRONGTYPE":
                return self._disbelieve("something else than a value")
            if error.code == "OOM":
                self._no_room += 1
            if error.code == "MOVED":
                self._server.note_moved(error)
            self._say(error.code, "it says: %s", error)
        elif isinstance(error, Exception):
            unforeseen = not isinstance(error, (OSError, Stopped))
            if not isinstance(error, Stopped):
                self._say(type(error).__name__, "%r", error, exc_info=unforeseen)
        else:
            self._say("answer", "an answer that is none: %r", error)
        self._look_again(error)
        # The others are to be asked all the same.
        is_away = isinstance(error, NodeAway)
        return TierResult.REFUSED if is_away else TierResult.FAILED

    def _look_again(self, error: Reply | Exception) -> None:
        """Keys of a cluster may be elsewhere now: ask, but not all the time."""
        has_moved = isinstance(error, OSError) or (
            isinstance(error, ServerError) and error.code in _MOVED
        )
        is_due = time.monotonic() - self._looked_s > _LOOK_AGAIN_S
        if self._place.is_cluster and has_moved and is_due and not self._is_closed:
            self._look()

    def _say(self, kind: str, text: str, *what: object, exc_info: bool = False) -> None:
        if kind not in self._said:
            self._said.add(kind)
            logger.warning("%s: %s", self._place.shown, text % what, exc_info=exc_info)


def _delete_some(begin: bytes, cursor: bytes, lane: Lane) -> bytes:
    """Delete some keys that begin so; return the cursor of the next ones."""
    # What means something in a pattern is meant as it is.
    pattern = re.sub(rb"[][*?^\\-]", rb"\\\g<0>", begin) + b"*"
    count = b"%d" % _SCANNED_AT_ONCE
    lane.send([command(b"SCAN", cursor, b"MATCH", pattern, b"COUNT", count)])
    if lane.begin_array() != 2:
        raise NotRedis("an answer that is none of a scan")
    following = lane.read_reply()
    keys = lane.read_replies(lane.begin_array())
    if not isinstance(following, bytes):
        raise NotRedis("a scan without a cursor")
    ours = [key for key in keys if isinstance(key, bytes) and key.startswith(begin)]
    # One by one, as those of a cluster have to be.
    lane.send([command(b"UNLINK", key) for key in ours])
    for answer in lane.read_replies(len(ours)):
        if isinstance(answer, ServerError):
            raise answer
    return following


def _forget(looked: asyncio.Future[set[str]]) -> None:
    """Perhaps nobody waits for it: what it has found is used all the same."""
    if not looked.cancelled():
        looked.exception()


def _fill(memory: TierMemory, data: bytes) -> int:
    """Write ``data`` to the beginning of ``memory``; return how much that is."""
    done = 0
    for piece in _cut(memory.pieces, 0, len(data)):
        piece[:] = data[done : done + len(piece)]
        done += len(piece)
    return done


def _cut(pieces: Sequence[memoryview], start: int, stop: int) -> list[memoryview]:
    """Return the bytes from ``start`` to ``stop`` of all of them, not copied."""
    found, begin = [], 0
    for piece in pieces:
        inside = piece[max(start - begin, 0) : max(stop - begin, 0)]
        if inside:
            found.append(inside)
        begin += len(piece)
    return found
