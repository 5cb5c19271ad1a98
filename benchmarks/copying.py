"""What a copy costs this machine, and what it does where it bypasses the caches.

The C library decides by size how it copies; from which size on, it can be told by an
environment variable before a process starts. This one starts two others in turns, one
without it and one with it, and each copies memory that was touched before in pieces, as
``asynckv`` does, and digests each or not. CPU seconds a GB, the least of the turns:
what other processes do can only make them more.

    python -m benchmarks.copying [--turns 5] [--mib 256] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from typing import Final

import numpy

from asynckv.protocol.wire import digest_of
from benchmarks.pairing.runs import arguments_of, figures_of, report

__all__ = ("main",)

TUNABLES: Final = "GLIBC_TUNABLES=glibc.cpu.x86_non_temporal_threshold=0x80000"
_MIB: Final = 2**20
_PIECES: Final = (_MIB, 4 * _MIB)


def _measure(nbytes: int) -> dict[str, float]:
    source = numpy.ones(nbytes, numpy.uint8)
    target = numpy.zeros(nbytes, numpy.uint8)
    target[::4096] = 1
    found = {}
    for piece in _PIECES:
        for does in ("copy", "copy and digest"):
            began_s = time.thread_time()
            for start in range(0, nbytes, piece):
                some = target[start : start + piece]
                numpy.copyto(some, source[start : start + piece])
                if does != "copy":
                    digest_of(some.data)
            cpu_s = time.thread_time() - began_s
            found[f"{does}, pieces of {piece // _MIB} MiB"] = cpu_s / nbytes * 1e9
    return found


def _measure_apart(nbytes: int, *, tuned: bool) -> dict[str, float]:
    environment = dict(os.environ)
    environment.pop("GLIBC_TUNABLES", None)
    if tuned:
        name, _, value = TUNABLES.partition("=")
        environment[name] = value
    command = [sys.executable, "-m", "benchmarks.copying", "--one", str(nbytes)]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    """Measure in turns and print both, and how much less the second is."""
    parser = arguments_of(__doc__, turns=5, mib=256)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(_measure(given.one)))
        return
    turns = [
        [_measure_apart(given.mib * _MIB, tuned=tuned) for tuned in (False, True)]
        for _ in range(given.turns)
    ]
    figures = []
    for name in turns[0][0]:
        plain, tuned = (min(turn[side][name] for turn in turns) for side in (0, 1))
        told = {"as it is": plain, f"with {TUNABLES}": tuned, "ratio": tuned / plain}
        figures += figures_of(f"CPU s/GB, {name}", told)
    report(figures, given)


if __name__ == "__main__":
    main()
