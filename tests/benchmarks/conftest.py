"""Benchmarks are no part of the package: they are found beside it."""

from __future__ import annotations

import sys
from pathlib import Path

# Last, so that an installed asynckv stays the one that is tested.
sys.path.append(str(Path(__file__).parents[2]))
