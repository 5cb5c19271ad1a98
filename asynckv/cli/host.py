"""The machine that a command runs on, in words that name nobody."""

from __future__ import annotations

import contextlib
import os
import platform

__all__ = ("describe_host", "processor")


def processor() -> str:
    """Return the model of the processor, or its architecture."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def describe_host() -> str:
    """Return processor, cores, load average and system in one line."""
    load = f"load {os.getloadavg()[0]:.1f} before"
    system = f"{platform.system()} {platform.release()}"
    return f"{processor()}, {os.cpu_count() or 1} cores, {load}, {system}"
