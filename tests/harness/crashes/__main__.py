"""``python -m harness.crashes --kills 500 --scheme unix --seed 3``."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import sys
import tempfile
import time

from asynckv.testing.certificates import Authority
from asynckv.testing.pairs import new_url
from harness.crashes.run import kill_workers

__all__ = ("main",)


def main() -> None:
    """Kill, report, and exit 1 where a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--scheme", choices=("tcp", "unix", "tls"), default="tcp")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    before = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        tls = Authority(folder).issue() if options.scheme == "tls" else None
        url = new_url(options.scheme)
        found = asyncio.run(kill_workers(url, options.kills, options.seed, tls=tls))
    for name, value in dataclasses.asdict(found).items():
        sys.stdout.write(f"{name:12} {value}\n")
    sys.stdout.write(f"{time.perf_counter() - before:.1f} s\n")
    raise SystemExit(bool(found.wrongs))


if __name__ == "__main__":
    main()
