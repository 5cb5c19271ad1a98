"""What both sides' NCCL must have in common, and how a peer is told.

Versions that differ are refused by NCCL itself. Of the variables only those are
compared that decide how bytes are cut, framed and carried: where they differ, NCCL
hangs. Devices, interfaces, topology, logging and allocation are each host's own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Final

import msgspec

from asynckv.errors import IncompatiblePeer, RemoteProtocolError
from asynckv.protocol.values import Count, Id
from asynckv.protocol.wire import digest_of

__all__ = ("DeviceDescription", "check_peer", "nccl_environment_digest")

_MUST_AGREE: Final = (
    *("NCCL_ALGO", "NCCL_PROTO", "NCCL_NTHREADS"),
    *("NCCL_BUFFSIZE", "NCCL_LL_BUFFSIZE", "NCCL_LL128_BUFFSIZE"),
    *("NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS", "NCCL_NCHANNELS_PER_NET_PEER"),
    *("NCCL_MIN_P2P_NCHANNELS", "NCCL_MAX_P2P_NCHANNELS"),
    *("NCCL_MIN_CTAS", "NCCL_MAX_CTAS"),
    *("NCCL_P2P_NET_CHUNKSIZE", "NCCL_P2P_NVL_CHUNKSIZE", "NCCL_P2P_PCI_CHUNKSIZE"),
    *("NCCL_P2P_LL_THRESHOLD", "NCCL_ALLOC_P2P_NET_LL_BUFFERS"),
    *("NCCL_NET", "NCCL_IB_DISABLE", "NCCL_SHM_DISABLE"),
    *("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_P2P_DIRECT_DISABLE"),
    *("NCCL_PXN_DISABLE", "NCCL_P2P_PXN_LEVEL", "NCCL_MULTI_RANK_GPU_ENABLE"),
)


class DeviceDescription(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One side's GPU and NCCL. ``token`` is its worker's, for the order of turns."""

    uuid: Id
    nccl_version: Count
    environment: Annotated[bytes, msgspec.Meta(max_length=16)]
    token: Annotated[bytes, msgspec.Meta(min_length=8, max_length=8)]
    chunk_bytes: Annotated[int, msgspec.Meta(ge=1, le=2**40)]

    def encode(self) -> bytes:
        """Return what the peer is sent."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> DeviceDescription:
        """Return what a peer has sent.

        :raises RemoteProtocolError: it is no description
        """
        try:
            return msgspec.msgpack.decode(data, type=cls)
        except msgspec.MsgspecError as exc:
            raise RemoteProtocolError(f"no description of a GPU: {exc}") from exc


def nccl_environment_digest(environment: Mapping[str, str] | None = None) -> bytes:
    """Digest the ``NCCL_*`` variables that both sides must have alike."""
    found = os.environ if environment is None else environment
    lines = [f"{name}={found[name]}" for name in _MUST_AGREE if name in found]
    return digest_of("\n".join(lines).encode())


def check_peer(own: DeviceDescription, peer: DeviceDescription) -> None:
    """Refuse a peer whose NCCL this one's would hang with.

    :raises IncompatiblePeer: ``field`` says what differs, or does not
    """
    if own.nccl_version != peer.nccl_version:
        raise IncompatiblePeer(
            f"NCCL {own.nccl_version} here, {peer.nccl_version} there",
            field="nccl_version",
            hint="install the same nvidia-nccl package on both sides",
        )
    if own.environment != peer.environment:
        raise IncompatiblePeer(
            "the NCCL_* variables of both sides differ",
            field="nccl_environment",
            hint="NCCL would hang: set these alike, or on neither side: "
            + ", ".join(_MUST_AGREE),
        )
    if own.uuid == peer.uuid:
        raise IncompatiblePeer(
            "both sides have the same GPU, which NCCL refuses",
            field="gpu",
            hint="cuda_ipc is for that",
        )
    if own.token == peer.token:
        raise IncompatiblePeer("a worker cannot wait for itself", field="token")
