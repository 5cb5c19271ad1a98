"""Millions of hostile inputs, and every frame after every other, break no promise."""

from __future__ import annotations

import itertools
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.fuzzing.corpus import OPENING, Corpus
from harness.fuzzing.mutations import Item, join
from harness.fuzzing.peer_target import PEER, SIDES

pytestmark = [pytest.mark.trust, pytest.mark.timeout(7200)]


@pytest.mark.longest
@pytest.mark.multiprocess
def test_no_hostile_input_breaks_a_promise(
    tmp_path: Path, scale: Any, figures: Callable[[str], None]
) -> None:
    command = (
        *(sys.executable, "-m", "harness.fuzzing"),
        *("--inputs", str(scale.fuzz_inputs)),
        *("--processes", str(os.cpu_count() or 1)),
        *("--findings", str(tmp_path)),
    )
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    total = re.search(r"^([\d,]+) inputs in .*", ran.stdout, re.MULTILINE)
    assert total is not None
    figures(total[0])
    assert int(total[1].replace(",", "")) >= scale.fuzz_inputs


NUMBERS = {side.name: number for number, side in enumerate(SIDES)}
OFFERING = ("Offer", "Grant", "Push", "Noted")
STREAMS = {"asking": range(1, 21, 2), "dialled": (1,), "following": (1,)}


def frames() -> dict[str, Item]:
    """One sample of each frame."""
    samples: dict[str, Item] = {}
    for kind, item in Corpus(1).frames:
        samples.setdefault(kind, item)
    return samples


@pytest.mark.parametrize("name", sorted(NUMBERS))
def test_no_frame_after_any_other_breaks_a_promise(
    name: str, scale: Any, figures: Callable[[str], None]
) -> None:
    samples = frames()
    before = OPENING if name in ("serving", "listening") else OFFERING
    streams = STREAMS.get(name, (1,))
    every = list(itertools.product(streams, sorted(before), samples.values()))
    random.Random(name).shuffle(every)
    chosen = every[: len(every) // scale.one_meeting_in]
    for stream, first, last in chosen:
        said = [samples[first]._replace(stream=stream), last._replace(stream=stream)]
        PEER.check(bytes((NUMBERS[name],)) + join(said))
    figures(f"{len(chosen):,} of {len(every):,} meetings")
