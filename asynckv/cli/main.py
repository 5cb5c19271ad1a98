"""The ``asynckv`` command. Each sub-command has a file of its own."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final

from asynckv import __version__

__all__ = ("main",)

_COMMANDS: Final = {
    "demo": ("asynckv.cli.demo.command:demo", "Prefill here, decode there: watch it."),
    "bench": ("asynckv.cli.bench.command:bench", "Measure asynckv on this machine."),
    "serve": ("asynckv.cli.serving:serve", "Serve a buffer in its own process."),
    "check-config": (
        "asynckv.cli.checking:check_config",
        "Explain a KVTransferConfig.",
    ),
}
"""Where each is, and its line in the list of commands, which imports none of them."""

_DEMO_OF_THE_CACHE: Final = (
    "asynckv.cli.demo.cache.command:demo_cache",
    "Two engines and one store: see what they need not compute.",
)

_NOT_INSTALLED: Final = (
    "asynckv: this command needs {missing}, which is not installed "
    '(in a checkout of asynckv: python -m pip install -c constraints.txt ".[cli]")'
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its status: 2 if the extra is missing."""
    try:
        from cyclopts import App
    except ModuleNotFoundError as exc:
        print(_NOT_INSTALLED.format(missing=exc.name), file=sys.stderr)
        sys.exit(2)
    app = App(
        name="asynckv",
        help="Move LLM KV caches between processes and machines.",
        version=__version__,
        result_action="return_value",
    )
    given = sys.argv[1:] if arguments is None else list(arguments)
    for name, (where, line) in _COMMANDS.items():
        # A command that is asked for its own help says more than that line.
        app.command(where, name=name, help=None if name in given else line)
    if "demo" in given:
        where, line = _DEMO_OF_THE_CACHE
        app["demo"].command(
            where, name="cache", help=None if "cache" in given else line
        )
    status = app(given)
    sys.exit(status if isinstance(status, int) else 0)
