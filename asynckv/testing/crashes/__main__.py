"""``python -m asynckv.testing.crashes --kills 500 --scheme unix --seed 3``."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import sys
import time

from asynckv.testing.crashes.run import kill_workers
from asynckv.testing.pairs import SCHEMES, new_url

__all__ = ("main",)


def main() -> None:
    """Kill, report, and exit 1 where a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--scheme", choices=SCHEMES, default="tcp")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    before = time.perf_counter()
    found = asyncio.run(
        kill_workers(new_url(options.scheme), options.kills, options.seed)
    )
    for name, value in dataclasses.asdict(found).items():
        sys.stdout.write(f"{name:12} {value}\n")
    sys.stdout.write(f"{time.perf_counter() - before:.1f} s\n")
    raise SystemExit(bool(found.wrongs))


if __name__ == "__main__":
    main()
