"""Every frame there is, after every other that opens or offers, to every side."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest

from harness.fuzzing.corpus import OPENING, Corpus
from harness.fuzzing.mutations import Item, join
from harness.fuzzing.peer_target import PEER
from harness.fuzzing.sides import SIDES

pytestmark = [pytest.mark.trust, pytest.mark.timeout(900)]

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
