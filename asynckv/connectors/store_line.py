"""The way to a store: one that was given, or the one of the configuration."""

from __future__ import annotations

import logging
from typing import Final

from asynckv.abc import KVStoreBuffer
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
        self._store = store
        self._max_bytes = config.max_bytes
        self._line = PeerLine(url or "", config, f"{engine.engine_id}/{name}")

    @property
    def landing(self) -> str | None:
        """The GPU that :meth:`land_on` was told, as torch calls it, if it counts."""
        device = self._line.device
        return None if device is None or self._store is not None else device.name

    def land_on(self, device: Device, max_bytes: int) -> None:
        """Have so much of a GPU for values that are fetched, from the next dial on.

        Of a store that was given that is its own affair. Never waits.
        """
        self._line.device, self._line.max_bytes = device, max_bytes

    async def store(self) -> KVStoreBuffer:
        """Return the store. A cancelled call leaves no trace.

        Where the GPU has no memory for values they come to that of the host, from then
        on: what is stored needs none.

        :raises PeerLost: nobody is there
        """
        while self._store is None:
            device = self._line.device
            try:
                return (await self._line.peer()).store
            except (GPUFailed, GPUUnavailable) as exc:
                if device is None:
                    raise
                self._land_in_host_memory(device, exc)
        return self._store

    async def aclose(self) -> None:
        """Say goodbye; a store that was given stays open. Bounded and shielded."""
        await self._line.aclose()

    def abort(self) -> None:
        """Hang up. Never waits."""
        self._line.abort()

    def _land_in_host_memory(self, device: Device, why: Exception) -> None:
        if self._line.device is not device:
            return  # who dialled as well has said so
        self._line.device, self._line.max_bytes = None, self._max_bytes
        logger.warning(
            "no value lands on %s, all come by way of host memory: %s",
            *(device.name, as_line(str(why))),
        )
