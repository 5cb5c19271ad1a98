from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from asynckv.protocol.codec import FrameDecoder, encode_frame
from asynckv.protocol.frames import Frame
from asynckv.transfers.layout import read_layout
from asynckv.transfers.manifest import pack, unpack
from asynckv.types import TensorSpec
from harness.fuzzing.samples import (
    Maker,
    frame_makers,
    make_spec,
    maker_of,
    sample_contents,
)

FRAMES = frame_makers()


def test_there_are_samples_of_every_frame() -> None:
    assert set(FRAMES) == {kind.__name__ for kind in Frame.__args__}


@pytest.mark.parametrize("make", FRAMES.values(), ids=FRAMES)
def test_samples_are_valid_frames(make: Maker) -> None:
    rng = random.Random(1)
    for _ in range(50):
        frame = make(rng)
        (wire,) = encode_frame(1, frame)
        assert list(FrameDecoder().feed(wire)) == [(1, frame, b"")]


def test_the_same_seed_makes_the_same_samples() -> None:
    one, two = ([m(random.Random(7)) for m in FRAMES.values()] for _ in range(2))
    assert one == two


def test_samples_reach_the_bounds_of_their_fields() -> None:
    make, rng = FRAMES["Ping"], random.Random(1)
    assert {0, 2**62} <= {make(rng).nonce for _ in range(200)}
    names = [FRAMES["Get"](rng).key for _ in range(300)]
    assert {len(name) for name in names} >= {0, 512}


def test_tuples_of_fixed_types_have_one_value_of_each() -> None:
    make, rng = maker_of(tuple[int, bool | None]), random.Random(1)
    made = [make(rng) for _ in range(50)]
    assert {type(first) for first, _ in made} == {int}
    assert {last for _, last in made} == {True, False, None}


def test_contents_make_a_manifest() -> None:
    rng = random.Random(1)
    for _ in range(50):
        contents = sample_contents(rng)
        layout = read_layout(contents.layout)
        manifest = unpack(pack(layout, contents.digests, None, None), inline=False)
        assert (manifest.layout, manifest.digests) == (layout, contents.digests)


def test_specs_are_possible() -> None:
    rng = random.Random(1)
    assert all(isinstance(make_spec(rng), TensorSpec) for _ in range(500))


@pytest.mark.parametrize("kind", [dict[str, int], set[int], msgspec.Raw, Any])
def test_what_no_frame_has_is_refused(kind: Any) -> None:
    with pytest.raises(NotImplementedError):
        maker_of(kind)
