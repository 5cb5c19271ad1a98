"""GPUs that are not there: CUDA and NCCL as nasty as the real ones, on any machine.

:class:`FakeGpus` is some GPUs; each of its processes has a ``cuda`` and an ``nccl``
that fit the seams of :mod:`asynckv.devices.cuda` and
:mod:`asynckv.transports.nccl.api`. Several fake processes may live in one real one,
and real ones share GPUs of the same ``uuids``: their memory by CUDA IPC, their
communicators over sockets. Work is done when somebody looks whether it is done, so a
test decides when. What real hardware would have punished later, or silently, is
written down at once in ``faults``.
"""

from __future__ import annotations

from harness.fake_gpus.fabric import FakeGpus, FakeProcess
from harness.fake_gpus.memory import POISON

__all__ = ("POISON", "FakeGpus", "FakeProcess")
