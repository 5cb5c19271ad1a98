"""The page, and how a real browser shows it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
from html import escape, unescape
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asynckv.cli.bench.page import render_page
from asynckv.cli.bench.report import BenchReport

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
    "--virtual-time-budget=2000",
)
PROBE = """<!DOCTYPE html>
<iframe width="{width}" height="3000" srcdoc="{page}"></iframe>
<pre id="seen"></pre><script>
document.querySelector("iframe").onload = event => {{
  const page = event.target.contentDocument, root = page.documentElement;
  const box = one => one.getBoundingClientRect();
  const all = what => [...page.querySelectorAll(what)];
  const colour = (one, name) => getComputedStyle(page.querySelector(one))[name];
  const seen = {{
    plots: all("svg").length, rows: all("#rows tbody tr").length,
    overflow: root.scrollWidth - root.clientWidth,
    clipped: all("svg text").filter(one => box(one).left < 0
      || box(one).right > root.clientWidth).length,
    paper: colour("body", "backgroundColor"), ink: colour("body", "color"),
    fetched: event.target.contentWindow.performance.getEntriesByType("resource").length,
  }};
  document.querySelector("#seen").textContent = JSON.stringify(seen);
}};
</script>"""


def look_at(page: str, folder: Path, *, dark: bool, width: int = 1100) -> Any:
    """Let a browser lay the page out, and return what the probe saw."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"no browser here: none of {', '.join(BROWSERS)} is installed")
    probe = folder / "probe.html"
    probe.write_text(PROBE.format(page=escape(page), width=width), encoding="utf-8")
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    profile = f"--user-data-dir={folder / 'profile'}"
    process = subprocess.Popen(
        [browser, *FLAGS, scheme, profile, "--dump-dom", probe.as_uri()],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=50)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    found = re.search(r'<pre id="seen">(.+?)</pre>', output.decode())
    assert found, "the browser did not lay the page out"
    return json.loads(unescape(found[1]))


def brightness(colour: str) -> int:
    return sum(int(part) for part in re.findall(r"\d+", colour)[:3])


def test_the_page_refers_to_nothing_outside_itself(sample_report: BenchReport) -> None:
    page = render_page(sample_report)
    assert not re.search(r"https?:|\ssrc=|@import|url\(|<link|<script", page)


def test_names_cannot_become_markup(sample_report: BenchReport) -> None:
    page = render_page(sample_report)
    assert "&lt;entry&gt;" in page
    assert "a &lt;CPU&gt;" in page
    assert "<CPU>" not in page


def test_rows_that_do_not_count_are_marked(sample_report: BenchReport) -> None:
    page = render_page(sample_report)
    assert page.count('<tr class="ok">') == 3
    assert "VOID: raw TCP / itself = 1.400" in page
    assert "FAILED: PeerLost: the peer is gone" in page
    assert "3 ok, 1 void, 1 failed" in page


def test_the_points_of_a_void_row_are_hollow(sample_report: BenchReport) -> None:
    page = render_page(sample_report)
    assert page.count('class="ours dot"') == 1
    assert page.count('class="raw dot"') == 1


def test_a_report_without_rows_is_a_page_too(sample_report: BenchReport) -> None:
    page = render_page(msgspec.structs.replace(sample_report, rows=()))
    assert "<svg" not in page
    assert page.count("Nothing was measured") == 3


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1100, 420])
def test_a_browser_shows_the_page(
    sample_report: BenchReport, tmp_path: Path, dark: bool, width: int
) -> None:
    seen = look_at(render_page(sample_report), tmp_path, dark=dark, width=width)
    assert (seen["plots"], seen["rows"]) == (3, 5)
    assert (seen["overflow"], seen["clipped"], seen["fetched"]) == (0, 0, 0)
    paper, ink = brightness(seen["paper"]), brightness(seen["ink"])
    assert (ink - paper if dark else paper - ink) > 500
