from __future__ import annotations

from harness.fuzzing.scenes import record


async def test_all_scenes_play_to_their_end() -> None:
    recording = await record()
    assert {connection.is_lane for connection in recording.connections} == {True, False}
    assert len({type(frame) for frame, _ in recording.frames()}) > 40
