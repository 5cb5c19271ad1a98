from __future__ import annotations

from harness.simulation.story import Story


def test_slices_faults_and_calls_are_events_and_remarks_are_not() -> None:
    story = Story()
    for kind in ("bytes", "fault", "call", "end", "note"):
        story.add(0.0, kind, "c1", "something")
    assert story.events == 4


def test_a_story_is_told_with_slices_or_without() -> None:
    story = Story()
    story.add(1.5, "bytes", "", "c1 > server #1: 7 bytes")
    story.add(2.5, "call", "c1", "1 insert")
    assert len(list(story.text())) == 2
    (line,) = story.text(with_bytes=False)
    assert line.split() == ["2.500000", "call", "c1", "1", "insert"]


def test_stories_that_differ_in_one_line_have_other_digests() -> None:
    stories = [Story(), Story(), Story()]
    for story, at in zip(stories, (1.0, 1.0, 1.1), strict=True):
        story.add(at, "call", "c1", "1 insert")
    digests = [story.digest() for story in stories]
    assert digests[0] == digests[1] != digests[2]
