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

from asynckv.cli.demo.page import render_page
from asynckv.cli.demo.report import DemoReport

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

# Loads the page in a frame, looks at what the browser made of it, writes it down.
PROBE = """<!DOCTYPE html>
<iframe width="{width}" height="3000" srcdoc="{page}"></iframe>
<pre id="seen"></pre><script>
document.querySelector("iframe").onload = event => {{
  const page = event.target.contentDocument, root = page.documentElement;
  const box = one => one.getBoundingClientRect();
  const all = what => [...page.querySelectorAll(what)];
  const colour = (one, name) => getComputedStyle(page.querySelector(one))[name];
  const seen = {{
    lanes: all(".lane").length,
    thinnest: Math.min(...all(".compute, .wire").map(one => box(one).width)),
    overflow: root.scrollWidth - root.clientWidth,
    clipped: all("svg text").filter(one => one.textContent && (
      box(one).left < 0 || box(one).right > root.clientWidth)).length,
    rows: all("#numbers tr").length,
    paper: colour("body", "backgroundColor"), ink: colour("body", "color"),
    compute: colour(".compute", "fill"),
    text: page.querySelector("#text").textContent,
    verdict: page.querySelector("#verdict").textContent,
    fetched: event.target.contentWindow.performance.getEntriesByType("resource").length,
  }};
  document.querySelector("#seen").textContent = JSON.stringify(seen);
}};
</script>"""


def browser() -> str:
    for name in BROWSERS:
        if found := shutil.which(name):
            return found
    pytest.skip(f"no browser here: none of {', '.join(BROWSERS)} is installed")


def look_at(page: str, folder: Path, *, dark: bool, width: int = 1100) -> Any:
    """Let a browser lay the page out, and return what the probe saw."""
    probe = folder / "probe.html"
    probe.write_text(PROBE.format(page=escape(page), width=width), encoding="utf-8")
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    profile = f"--user-data-dir={folder / 'profile'}"
    process = subprocess.Popen(
        [browser(), *FLAGS, scheme, profile, "--dump-dom", probe.as_uri()],
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


def test_the_page_refers_to_nothing_outside_itself(sample_report: DemoReport) -> None:
    page = render_page(sample_report)
    assert not re.search(r"https?:|\ssrc=|@import|url\(|<link|<script", page)


def test_text_of_the_model_cannot_become_markup(sample_report: DemoReport) -> None:
    page = render_page(msgspec.structs.replace(sample_report, text="<b>&</b>"))
    assert "&lt;b&gt;&amp;&lt;/b&gt;" in page


def test_the_page_shouts_when_tokens_differ(sample_report: DemoReport) -> None:
    bulk = msgspec.structs.replace(sample_report.bulk, tokens=())
    page = render_page(msgspec.structs.replace(sample_report, bulk=bulk))
    assert '<p class="verdict bad" id="verdict">tokens differ</p>' in page


def test_the_page_lists_what_went_wrong(sample_report: DemoReport) -> None:
    report = msgspec.structs.replace(sample_report, problems=("Bulk: <2> positions",))
    assert "<li>Bulk: &lt;2&gt; positions</li>" in render_page(report)


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_browser_shows_the_page(
    sample_report: DemoReport, tmp_path: Path, dark: bool
) -> None:
    seen = look_at(render_page(sample_report), tmp_path, dark=dark)
    assert seen["lanes"] == 60
    assert seen["thinnest"] >= 0.5
    assert (seen["overflow"], seen["clipped"], seen["fetched"]) == (0, 0, 0)
    assert seen["text"] == sample_report.text
    assert seen["verdict"] == "every act generated the same tokens"
    paper, ink = brightness(seen["paper"]), brightness(seen["ink"])
    assert (ink - paper if dark else paper - ink) > 500
    assert abs(brightness(seen["compute"]) - paper) > 200


@pytest.mark.multiprocess
@pytest.mark.slow
def test_a_narrow_window_does_not_scroll_sideways(
    sample_report: DemoReport, tmp_path: Path
) -> None:
    seen = look_at(render_page(sample_report), tmp_path, dark=False, width=420)
    assert (seen["overflow"], seen["clipped"]) == (0, 0)


def test_the_page_says_which_device_both_are_on(sample_report: DemoReport) -> None:
    assert "share its cores" in render_page(sample_report)
    on_gpu = msgspec.structs.replace(sample_report, device="cuda:0 (<H200>)")
    assert render_page(on_gpu).count("cuda:0 (&lt;H200&gt;)") == 3
