"""Fakes, connected pairs, faults and checks for your own tests.

Everything is imported when it is first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from asynckv.testing import faults
    from asynckv.testing.blocked import until, until_blocked, use_across_tasks
    from asynckv.testing.cancellation import (
        CancelMode,
        Outcome,
        SweepCounts,
        sweep_cancellation,
    )
    from asynckv.testing.certificates import Authority
    from asynckv.testing.lookup_conformance import LOOKUP_CHECKS, check_lookup_buffer
    from asynckv.testing.pairs import (
        KVFaults,
        KVPair,
        open_group,
        open_kv_faults,
        open_kv_pair,
        open_lookup_pair,
        open_pipe_pair,
        open_store_pair,
        open_transport_pair,
    )
    from asynckv.testing.pipe_checks import PIPE_CHECKS, check_pipe
    from asynckv.testing.store_checks import STORE_CHECKS, check_store_buffer
    from asynckv.testing.tier_checks import TIER_CHECKS, check_tier
    from asynckv.testing.transport_conformance import TRANSPORT_CHECKS, check_transport

__all__ = (
    "LOOKUP_CHECKS",
    "PIPE_CHECKS",
    "STORE_CHECKS",
    "TIER_CHECKS",
    "TRANSPORT_CHECKS",
    "Authority",
    "CancelMode",
    "KVFaults",
    "KVPair",
    "Outcome",
    "SweepCounts",
    "check_lookup_buffer",
    "check_pipe",
    "check_store_buffer",
    "check_tier",
    "check_transport",
    "faults",
    "open_group",
    "open_kv_faults",
    "open_kv_pair",
    "open_lookup_pair",
    "open_pipe_pair",
    "open_store_pair",
    "open_transport_pair",
    "sweep_cancellation",
    "until",
    "until_blocked",
    "use_across_tasks",
)

_HOME: Final = {
    "LOOKUP_CHECKS": "asynckv.testing.lookup_conformance",
    "PIPE_CHECKS": "asynckv.testing.pipe_checks",
    "STORE_CHECKS": "asynckv.testing.store_checks",
    "TIER_CHECKS": "asynckv.testing.tier_checks",
    "TRANSPORT_CHECKS": "asynckv.testing.transport_conformance",
    "Authority": "asynckv.testing.certificates",
    "CancelMode": "asynckv.testing.cancellation",
    "KVFaults": "asynckv.testing.pairs",
    "KVPair": "asynckv.testing.pairs",
    "Outcome": "asynckv.testing.cancellation",
    "SweepCounts": "asynckv.testing.cancellation",
    "check_lookup_buffer": "asynckv.testing.lookup_conformance",
    "check_pipe": "asynckv.testing.pipe_checks",
    "check_store_buffer": "asynckv.testing.store_checks",
    "check_tier": "asynckv.testing.tier_checks",
    "check_transport": "asynckv.testing.transport_conformance",
    "open_group": "asynckv.testing.pairs",
    "open_kv_faults": "asynckv.testing.pairs",
    "open_kv_pair": "asynckv.testing.pairs",
    "open_lookup_pair": "asynckv.testing.pairs",
    "open_pipe_pair": "asynckv.testing.pairs",
    "open_store_pair": "asynckv.testing.pairs",
    "open_transport_pair": "asynckv.testing.pairs",
    "sweep_cancellation": "asynckv.testing.cancellation",
    "until": "asynckv.testing.blocked",
    "until_blocked": "asynckv.testing.blocked",
    "use_across_tasks": "asynckv.testing.blocked",
}


def __getattr__(name: str) -> Any:
    if name == "faults":
        return importlib.import_module("asynckv.testing.faults")
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
