"""A recorded session of all frame types, cut at every byte, flipped at every byte."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest

from asynckv.protocol.wire import TYPE_CHUNK, TYPE_CONTINUATION, TYPE_CONTROL
from harness.fuzzing.corpus import frame_makers
from harness.fuzzing.recording import Recording
from harness.fuzzing.replaying import (
    changed_meanings,
    check_chunk_flips,
    check_control_flips,
    check_cuts,
)
from harness.fuzzing.scenes import record

pytestmark = [pytest.mark.trust, pytest.mark.timeout(240)]

Figures = Callable[[str], None]


@pytest.fixture(scope="module")
def recording() -> Recording:
    """Return what two sides said who did everything there is to do."""
    return asyncio.run(record())


WRONG_BYTES = {
    "Insert body: tokens",  # stored under the key of another prompt
    "Insert body: roi",
    "Insert body: a tensor's name",
    "Insert body: a tensor's shape",
    "Select body",  # the KV of another prompt is found
    "Offer body: tokens",
    "Offer body: roi",
    "Offer body: a tensor's shape",
    "Offer.matched_tokens",
    "Put.key",
    "Put.spec",
    "Get.key",
    "Push.spec",
}
HANGS = {"Sent.transfer", "Grant.transfer", "Offer.transfer", "Retract.transfer"}


def test_every_frame_occurs_in_the_recording(recording: Recording) -> None:
    assert {type(frame).__name__ for frame, _ in recording.frames()} == set(
        frame_makers()
    )


def test_every_kind_of_wire_frame_occurs_in_both_directions(
    recording: Recording,
) -> None:
    for to_listener in (True, False):
        headers = {
            (frame.header.type, frame.header.more)
            for connection in recording.connections
            for frame in connection.frames(to_listener=to_listener)
        }
        assert headers == {
            (TYPE_CONTROL, False),
            (TYPE_CONTROL, True),
            (TYPE_CONTINUATION, False),
            (TYPE_CHUNK, False),
        }


def test_no_cut_gives_anything_but_what_came_before_it(
    recording: Recording, figures: Figures
) -> None:
    controls = [c for c in recording.connections if not c.is_lane]
    cuts = sum(map(check_cuts, controls))
    figures(f"{cuts:,} cuts")
    assert cuts > 200_000


def test_no_flipped_bit_of_a_control_connection_passes_for_a_frame(
    recording: Recording, figures: Figures
) -> None:
    rng = random.Random(1)
    controls = [c for c in recording.connections if not c.is_lane]
    flips = sum(check_control_flips(c, rng) for c in controls)
    figures(f"{flips:,} flips")
    assert flips > 300_000


def test_no_flipped_bit_of_a_lane_becomes_part_of_a_tensor(
    recording: Recording, figures: Figures
) -> None:
    rng = random.Random(1)
    flips = sum(check_chunk_flips(c, rng) for c in recording.connections)
    figures(f"{flips:,} flips")
    assert flips > 500_000


def test_without_checksums_flipped_bits_would_pass_for_other_frames(
    recording: Recording, figures: Figures
) -> None:
    controls = [c for c in recording.connections if not c.is_lane]
    meanings = sum(map(changed_meanings, controls), start=changed_meanings(controls[0]))
    figures(f"{meanings.total():,} flips would pass for {len(meanings)} other meanings")
    assert set(meanings) >= WRONG_BYTES | HANGS
