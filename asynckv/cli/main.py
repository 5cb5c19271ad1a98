"""The ``asynckv`` command. Each sub-command has a file of its own."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from cyclopts import App

from asynckv import __version__

__all__ = ("main",)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its status."""
    app = App(
        name="asynckv",
        help="Move LLM KV caches between processes and machines.",
        version=__version__,
        result_action="return_value",
    )
    # By name, so that one command does not load what another needs.
    app.command("asynckv.cli.demo.command:demo", name="demo")
    app.command("asynckv.cli.bench.command:bench", name="bench")
    app.command("asynckv.cli.serving:serve", name="serve")
    app.command("asynckv.cli.checking:check_config", name="check-config")
    status = app(arguments)
    sys.exit(status if isinstance(status, int) else 0)
