"""The way to a store: one that was given, or the one of the configuration."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from asynckv.abc import KVStoreBuffer
from asynckv.buffers.gpu_room import StagingStore
from asynckv.config import KVTransferConfig
from asynckv.connectors.engine import KVEngine
from asynckv.connectors.options import ConnectorOptions
from asynckv.connectors.peers import PeerLine
from asynckv.errors import ConfigError, GPUFailed, GPUUnavailable
from asynckv.observability.lines import as_line
from asynckv.tensors.devices import Device

__all__ = ("FINGERPRINT_HINT", "StoreLine")

logger = logging.getLogger(__name__)

FINGERPRINT_HINT: Final = (
    "the model's name and revision, for example: engines share the blocks of those "
    "that say the same"
)


class StoreLine:
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
        self._leaving_bytes = 0
        self._max_bytes = config.max_bytes
        self._line = PeerLine(url or "", config, f"{engine.engine_id}/{name}")

    @property
    def landing(self) -> str | None:
        """The GPU that :meth:`use_gpu` was told, as torch calls it, if it counts."""
        device = self._line.device
        return None if device is None or self._store is not None else device.name

    @property
    def staging(self) -> StagingStore | None:
        """The store, if values may leave for it from memory of that GPU now."""
        peer, device = self._line.connected, self._line.device
        store = self._store
        if store is None and peer is not None:
            store = peer.store
        if not isinstance(store, StagingStore) or device is None:
            return None
        return store if store.leaves_from == device.name else None

    @property
    def leaving_bytes(self) -> int:
        """How much they may have of it: less where the GPU has had less to give."""
        if self._store is not None:
            return self._leaving_bytes
        peer = self._line.connected
        if peer is None or peer.on_gpu is None or peer.on_gpu.device_pages is None:
            return 0
        asked, there = peer.budget.max_bytes, peer.on_gpu.device_pages.nbytes
        return self._leaving_bytes * min(there, asked) // max(asked, 1)

    def use_gpu(self, device: Device, landing_bytes: int, leaving_bytes: int) -> None:
        """Have so much of a GPU for values that are fetched, from the next dial on.

        And so much more for those that leave from there. What a store that was given
        has of it is its own affair; so much of that they may have. Never waits.
        """
        self._line.device = device
        self._line.max_bytes = landing_bytes + leaving_bytes
        self._leaving_bytes = leaving_bytes

    def use_no_gpu(self) -> None:
        """Have no memory of one any more, from the next dial on. Never waits."""
        self._line.device, self._line.max_bytes = None, self._max_bytes
        self._leaving_bytes = 0

    @property
    def is_connected(self) -> bool:
        """Whether a link is up; to a store that was given there is none."""
        return self._line.is_connected

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

    def call_when_left(self, callback: Callable[[], None]) -> None:
        """Call back when a link was lost, before another is made, or as this closes."""
        self._line.call_when_left(callback)

    async def store(self) -> KVStoreBuffer:
        """Return the store. A cancelled call leaves no trace.

        Where the GPU has no memory for values they come and go by way of the host, from
        then on: none is needed.

        :raises PeerLost: nobody is there
        """
        while self._store is None:
            device = self._line.device
            try:
                return (await self._line.peer()).store
            except (GPUFailed, GPUUnavailable) as exc:
                if device is None:
                    raise
                self._do_without(device, exc)
        return self._store

    async def aclose(self) -> None:
        """Say goodbye; a store that was given stays open. Bounded and shielded."""
        await self._line.aclose()

    def abort(self) -> None:
        """Hang up. Never waits."""
        self._line.abort()

    def _do_without(self, device: Device, why: Exception) -> None:
        if self._line.device is not device:
            return  # who dialled as well has said so
        self.use_no_gpu()
        logger.warning(
            "values have no memory of %s, all come and go by way of the host: %s",
            *(device.name, as_line(str(why))),
        )
