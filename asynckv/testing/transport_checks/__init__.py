"""The checks of :mod:`asynckv.testing.transport_conformance`, by subject."""

from __future__ import annotations

__all__: tuple[str, ...] = ()
