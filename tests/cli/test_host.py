from __future__ import annotations

import platform

from asynckv.cli.process import describe_host, processor


def test_a_host_is_described_without_its_name() -> None:
    words = describe_host()
    assert words.startswith(processor())
    assert "cores, load" in words
    assert platform.node() not in words
