"""The keys of one side, read off the loop."""

from __future__ import annotations

from asynckv.links.offloading import in_thread
from asynckv.security.keyring import Keyring, Keys

__all__ = ("keys_of",)


async def keys_of(keyring: Keyring) -> Keys:
    """Return what ``keyring`` holds now; files are read in a thread.

    :raises ConfigError: they cannot be read, and never could
    """
    keys = keyring.fresh()
    return await in_thread(keyring.current) if keys is None else keys
