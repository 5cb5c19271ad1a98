"""What ``asynckv serve`` refuses, and says."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from asynckv.cli.main import main
from asynckv.cli.options import ServeOptions
from asynckv.cli.serve.command import serve
from harness.forks import ForkServer

pytest.importorskip("uvloop").new_event_loop().close()  # its first makes a lasting pipe

DISK = "disk:///nowhere/at/all?max=64MiB"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"listen": "tcp://0.0.0.0:0", "store": 2**20}, "beyond this host"),
        ({"store": 2**20, "http": "192.0.2.1:1"}, "cannot listen at 192.0.2.1:1"),
    ],
)
def test_what_cannot_be_served_is_one_line(
    options: dict[str, Any], words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert serve(ServeOptions(**options)) == 1
    shown = capfd.readouterr()
    assert shown.out == "" and shown.err.startswith("asynckv serve: ")
    assert words in shown.err and shown.err.count("\n") == 1


def test_without_prometheus_client_it_says_what_to_install(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "asynckv.cli.serve.metrics", raising=False)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    assert serve(ServeOptions(store=2**20, http="127.0.0.1:0")) == 1
    shown = capfd.readouterr().err
    assert "--http needs prometheus_client" in shown and '".[metrics]"' in shown


CHATTY = """
import logging, sys
from asynckv.cli.serve.command import logging_to_stderr

logger, line = logging.getLogger("asynckv"), "x" * 1000
with logging_to_stderr("info"):
    for number in range(10_000):
        logger.info("%d %s", number, line)
    print("logged", flush=True)
    while True:
        logger.info("more")
"""


@pytest.mark.multiprocess
async def test_lines_that_nobody_reads_are_counted_and_not_waited_for(
    forks: ForkServer,
) -> None:
    async with forks.running(CHATTY, stderr=subprocess.PIPE) as fork:
        assert await fork.stdout.readline() == b"logged\n" and fork.stderr is not None
        numbers = list[int]()
        while b" lines are missing here" not in (line := await fork.stderr.readline()):
            numbers.append(int(line.split()[3]))
        assert numbers == [*range(len(numbers))] and 1000 <= len(numbers) < 10_000


WRITTEN = """
import logging
from asynckv.cli.serve.command import logging_to_stderr

with logging_to_stderr("warning", ["redis://u:hunter2@h"]):
    logging.getLogger("asynckv.a").warning("no redis://u:hunter2@h \\udcff")
    logging.getLogger("asynckv.a").info("too little")
    logging.getLogger("others").error("of others")
"""


@pytest.mark.multiprocess
async def test_what_was_logged_is_written_without_passwords_before_it_ends(
    forks: ForkServer,
) -> None:
    lines = (await forks.printed_by(WRITTEN)).splitlines()
    words = [line.split(" ", 2)[2] for line in lines]
    assert words == [r"WARNING no redis://u:***@h \udcff", "ERROR of others"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("", "nothing to serve (--store 2GiB, --lookup 2GiB)"),
        ("--store many", "Invalid value for --store: 'many' is not a size"),
        (f"--lookup 1MiB --tier {DISK}", "--tier is below a store"),
        ("--store 1MiB --namespace a", "--namespace and --admit are for tiers"),
        ("--store 1MiB --admit second_use", "--namespace and --admit are for tiers"),
        ("--store 1MiB --listen nonsense", "'nonsense' is not a URL"),
        ("--store 1MiB --listen mem://a", "--listen is mem://, and nobody else is in"),
        ("--store 1MiB --listen tcp://u:hunter2@h:1", "'tcp://u:***@h:1': no user and"),
        ("--store 1MiB --http 9464", "--http is '9464', no address"),
        ("--store 1MiB --ca a", "--certificate, --key and --ca belong together"),
        ("--store 1MiB --tenant a=b", "--tenant is of peers with certificates"),
    ],
)
def test_wrong_options_have_a_status_of_their_own(
    options: str, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", *options.split()])
    assert ended.value.code == 2
    shown = capfd.readouterr().err
    assert shown.startswith(f"asynckv: {words}") and shown.count("\n") == 1
