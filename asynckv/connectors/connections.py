"""The peers of a connector: those of its configuration, and nobody else; or its store.

A link that is lost is not mended: everything under way on it fails at once, and the
next one who needs that peer dials anew.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

import anyio

from asynckv.abc import KVStoreBuffer
from asynckv.affinity import LoopBound
from asynckv.buffers.remote.peer import Peer, connect
from asynckv.config import KVTransferConfig
from asynckv.connectors.engine import KVEngine
from asynckv.connectors.options import ConnectorOptions
from asynckv.devices.names import Device
from asynckv.errors import (
    AsyncKVError,
    ConfigError,
    GPUFailed,
    GPUUnavailable,
    PeerLost,
    PeerRestarted,
)
from asynckv.observability.lines import as_line
from asynckv.waits.waiting import OwnTasks

__all__ = (
    "FINGERPRINT_HINT",
    "PeerConnection",
    "Peers",
    "StoreConnection",
    "identity_of",
)


logger = logging.getLogger(__name__)

_DIAL_S: Final = 5.0
_OPEN_GPU_S: Final = 20.0
"""So much more where there is a GPU: a way to the peer's has 10 s, or else there is
another way, and the first calls of CUDA take their time."""


def identity_of(engine_id: str, rank: int) -> str:
    """Return what a worker is called by its peers."""
    return f"{engine_id}/{rank}"


class PeerConnection:
    """One rank of one peer, dialled when it is needed.

    Where ``does_without_gpu`` memory that its GPU has not got fails no dialling: that
    link does without, and the next one asks for it again.
    """

    def __init__(
        self,
        url: str,
        config: KVTransferConfig,
        identity: str,
        device: Device | None = None,
    ) -> None:
        self.url = url
        self.device = device
        """The GPU in whose memory is received what is fetched, or from whose is sent
        what is pushed, if from one's."""
        self.max_bytes = config.max_bytes
        """What may be received at once: as much of that GPU is allocated."""
        self.does_without_gpu = False
        self._config = config
        self._identity = identity
        self._peer: Peer | None = None
        self._dialling: asyncio.Task[Peer] | None = None
        self._old = OwnTasks()
        self._is_closed = False
        self._missed: tuple[Device, int] | None = None
        self.lost = 0

    @property
    def connected(self) -> Peer | None:
        """The peer, if a request could leave now."""
        peer = self._peer  # read once: another thread may ask
        return peer if peer is not None and peer.is_connected else None

    @property
    def is_connected(self) -> bool:
        """Whether a request could leave now."""
        return self.connected is not None

    def may_lead_to_gpu(self, device: str) -> bool:
        """Whether what is put may go from ``device`` to a GPU; it may until dialled."""
        if self.device is None or self.device.name != device:
            return False
        peer = self.connected
        return peer is None or peer.sends_from == device

    async def peer(self) -> Peer:
        """Return the peer, dialling if nobody does; its end is not hidden.

        A cancelled call leaves no trace.

        :raises PeerLost: nobody is there, or this is closed
        :raises GPUUnavailable: CuPy, a driver or the GPU is missing, and needed
        :raises GPUFailed: it has no memory left, which is needed
        """
        while True:
            self._leave_lost()
            device = self.device
            try:
                return await self._reach()
            except (GPUFailed, GPUUnavailable) as exc:
                if device is None or not self.does_without_gpu:
                    raise
                self._do_without(device, exc)

    def _do_without(self, device: Device, why: Exception) -> None:
        if self.device is not device:
            return  # who dialled as well has said so
        self._missed = device, self.max_bytes
        self.device, self.max_bytes = None, self._config.max_bytes
        logger.warning(
            "what is pushed to %s leaves %s by way of host memory: %s",
            *(self.url, device.name, as_line(str(why))),
        )

    async def _reach(self) -> Peer:
        if self._is_closed:
            raise PeerLost(f"the connector that used {self.url} is closed")
        if self._peer is not None:
            return self._peer
        if self._dialling is None:
            self._dialling = asyncio.create_task(
                self._dial(), name=f"asynckv: dial {self.url}"
            )
            # It may be that nobody waits for it any more.
            self._dialling.add_done_callback(
                lambda task: task.cancelled() or task.exception()
            )
        dialling = self._dialling
        await asyncio.wait({dialling})
        if dialling.cancelled():
            raise PeerLost(f"the connector that dialled {self.url} was closed")
        return dialling.result()

    def _leave_lost(self) -> None:
        """Let go of a link that was lost; the next one may find memory of the GPU."""
        if self._is_closed or self._peer is None or self._peer.is_connected:
            return
        self._drop(self._peer)
        if self._missed is not None:
            self.device, self.max_bytes = self._missed
            self._missed = None

    def hang_up(self) -> None:
        """End the link as if it were lost: who comes next dials anew. Never waits."""
        if self._peer is not None:
            self._peer.abort()

    def is_of(self, identity: str) -> bool:
        """Whether who is connected here is called so."""
        peer = self.connected
        return peer is not None and peer.identity == identity

    async def aclose(self) -> None:
        """Say goodbye. Bounded and shielded."""
        self._is_closed = True
        try:
            with anyio.CancelScope(shield=True):
                if self._dialling is not None:
                    self._dialling.cancel()
                    await asyncio.wait({self._dialling})
                if self._peer is not None:
                    self._drop(self._peer)
                await self._old.wait()
        finally:  # also if the task is cancelled: nothing stays open
            self.abort()

    def abort(self) -> None:
        """Hang up. Never waits."""
        self._is_closed = True
        if self._dialling is not None:
            self._dialling.cancel()
        if self._peer is not None:
            self._peer.abort()

    async def _dial(self) -> Peer:
        config, on_gpu = self._config, self.device is not None
        try:
            async with asyncio.timeout(_DIAL_S + _OPEN_GPU_S * on_gpu):
                if on_gpu:  # it has no room for both
                    await self._old.wait()
                peer = await connect(
                    self.url,
                    fingerprint=config.fingerprint,
                    reconnect_s=0,
                    max_bytes=self.max_bytes,
                    secret_file=config.secret_file,
                    tls=config.tls,
                    allow_plaintext=config.allow_plaintext,
                    identity=self._identity,
                    device=self.device,
                ).__aenter__()
        except OSError as exc:  # so is a TimeoutError, which says nothing itself
            silent = f"no answer within {_DIAL_S + _OPEN_GPU_S * on_gpu:g} s"
            raise PeerLost(
                f"nobody serves at {self.url}: {str(exc) or silent}",
                hint=None if str(exc) else "it listens, but is busy, frozen or another",
            ) from exc
        finally:
            self._dialling = None
        self._peer = peer
        return peer

    def _drop(self, peer: Peer) -> None:
        """A link that was lost is closed beside whatever comes next."""
        self._peer = None
        self.lost += 1
        self._old.own(peer.aclose(), f"asynckv: leave {self.url}")


class Peers(LoopBound):
    """Every rank of every peer that the configuration names."""

    def __init__(self, config: KVTransferConfig, engine: KVEngine) -> None:
        self._config = config
        self._engine = engine
        self._options = ConnectorOptions.of(config)
        self._lines: dict[tuple[str, int], PeerConnection] = {}
        self._is_closed = False
        self.device: Device | None = None
        """The GPU in whose memory is received what is fetched, if in one's."""
        self._pushes_from: int | None = None

    def push_from(self, device: Device | None, max_bytes: int) -> None:
        """Have so much of a GPU for what is pushed to each rank, from the next dial on.

        Where it is not to be had what is pushed comes by way of host memory. Never
        waits.
        """
        self.device, self._pushes_from = device, max_bytes

    def may_lead_to_gpu(self, name: str, rank: int, device: str) -> bool:
        """Whether what is put at a rank may go from ``device`` to a GPU there."""
        if self.device is None or self.device.name != device:
            return False
        names = (name,) if name in self._options.peers else self._options.peers
        lines = [self._lines.get((one, rank)) for one in names]
        return any(line is None or line.may_lead_to_gpu(device) for line in lines)

    def line(self, name: str, rank: int) -> PeerConnection:
        """Return the way to one rank of a peer of that name in the configuration.

        :raises KeyError: there is no such peer
        :raises PeerLost: this is closed
        """
        url = self._options.url_of(name, rank)
        identity = identity_of(self._engine.engine_id, self._engine.rank)
        found = self._lines.get((name, rank))
        if found is None:
            if self._is_closed:  # perhaps meanwhile: nobody would close another one
                raise PeerLost("the connector is closed")
            found = PeerConnection(url, self._config, identity, self.device)
            if self.device is not None and self._pushes_from is not None:
                found.max_bytes = self._pushes_from
                found.does_without_gpu = True
            self._lines[name, rank] = found
        return found

    async def find(self, name: str, rank: int, incarnation: str = "") -> Peer:
        """Return one rank of the peer ``name``.

        A cancelled call leaves no trace.

        :raises PeerLost: nobody of that name is there
        :raises PeerRestarted: it is not the ``incarnation`` that was given
        """
        self._check_loop()
        if self._is_closed:
            raise PeerLost("the connector is closed")
        if name in self._options.peers:
            peer = await self.line(name, rank).peer()
        else:
            peer = await self._called(identity_of(name, rank), rank)
        if incarnation and peer.incarnation != incarnation:
            raise PeerRestarted(
                f"{as_line(name)} has restarted", hint="its KV is gone: compute it here"
            )
        return peer

    def hang_up(self, name: str, rank: int) -> None:
        """End the link to one rank of a peer, as if it were lost. Never waits."""
        for (known, of_rank), line in self._lines.items():
            if of_rank == rank and (
                known == name or line.is_of(identity_of(name, rank))
            ):
                line.hang_up()

    async def aclose(self) -> None:
        """Say goodbye to all of them. Bounded and shielded."""
        self._is_closed = True
        try:
            with anyio.CancelScope(shield=True):
                for line in self._lines.values():
                    await line.aclose()
        finally:
            self.abort()

    def abort(self) -> None:
        """Hang up everywhere. Never waits."""
        self._is_closed = True
        for line in self._lines.values():
            line.abort()

    @property
    def connected(self) -> int:
        """How many links are up."""
        return sum(line.is_connected for line in self._lines.values())

    @property
    def lost(self) -> int:
        """How many links were lost."""
        return sum(line.lost for line in self._lines.values())

    async def _called(self, identity: str, rank: int) -> Peer:
        """Ask those of whom only the URL is configured who they are."""
        names = () if self._options.are_peers_named else tuple(self._options.peers)
        lost: AsyncKVError | None = None
        for name in names:
            try:
                peer = await self.line(name, rank).peer()
            except AsyncKVError as exc:
                lost = exc
                continue
            if peer.identity == identity:
                return peer
        why = "" if lost is None else f"{as_line(str(lost))}; so "
        raise PeerLost(
            f"{why}none of the {len(names)} configured peers is {as_line(identity)}",
            hint="kv_connector_extra_config.peers has the URL of each",
        ) from lost


FINGERPRINT_HINT: Final = (
    "the model's name and revision, for example: engines share the blocks of those "
    "that say the same"
)


class StoreConnection:
    """Dials when it is needed; a link that is lost fails what is under way at once.

    A store that is shared says by its users' fingerprints whose blocks are whose:
    sizes alone tell no model from a finer tuned one.

    :raises ConfigError: no store is given or configured, or it is not said of what
        model its blocks are
    """

    def __init__(
        self,
        config: KVTransferConfig,
        engine: KVEngine,
        store: KVStoreBuffer | None,
        name: str,
    ) -> None:
        url = ConnectorOptions.of(config).store
        if store is None and url is None:
            raise ConfigError(
                "a StoreConnector needs kv_connector_extra_config.store",
                hint='the URL of "asynckv serve --store SIZE", for example',
            )
        if store is None and config.fingerprint is None:
            raise ConfigError(
                "a StoreConnector needs kv_connector_extra_config.fingerprint",
                hint=FINGERPRINT_HINT,
            )
        self.url = url or "the store that was given"
        self.is_lost = False
        """Whether it did not answer when it was asked last."""
        self._store = store
        self._line = PeerConnection(url or "", config, f"{engine.engine_id}/{name}")

    @property
    def is_connected(self) -> bool:
        """Whether a link is up; to a store that was given there is none."""
        return self._line.is_connected

    @property
    def connected(self) -> KVStoreBuffer | None:
        """The store, if a question could leave now: each link has another object.

        One that was given is always the same. From any thread.
        """
        if self._store is not None:
            return self._store
        peer = self._line.connected
        return None if peer is None else peer.store

    @property
    def is_reachable(self) -> bool:
        """Whether a question could leave now, and the last one was answered."""
        return not self.is_lost and (self._store is not None or self._line.is_connected)

    def note_lost(self, why: str) -> None:
        """Say in the log that the store does not answer, once. Never waits."""
        if not self.is_lost:
            self.is_lost = True
            logger.warning(
                "lost the store at %s: %s; until it answers again prompts are "
                "computed here",
                *(self.url, as_line(why)),
            )

    def note_answer(self) -> None:
        """Say in the log that the store answers again, once. Never waits."""
        if self.is_lost:
            self.is_lost = False
            logger.info("the store at %s answers again", self.url)

    async def store(self) -> KVStoreBuffer:
        """Return the store. A cancelled call leaves no trace.

        :raises PeerLost: nobody is there
        """
        if self._store is not None:
            return self._store
        return (await self._line.peer()).store

    async def aclose(self) -> None:
        """Say goodbye; a store that was given stays open. Bounded and shielded."""
        await self._line.aclose()

    def abort(self) -> None:
        """Hang up. Never waits."""
        self._line.abort()
