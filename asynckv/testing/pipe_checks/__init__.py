"""The checks of :mod:`asynckv.testing.pipe_conformance`, by subject."""

from __future__ import annotations

__all__: tuple[str, ...] = ()
