"""Hostile bytes for the wire: recorded, cut, flipped and made up by the million.

``python -m harness.fuzzing --help`` runs it and replays what it found.
"""

from __future__ import annotations

__all__: tuple[str, ...] = ()
