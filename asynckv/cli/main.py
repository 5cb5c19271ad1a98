"""The ``asynckv`` command. Each sub-command has a file of its own."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import Final, NoReturn

from asynckv import __version__
from asynckv.cli.process import end_process_on
from asynckv.errors import ConfigError

__all__ = ("main",)

_COMMANDS: Final = {
    "demo": ("asynckv.cli.demo.command:demo", "Prefill here, decode there: watch it."),
    "bench": ("asynckv.cli.bench.command:bench", "Measure asynckv on this machine."),
    "serve": ("asynckv.cli.serve.command:serve", "Serve buffers in a process."),
    "store": ("asynckv.cli.store:store", "Look into a store that is served."),
    "ping": ("asynckv.cli.ping:ping", "See how a server answers."),
    "check-config": (
        "asynckv.cli.checking:check_config",
        "Explain a KVTransferConfig.",
    ),
}
"""Where each is, and its line in the list of commands, which imports none of them."""

_DEMO_OF_THE_CACHE: Final = (
    "asynckv.cli.demo.command:demo_cache",
    "Two engines and one store: see what they need not compute.",
)

_NOT_INSTALLED: Final = (
    "asynckv: this command needs {missing}, which is not installed "
    '(in a checkout of asynckv: python -m pip install -c constraints.txt ".[cli]")'
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its status.

    That is 2 if the extra is missing, or if the options make no sense.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    is_server = arguments is None and given[:1] == ["serve"]
    _open_closed_streams()
    if is_server and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        # Without a traceback of an import, which take seconds until it hears of it.
        end_process_on(signal.SIGINT)
    try:
        from cyclopts import App, CycloptsError

        from asynckv.cli.options import ENVIRONMENT, from_file
    except ModuleNotFoundError as exc:
        print(_NOT_INSTALLED.format(missing=exc.name), file=sys.stderr)
        sys.exit(2)
    app = App(
        name="asynckv",
        help="Move LLM KV caches between processes and machines.",
        version=__version__,
        result_action="return_value",
        exit_on_error=False,
        print_error=False,
    )
    for name, (where, line) in _COMMANDS.items():
        # A command that is asked for its own help says more than that line.
        shown = None if name in given else line
        if name == "serve":
            app.command(where, name=name, help=shown, config=[ENVIRONMENT, from_file])
        else:
            app.command(where, name=name, help=shown)
    if "demo" in given:
        where, line = _DEMO_OF_THE_CACHE
        shown = None if "cache" in given else line
        app["demo"].command(where, name="cache", help=shown)
    try:
        status = app(given)
    except (CycloptsError, ConfigError) as exc:
        print(f"asynckv: {exc}", file=sys.stderr)
        sys.exit(2)
    status = status if isinstance(status, int) else 0
    if is_server:
        _end_at_once(status)
    sys.exit(status)


def _open_closed_streams() -> None:
    """Open at nothing what whoever started the process has closed of 0, 1 and 2.

    Else a socket has that number, and gets what is printed.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        name, mode = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))[descriptor]
        setattr(sys, name, open(descriptor, mode, encoding="utf-8"))
    os.close(descriptor)


def _end_at_once(status: int) -> NoReturn:
    """End the process, and wait for no thread: one that hangs in a tier never ends.

    All that was open is closed; taking the interpreter down would take a second more.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
