"""Control frames by which two sides move payload from GPU to GPU.

One stream a link: :class:`OpenDevices`, :class:`Devices`, and then for each of two
*pipes*, one a direction, what makes both sides post the same operation or none. Numbers
count a pipe's operations. :class:`GrantDevices` and :class:`SentDevices` belong to the
stream of a delivery, or of a pipe. As in :mod:`asynckv.protocol.frames`, values only.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec

from asynckv.protocol.values import Count, Digest

__all__ = (
    "DeviceDone",
    "DeviceFrame",
    "DeviceGrant",
    "DeviceMet",
    "DeviceOffer",
    "DeviceReady",
    "DeviceSkip",
    "DeviceWithdraw",
    "Devices",
    "DevicesFinish",
    "GrantDevices",
    "MeetDevice",
    "OpenDevices",
    "PrepareDevice",
    "SentDevices",
)

_Description = Annotated[bytes, msgspec.Meta(max_length=4096)]
_Pipe = Annotated[int, msgspec.Meta(ge=0, le=1)]
_UniqueId = Annotated[bytes, msgspec.Meta(max_length=128)]


class _Base(msgspec.Struct, frozen=True, tag_field="t", forbid_unknown_fields=True):
    """Shared wire settings. Not a public base class."""


class OpenDevices(_Base, frozen=True, tag="opendevices"):
    """May payload go from GPU to GPU? This is mine."""

    description: _Description


class Devices(_Base, frozen=True, tag="devices"):
    """It may. This is mine."""

    description: _Description


class PrepareDevice(_Base, frozen=True, tag="prepare"):
    """Both pipes are to be opened, and my GPU's worker is free for it. Is yours?"""


class DeviceReady(_Base, frozen=True, tag="ready"):
    """My GPU's worker is free for it."""


class MeetDevice(_Base, frozen=True, tag="meet"):
    """Open this pipe now. The unique id lets in who knows it: a secret."""

    pipe: _Pipe
    unique_id: _UniqueId

    def __repr__(self) -> str:
        return f"MeetDevice(pipe={self.pipe}, <hidden>)"


class DeviceMet(_Base, frozen=True, tag="met"):
    """The pipe is open on this side, and its first byte has moved."""

    pipe: _Pipe


class DeviceOffer(_Base, frozen=True, tag="doffer"):
    """One operation's bytes are ready to be sent, by the pipe of whoever says so."""

    number: Count
    transfer: Count
    part: Count
    offset: Count
    nbytes: Count


class DeviceGrant(_Base, frozen=True, tag="dgrant"):
    """There is a place for it: both sides post it from here on, whatever happens."""

    number: Count


class DeviceSkip(_Base, frozen=True, tag="dskip"):
    """Nobody wants it (any more): neither side posts it."""

    number: Count


class DeviceWithdraw(_Base, frozen=True, tag="dwithdraw"):
    """The offer is void, if it was not granted yet: answered by a skip, or late."""

    number: Count


class DeviceDone(_Base, frozen=True, tag="ddone"):
    """The operation's bytes have landed, and its place is free again."""

    number: Count


class DevicesFinish(_Base, frozen=True, tag="dfinish"):
    """I offer nothing more; said by both sides, each when all of its own is done."""


class GrantDevices(_Base, frozen=True, tag="grantdevices"):
    """The receiver's memory is ready: all that does not ride may go from GPU to GPU.

    ``kind`` says what digest the receiver wants; the stricter one counts.
    """

    transfer: Count
    kind: Literal["full", "edges", "off"]


class SentDevices(_Base, frozen=True, tag="sentdevices"):
    """The last byte of one part was sent from GPU to GPU.

    ``digest`` is of all its bytes, of the first and last ones, or there is none.
    """

    transfer: Count
    part: Count
    kind: Literal["full", "edges", "off"]
    digest: Digest = b""


DeviceFrame: TypeAlias = (
    Devices
    | PrepareDevice
    | DeviceReady
    | MeetDevice
    | DeviceMet
    | DeviceOffer
    | DeviceGrant
    | DeviceSkip
    | DeviceWithdraw
    | DeviceDone
    | DevicesFinish
)
