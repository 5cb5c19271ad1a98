"""The checks of :mod:`asynckv.testing.store_conformance`, by subject."""

from __future__ import annotations

__all__: tuple[str, ...] = ()
