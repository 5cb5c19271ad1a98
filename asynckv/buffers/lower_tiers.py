"""What a store buffer tells and asks of what is below its memory, and of whose values.

A value that memory has dropped may still be there. Only changes are told, and never
waited for: whoever is below sees to it that nothing of before a change is found again.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from asynckv.types import KVFingerprint

__all__ = ("LowerTiers", "Name", "Owner", "TenantModel")


class TenantModel(NamedTuple):
    """A model of one tenant of a server."""

    tenant: str
    fingerprint: KVFingerprint | None


Owner: TypeAlias = KVFingerprint | TenantModel | None
"""Whose values these are: of one model, and of one tenant where there are several."""
Name: TypeAlias = tuple[str, Owner]
"""A key, and its owner: another owner's value is another value."""


class LowerTiers(abc.ABC):
    """Where values are that memory has no more, and what is told of those it has."""

    @abc.abstractmethod
    def stored(self, name: Name) -> None:
        """A value was put; it can be held now. Never waits."""

    @abc.abstractmethod
    def used(self, keys: Sequence[str], owner: Owner) -> None:
        """Values were found in memory. Never waits."""

    @abc.abstractmethod
    def deleted(self, name: Name) -> None:
        """Nothing is to be found under that name any more. Never waits."""

    @abc.abstractmethod
    def cleared(self, owner: Owner) -> None:
        """Nothing of that owner's is to be found any more. Never waits."""

    @abc.abstractmethod
    async def fetch(self, keys: Sequence[str], owner: Owner) -> None:
        """Fetch into memory what is there of ``keys``. What fails is not there.

        A cancelled call leaves no trace: it is fetched for others, or not.
        """

    @abc.abstractmethod
    async def where(self, keys: Sequence[str], owner: Owner) -> Sequence[Sequence[str]]:
        """Tell of each which tiers have it, as far as is known soon, in their order."""

    @abc.abstractmethod
    async def touch(self, keys: Sequence[str], owner: Owner) -> None:
        """They are soon to be used: tiers should not drop them next.

        Waits for no tier. A cancelled call may have told of none.
        """
