"""A module that answers as CuPy does, for tests of what is made of its answers.

It moves nothing: that is what :mod:`harness.fake_gpus` does. It raises CuPy's
kinds of errors, and writes down what it was asked.
"""

from __future__ import annotations

import ctypes
import types
from typing import Any, Final

__all__ = ("CUDARuntimeError", "CupyDouble", "LibcudaDouble", "NcclError")


_INVALID_DEVICE: Final = 101


class CUDARuntimeError(RuntimeError):
    """As CuPy's: ``status`` is what CUDA returned."""

    def __init__(self, status: int) -> None:
        super().__init__(f"CUDA error {status}")
        self.status = status


class NcclError(RuntimeError):
    """As CuPy's: there is a name for the codes up to 6, and a KeyError for others."""

    def __init__(self, status: int) -> None:
        super().__init__({5: "NCCL_ERROR_INVALID_USAGE"}[status])
        self.status = status


class _Calls:
    """Every attribute is a function that notes its call and returns an answer."""

    def __init__(
        self, calls: list[tuple[Any, ...]], answers: dict[str, object]
    ) -> None:
        self._calls = calls
        self._answers = answers

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: object) -> object:
            self._calls.append((name, *arguments))
            answer = self._answers.get(name, 0)
            if isinstance(answer, BaseException):
                raise answer
            return answer() if isinstance(answer, types.FunctionType) else answer

        return call


class CupyDouble(types.ModuleType):
    """``cupy``, as far as the adapters use it.

    ``answers`` are by function's name: values, errors, or functions that return them.
    """

    __version__ = "14.2.0"

    def __init__(self, *, has_gpu: bool = True, has_nccl: bool = True) -> None:
        super().__init__("cupy")
        self.calls: list[tuple[Any, ...]] = []
        self.answers: dict[str, object] = {"runtimeGetVersion": 12090}
        self.runtime = _calls(self.calls, self.answers)
        self.runtime.CUDARuntimeError = CUDARuntimeError
        self.nccl = _calls(self.calls, self.answers)
        self.nccl.NcclError = NcclError
        self.nccl.available = has_nccl
        self.answers["NcclCommunicator"] = self.comm = _Calls(self.calls, self.answers)
        self.cuda = types.SimpleNamespace(
            runtime=self.runtime,
            is_available=lambda: has_gpu,
        )


class LibcudaDouble:
    """The driver's library, as :class:`ctypes.CDLL` shows it, of one GPU."""

    def __init__(self, uuid: bytes = bytes(range(16))) -> None:
        self.uuid = uuid
        self.mode = 0
        """The capture mode of whatever thread asks: 0 is global, 2 relaxed."""

    def cuInit(self, flags: int) -> int:
        return 0

    def cuDeviceGet(self, handle: Any, ordinal: int) -> int:
        handle._obj.value = ordinal
        return 0 if ordinal == 0 else _INVALID_DEVICE

    def cuDeviceGetUuid_v2(self, uuid: Any, handle: Any) -> int:
        ctypes.memmove(uuid._obj, self.uuid, len(self.uuid))
        return 0

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
        mode._obj.value, self.mode = self.mode, mode._obj.value
        return 0


def _calls(calls: list[tuple[Any, ...]], answers: dict[str, object]) -> Any:
    return _Calls(calls, answers)
