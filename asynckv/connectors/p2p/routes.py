"""Which buffer holds a prompt's entries: in this ``push`` and ``pull`` differ.

With what a worker tells its peers of entries that are not needed, or will not come.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Final

import anyio

from asynckv.abc import KVLookupBuffer
from asynckv.buffers.entries.entries import EntryState
from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.serve import Server, serve
from asynckv.config import KVTransferConfig
from asynckv.connectors.connections import Peers, identity_of
from asynckv.connectors.engine import EntryHeader, KVEngine
from asynckv.connectors.options import ConnectorOptions, url_of_rank
from asynckv.connectors.p2p.entries import (
    Source,
    Target,
    release,
    report_failure,
    withdraw,
)
from asynckv.connectors.requests import LoadRequest, SaveRequest
from asynckv.connectors.transfers import Transfers
from asynckv.devices.names import Device
from asynckv.errors import EntryConflict, IncompatiblePeer, PeerLost
from asynckv.observability.lines import as_line
from asynckv.parallel.plans import RankRead
from asynckv.protocol.values import PeerIdentity

__all__ = (
    "P2PNotifications",
    "P2PRoutes",
)


_DRAIN_S: Final = 1.0

_FULL_AFTER_S: Final = 0.5
"""Whoever wants an entry that waits for room gets it: one that waits is unwanted."""


class P2PRoutes:
    """This rank's own buffer, where it serves one, and its ways to those of others.

    With ``pull`` an entry is in the buffer of the rank that computed it, under the id
    of its transfer. With ``push`` it is in that of each rank that reads it, and its id
    also says whose it is.
    """

    def __init__(self, config: KVTransferConfig, engine: KVEngine) -> None:
        self._config = config
        self._engine = engine
        self._options = ConnectorOptions.of(config)
        self.peers = Peers(config, engine)
        self.buffer: LookupBuffer | None = None
        self.server: Server | None = None
        self._lost_callbacks: list[Callable[[str], None]] = []

    @property
    def serves(self) -> bool:
        """Whether entries wait here, for peers or for this engine itself."""
        config, is_push = self._config, self._options.direction == "push"
        return config.is_kv_consumer if is_push else config.is_kv_producer

    @property
    def pushes(self) -> bool:
        """Whether what is computed here is put into the buffers of others."""
        return self._options.direction == "push" and self._config.is_kv_producer

    @property
    def links(self) -> int:
        """How many links to ranks of other engines are up, whoever has dialled."""
        served = 0 if self.server is None else len(self.server.peers)
        return self.peers.connected + served

    @property
    def is_full(self) -> bool:
        """Whether something computed here has waited for room for some time."""
        if self.buffer is None or self._options.direction == "push":
            return False
        now = asyncio.get_running_loop().time()
        return self.buffer.room.longest_wait_s(now) > _FULL_AFTER_S

    async def open(self, device: Device | None = None) -> None:
        """Serve the own buffer, where there is one. Cancelled, nothing is open.

        With ``device`` what it keeps, and what is fetched, has memory of that GPU; what
        is pushed has some of it while it leaves: see :meth:`push_from`.

        :raises ConfigError: the address cannot be listened on
        :raises GPUUnavailable: CuPy, a driver or that GPU is missing
        :raises GPUFailed: it has not so much memory left
        """
        if self._options.direction == "pull":
            self.peers.device = device
        else:
            self.push_from(device)
        if not self.serves or self.buffer is not None:
            return
        config = self._config
        buffer = LookupBuffer(
            config.max_bytes,
            fingerprint=config.fingerprint,
            drain_s=_DRAIN_S,
            device=device,
        )
        try:
            self.server = await self._serving(buffer).__aenter__()
        except BaseException:
            buffer.abort()  # memory of a GPU does not wait for the garbage collector
            raise
        self.buffer = buffer

    def push_from(self, device: Device | None) -> None:
        """What is pushed leaves ``device``, through a little of it. Never waits.

        What is pulled is kept where it was opened.
        """
        if self.pushes:
            self.peers.push_from(device, self._options.push_buffer_bytes)

    def may_lead_to_gpu(self, request: SaveRequest, device: str) -> bool:
        """Whether what ``request`` pushes may go from ``device`` to a GPU there."""
        if self._options.direction == "pull":
            return False
        try:
            readers = self._readers_of(request)
        except IncompatiblePeer:
            return False  # the save will say so
        peers = self.peers
        return any(
            peers.may_lead_to_gpu(request.peer, rank, device) for rank in readers
        )

    def _serving(self, buffer: LookupBuffer) -> Server:
        config, engine = self._config, self._engine
        server = serve(
            url_of_rank(self._options.listen or config.url, engine.rank),
            lookup=buffer,
            max_waiting_bytes=config.max_waiting_bytes,
            identity=identity_of(engine.engine_id, engine.rank),
            secret_file=config.secret_file,
            tls=config.tls,
            allow_plaintext=config.allow_plaintext,
        )
        server.call_when_lost(self._on_lost)
        return server

    def call_when_lost(self, callback: Callable[[str], None]) -> None:
        """Call back with the identity of each rank that was connected and is gone."""
        self._lost_callbacks.append(callback)

    def may_come_from_others(self, identity: str) -> bool:
        """Whether ranks of other engines that push the same part are connected."""
        rank = identity.rpartition("/")[2]
        served = () if self.server is None else self.server.peers
        return any(
            peer.id != identity and peer.id.rpartition("/")[2] == rank
            for peer in served
        )

    def has_pushed(self, request: LoadRequest, rank: int) -> bool:
        """Whether all that a rank was to push for ``request`` is here."""
        if self.buffer is None:
            return False
        entries = self.buffer.ledger.table.entries
        entry = entries.get(_pushed(request.transfer_id, rank))
        return entry is not None and entry.state is EntryState.READY

    def sources(
        self, request: LoadRequest
    ) -> tuple[Mapping[int, RankRead | None], Mapping[int, Source]]:
        """Return what this rank reads from whom, and where that is.

        :raises IncompatiblePeer: the engine that computed it has another model, or more
            ranks than the configuration gives it
        """
        if self._options.direction == "pull":
            self._check_ranks(request)
        reads = self._engine.reads_from(request.shape)
        return reads, {rank: self._source(request, rank) for rank in reads}

    def targets(self, request: SaveRequest) -> tuple[Target, ...]:
        """Return where the entries of this rank go; nowhere if nobody reads them.

        :raises IncompatiblePeer: nothing can be divided over as many ranks
        """
        readers = self._readers_of(request)
        if self._options.direction == "pull":
            return ((self._own, request.transfer_id, len(readers)),) if readers else ()
        entry_id = _pushed(request.transfer_id, self._engine.rank)
        return tuple(
            (self._finder_of(request.peer, rank), entry_id, 1) for rank in readers
        )

    def hang_up(self, request: SaveRequest) -> None:
        """End the links to who is to read this. Never waits."""
        if self._options.direction == "push":
            for rank in self._readers_of(request):
                self.peers.hang_up(request.peer, rank)

    async def aclose(self) -> None:
        """Close what is open. Bounded and shielded by what it closes.

        Peers are served until the entries are taken, or 1 s is over, and not longer:
        memory of a GPU that they have open is freed when they are gone.
        """
        await self.peers.aclose()
        if self.buffer is not None and self.server is not None:
            async with anyio.create_task_group() as group:
                group.start_soon(_close_behind, self.buffer, self.server)
                await self.buffer.aclose()

    def abort(self) -> None:
        """Hang up. Never waits."""
        self.peers.abort()
        if self.server is not None:
            self.server.abort()
        if self.buffer is not None:
            self.buffer.abort()

    def _on_lost(self, peer: PeerIdentity) -> None:
        for callback in self._lost_callbacks:
            callback(peer.id)

    def _readers_of(self, request: SaveRequest) -> tuple[int, ...]:
        """Return which ranks read it of the engine that decodes.

        How that is cut the configuration says.
        """
        options, peer = self._options, request.peer
        tp_size, pp_size = options.consumer_tp_size or 0, options.consumer_pp_size or 0
        try:
            shape = self._engine.shape_over(options.ranks_of(peer), tp_size, pp_size)
        except ValueError as exc:
            raise IncompatiblePeer(
                f"{peer or 'the engine that decodes'}: {exc}",
                field="ranks",
                hint="consumer_tp_size and consumer_pp_size are those of its URLs",
            ) from exc
        return self._engine.readers_in(shape)

    def _check_ranks(self, request: LoadRequest) -> None:
        """Let no request choose ports: how many ranks there are it may say, not more.

        A peer has as many as its URLs; of one whose first URL alone is known, as many
        as there are here.
        """
        shape, options = request.shape, self._options
        most = options.ranks_of(request.peer) or self._engine.size
        if shape is not None and shape.tp_size * shape.pp_size > most:
            raise IncompatiblePeer(
                f"the request says that {as_line(request.peer)} has {shape.tp_size} x "
                f"{shape.pp_size} ranks, the configuration {most}",
                field="ranks",
                hint="kv_connector_extra_config.peers can have the URL of each rank",
            )

    def _source(self, request: LoadRequest, rank: int) -> Source:
        if self._options.direction == "push":
            return self._own, _pushed(request.transfer_id, rank)
        known = request.incarnations
        incarnation = known[rank] if rank < len(known) else ""
        return self._finder_of(request.peer, rank, incarnation), request.transfer_id

    def _finder_of(
        self, peer: str, rank: int, incarnation: str = ""
    ) -> Callable[[], Awaitable[KVLookupBuffer]]:
        async def find() -> KVLookupBuffer:
            return (await self.peers.find(peer, rank, incarnation)).lookup

        return find

    async def _own(self) -> KVLookupBuffer:
        if self.buffer is None:
            raise PeerLost("this connector serves no buffer, or is closed")
        return self.buffer


def _pushed(transfer_id: str, rank: int) -> str:
    return f"{transfer_id}#{rank}"


async def _close_behind(buffer: LookupBuffer, server: Server) -> None:
    """Close the server as soon as the buffer gives nothing away any more."""
    await buffer.room.until(lambda: buffer.is_closed)
    await server.aclose()


_AT_ONCE: Final = 1024
"""So many may be under way; then the oldest is left to its producer's ``ttl_s``."""

_REPORTED: Final = 4096
"""Of so many transfers, the last ones, it is known that a save of them has failed."""


class P2PNotifications:
    """Sends them beside everything else: nobody waits for them, none of them raises."""

    def __init__(
        self, transfers: Transfers, routes: P2PRoutes, options: ConnectorOptions
    ) -> None:
        self._transfers, self._routes, self._options = transfers, routes, options
        self._reports: dict[tuple[str, str], _Reports] = {}

    def release(self, request: LoadRequest) -> None:
        """Nobody here needs it: let who holds it have the memory back. Never waits."""
        with contextlib.suppress(IncompatiblePeer):  # it was no transfer for us
            _, sources = self._routes.sources(request)
            self.release_all(request, list(sources.values()))

    def release_all(self, request: LoadRequest, sources: Sequence[Source]) -> None:
        """The same, of these entries of it."""
        timeout_s = self._options.load_timeout_s
        for source in sources:
            # Requests may name transfers that there are not: those are waited for.
            self._begin(
                functools.partial(release, source, request, timeout_s),
                f"release of {request.transfer_id}",
            )

    def withdraw(self, request: SaveRequest) -> None:
        """Nobody will ask for what was saved: have the memory back. Never waits."""
        timeout_s = self._options.load_timeout_s
        with contextlib.suppress(IncompatiblePeer):  # then there is none
            for target in self._routes.targets(request):
                self._begin(
                    functools.partial(withdraw, target, timeout_s),
                    f"withdrawal of {request.transfer_id}",
                )

    def report_failure(
        self, request: SaveRequest, header: EntryHeader, reason: str
    ) -> None:
        """It was not saved: nobody shall wait for what does not come. Never waits."""
        try:
            targets = self._routes.targets(request)
        except IncompatiblePeer:
            return  # then nobody can wait for it
        tokens, ttl_s = request.token_ids, self._options.ttl_s
        tasks = [
            self._begin(
                functools.partial(
                    report_failure, target, tokens, header, reason, ttl_s
                ),
                f"failure of {request.transfer_id}",
            )
            for target in targets
        ]
        if request.is_named:  # what has no name is not saved again
            self._remember(request, [task for task in tasks if task is not None])

    def has_reported(self, request: SaveRequest) -> bool:
        """Whether it says in place of that transfer's entry why there is none."""
        return _name_of(request) in self._reports

    async def take_back_report(self, request: SaveRequest) -> bool:
        """Make room for an entry where :meth:`report_failure` has said why it failed.

        ``False``: it has not, as far as is known. A cancelled call has done so or not.

        :raises PeerLost: who holds it is gone
        :raises TimeoutError: who holds it did not answer
        """
        reports = self._reports.get(_name_of(request))
        if reports is None:
            return False
        if reports.tasks:
            for task in reports.tasks:
                task.cancel()
            await asyncio.wait(set(reports.tasks))
        for target in self._routes.targets(request):
            await withdraw(target, self._options.load_timeout_s)
        return True

    def forget_report(self, request: SaveRequest) -> None:
        """An entry is there now that is whole."""
        self._reports.pop(_name_of(request), None)

    def _begin(
        self, run: Callable[[], Coroutine[Any, Any, None]], name: str
    ) -> asyncio.Task[None] | None:
        return self._transfers.begin_unreported(run, name, at_most=_AT_ONCE)

    def _remember(
        self, request: SaveRequest, tasks: Sequence[asyncio.Task[None]]
    ) -> None:
        name = _name_of(request)
        reports = self._reports.pop(name, None) or _Reports()
        self._reports[name] = reports
        reports.tasks.update(tasks)
        for task in tasks:
            task.add_done_callback(lambda task: self._report_ended(name, task))
        while len(self._reports) > _REPORTED:
            del self._reports[next(iter(self._reports))]

    def _report_ended(self, name: tuple[str, str], task: asyncio.Task[None]) -> None:
        if (reports := self._reports.get(name)) is None:
            return
        reports.tasks.discard(task)
        if task.cancelled() or not isinstance(task.exception(), EntryConflict):
            reports.may_be_there = True
        if not (reports.tasks or reports.may_be_there):
            del self._reports[name]  # another save of it was whole: that stays


@dataclasses.dataclass(slots=True)
class _Reports:
    """That the saves of one transfer have failed, and what still tells of it."""

    tasks: set[asyncio.Task[None]] = dataclasses.field(default_factory=set)
    may_be_there: bool = False


def _name_of(request: SaveRequest) -> tuple[str, str]:
    return request.peer, request.transfer_id
