"""The same targets, steered by which lines an input reaches. Needs ``atheris``.

``python -m harness.fuzzing.coverage_guided wire -max_total_time=600``; what
follows the target's name is libFuzzer's. Where atheris is not installed it says so.
"""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

__all__ = ("main",)

_SEEDS: Final = 300
_INSTRUMENTED: Final = (
    "asynckv.protocol",
    "asynckv.transfers.manifest",
    "asynckv.links",
)


def main(arguments: list[str]) -> None:
    """Fuzz one target until libFuzzer ends the process.

    :raises SystemExit: atheris is not installed here, or there is no such target
    """
    atheris = _atheris()
    with atheris.instrument_imports(include=_INSTRUMENTED):
        from harness.fuzzing.corpus import Corpus
        from harness.fuzzing.fuzzer import TARGETS
        from harness.fuzzing.wire_frames import resealed

    if not arguments or arguments[0] not in TARGETS:
        raise SystemExit(f"name one of these first: {', '.join(TARGETS)}")
    target = TARGETS[arguments[0]]
    rng, corpus = random.Random(0), Corpus(0)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(_SEEDS):
            Path(folder, str(number)).write_bytes(target.make(rng, corpus))

        def check(data: bytes) -> None:
            # It cannot guess a checksum: both as it is, and with one that fits.
            target.check(data)
            target.check(data[:1] + resealed(data[1:]))

        atheris.Setup([sys.argv[0], *arguments[1:], folder], check)
        atheris.Fuzz()


def _atheris() -> Any:
    try:
        import atheris
    except ImportError as exc:
        raise SystemExit(f"not here: {exc}; python -m pip install atheris") from exc
    return atheris


if __name__ == "__main__":
    main(sys.argv[1:])
