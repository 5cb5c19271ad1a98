"""What a command leaves behind, and how a browser shows a page that it has written."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping
from html import escape, unescape
from pathlib import Path
from typing import Any

import pytest

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
  const text = what => page.querySelector(what).textContent;
  const colour = (one, name) => getComputedStyle(page.querySelector(one))[name];
  const brightness = (one, name) => colour(one, name).match(/\\d+/g).slice(0, 3)
    .reduce((sum, part) => sum + Number(part), 0);
  const seen = {{
    overflow: root.scrollWidth - root.clientWidth,
    clipped: all("svg text").filter(one => one.textContent && (
      box(one).left < 0 || box(one).right > root.clientWidth)).length,
    paper: brightness("body", "backgroundColor"), ink: brightness("body", "color"),
    fetched: event.target.contentWindow.performance.getEntriesByType("resource").length,
    {more}
  }};
  document.querySelector("#seen").textContent = JSON.stringify(seen);
}};
</script>"""

LookAt = Callable[..., dict[str, Any]]


@pytest.fixture
def look_at(tmp_path: Path) -> LookAt:
    """Let a browser lay a page out, and return what the probe saw.

    ``more`` is what to look for in this page alone: expressions of JavaScript, by
    the names under which their values come back.
    """

    def look(
        page: str, more: Mapping[str, str], *, dark: bool, width: int = 1100
    ) -> dict[str, Any]:
        fields = "\n    ".join(f"{name}: {value}," for name, value in more.items())
        html = PROBE.format(page=escape(page), width=width, more=fields)
        probe = tmp_path / "probe.html"
        probe.write_text(html, encoding="utf-8")
        return _seen_by_browser(probe, dark=dark)

    return look


@pytest.fixture
def belonging_to() -> Callable[[Path], list[int]]:
    """Return the processes whose files go to a folder."""
    return _belonging_to


def _belonging_to(folder: Path) -> list[int]:
    wanted, found = f"TMPDIR={folder}".encode(), list[int]()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (process / "environ").read_bytes().split(b"\0"):
                found.append(int(process.name))
        except OSError:
            continue  # it has just ended
    return found


def _seen_by_browser(probe: Path, *, dark: bool) -> dict[str, Any]:
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"no browser here: none of {', '.join(BROWSERS)} is installed")
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    profile = f"--user-data-dir={probe.parent / 'profile'}"
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
    seen: dict[str, Any] = json.loads(unescape(found[1]))
    return seen
