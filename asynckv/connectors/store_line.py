"""The way to a store: one that was given, or the one of the configuration."""

from __future__ import annotations

import logging
from typing import Final

from asynckv.abc import KVStoreBuffer
from asynckv.config import KVTransferConfig
from asynckv.connectors.engine import KVEngine
from asynckv.connectors.options import ConnectorOptions
from asynckv.connectors.peers import PeerLine
from asynckv.errors import ConfigError
from asynckv.observability.lines import as_line

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
        self._line = PeerLine(url or "", config, f"{engine.engine_id}/{name}")

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
