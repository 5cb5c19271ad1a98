"""What the real CuPy and NCCL say where they are installed and no GPU is.

Each case is a process of its own: a unique id keeps a thread and a socket for ever.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(
        importlib.util.find_spec("cupy") is None, reason="CuPy is not installed"
    ),
]

BEGIN = """
import cupy
from asynckv.errors import GPUFailed, GPUUnavailable
from asynckv.devices.cupy import open_cuda
from asynckv.transports.nccl.api import open_nccl
if cupy.cuda.is_available():
    raise SystemExit("a GPU is here")
"""

CASES = {
    "there_is_no_gpu_to_be_had": """
try:
    open_cuda()
except GPUUnavailable as error:
    assert "no CUDA driver" in str(error) and "nvidia-smi" in error.hint
""",
    "nccl_says_its_version": """
assert open_nccl().version() >= 21800
""",
    "a_unique_id_is_128_bytes_each_time_others": """
nccl = open_nccl()
ids = {nccl.unique_id() for _ in range(2)}
assert len(ids) == 2 and all(type(one) is bytes and len(one) == 128 for one in ids)
""",
    "a_communicator_fails_as_an_error_of_ours": """
nccl = open_nccl()
try:
    nccl.open_comm(1, nccl.unique_id(), 0)
except GPUFailed as error:
    assert error.code == 1, error.code
""",
    "codes_that_cupy_has_no_name_for_are_key_errors": """
from cupy.cuda import nccl
for code in (7, 8):
    try:
        nccl.NcclError(code)
    except KeyError as error:
        assert error.args == (code,)
    else:
        raise SystemExit("CuPy has a name for it by now")
""",
    "an_empty_group_begins_and_ends": """
nccl = open_nccl()
nccl.group_start()
nccl.group_end()
""",
    "all_that_is_called_is_there": """
from cupy.cuda import nccl
runtime = "malloc free hostAlloc freeHost hostRegister hostUnregister memcpyAsync "
runtime += "streamCreateWithFlags streamDestroy streamSynchronize streamWaitEvent "
runtime += "eventCreateWithFlags eventRecord eventQuery eventSynchronize eventDestroy "
runtime += "ipcGetMemHandle ipcOpenMemHandle ipcCloseMemHandle ipcGetEventHandle "
runtime += "ipcOpenEventHandle getDeviceCount setDevice getDevice "
runtime += "runtimeGetVersion CUDARuntimeError"
missing = [name for name in runtime.split() if not hasattr(cupy.cuda.runtime, name)]
comm = "send recv check_async_error abort destroy"
missing += [one for one in comm.split() if not hasattr(nccl.NcclCommunicator, one)]
calls = "get_version get_unique_id groupStart groupEnd NcclError available"
missing += [one for one in calls.split() if not hasattr(nccl, one)]
assert not missing, missing
assert cupy.cuda.runtime.memcpyDefault == 4 and nccl.NCCL_UINT8 == 1
assert cupy.cuda.runtime.streamNonBlocking == 1
flags = cupy.cuda.runtime.eventDisableTiming, cupy.cuda.runtime.eventInterprocess
assert flags == (2, 4) and cupy.cuda.runtime.hostAllocPortable == 1
""",
    "all_that_needs_no_driver_is_constructed": """
from asynckv.devices.cupy import CupyCuda, CupyEvent, CupyStream
from asynckv.devices.cupy import open_driver
cuda = CupyCuda(cupy)
CupyEvent(cupy.cuda.runtime, 0, open_driver).close()
CupyStream(cupy.cuda.runtime, 0).close()
open_nccl()
for call in (cuda.stream, cuda.event, cuda.device_count,
             lambda: cuda.host_alloc(64)):
    try:
        call()
    except GPUFailed as error:
        assert error.code, error
    else:
        raise SystemExit("it needs no driver")
""",
    "the_drivers_library_is_asked_for_by_name": """
from asynckv.devices.cupy import open_driver
try:
    open_driver()
except GPUUnavailable as error:
    assert "libcuda" in str(error)
""",
    "what_cuda_refuses_is_an_error_of_ours": """
from asynckv.devices.cupy import CupyCuda
try:
    CupyCuda(cupy).malloc(1)
except GPUFailed as error:
    assert error.code
else:
    raise SystemExit("allocated without a GPU")
""",
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_without_a_driver(case: str) -> None:
    command = [sys.executable, "-W", "error", "-c", BEGIN + case]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50)
    if "a GPU is here" in done.stderr:
        pytest.skip("a GPU is here")
    assert not done.returncode, done.stderr
