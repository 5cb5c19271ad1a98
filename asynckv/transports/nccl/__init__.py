"""Payload between GPUs by NCCL: one two-rank communicator a direction and peer pair."""

from __future__ import annotations

__all__ = ()
