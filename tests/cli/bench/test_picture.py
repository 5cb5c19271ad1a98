from __future__ import annotations

import struct
import sys
from pathlib import Path

import msgspec
import pytest

from asynckv.cli.bench.picture import can_draw, draw_picture
from asynckv.cli.bench.report import BenchReport

pytestmark = pytest.mark.skipif(not can_draw(), reason="matplotlib is not installed")


def size_of(picture: Path) -> tuple[int, int]:
    start = picture.read_bytes()[:24]
    assert start[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", start[16:])
    return width, height


def test_a_report_becomes_a_picture(sample_report: BenchReport, tmp_path: Path) -> None:
    draw_picture(sample_report, tmp_path / "bench.png")
    assert size_of(tmp_path / "bench.png") == (1122, 1364)


def test_a_report_without_rows_is_a_picture_too(
    sample_report: BenchReport, tmp_path: Path
) -> None:
    report = msgspec.structs.replace(sample_report, rows=())
    draw_picture(report, tmp_path / "none.png")
    draw_picture(sample_report, tmp_path / "bench.png")
    none, some = (tmp_path / name for name in ("none.png", "bench.png"))
    assert size_of(none) == size_of(some)
    assert len(none.read_bytes()) < len(some.read_bytes())


def test_no_window_is_asked_for(sample_report: BenchReport, tmp_path: Path) -> None:
    had_windows = "matplotlib.pyplot" in sys.modules
    draw_picture(sample_report, tmp_path / "bench.png")
    assert ("matplotlib.pyplot" in sys.modules) == had_windows
