"""``python -m harness.simulation --seed N`` tells the story of a seed."""

from __future__ import annotations

import sys

from harness.simulation.command import main

__all__: tuple[str, ...] = ()

if __name__ == "__main__":
    sys.exit(main())
