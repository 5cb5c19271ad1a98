"""Control frames of a transfer, and of memory that one side shows the other.

What makes bytes leave, and says that they did. As in :mod:`asynckv.protocol.frames`,
values only.

Memory of the host, or of a GPU, is opened on a stream of its own: :class:`OpenMemory`,
an :class:`Exposed` from whoever exports it, a :class:`Proved` from whoever reads it,
then ``Accepted`` or a ``Failure`` from the side that was asked. Both sides of a pipe
export theirs: who asks says :class:`Exposed` too, behind its :class:`Proved`, and hears
a :class:`Proved` before the ``Accepted``. A peer that inserts from its own memory says
:class:`Exposed` right behind the :class:`OpenMemory`.

Payload from GPU to GPU by NCCL has one stream a link, too: :class:`OpenDevices`,
:class:`Devices`, and then for each of two *pipes*, one a direction, what makes both
sides post the same operation or none. Numbers count a pipe's operations.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeAlias

import msgspec

from asynckv.protocol.values import Base, Count, Digest, Id, Request, Token

__all__ = (
    "MAX_EAGER",
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
    "Eager",
    "Exposed",
    "Grant",
    "MeetDevice",
    "OpenDevices",
    "OpenMemory",
    "PrepareDevice",
    "Proved",
    "RouteName",
    "Sent",
)


MAX_EAGER: Final = 1024
"""So many parts come with one frame."""

RouteName: TypeAlias = Literal["link", "nccl", "cuda_ipc"]
"""By what large parts come: the link's payload, or beside it.

By ``nccl`` from one GPU to another. By ``cuda_ipc`` the receiver reads them in memory
that it was shown: of a GPU of the host, or, by a map, of the host's own.
"""


class Grant(Base, frozen=True, tag="grant"):
    """The receiver's memory is ready: all that is not eager may come by ``route``.

    By ``cuda_ipc`` it is read where it lies. ``digest`` is what the receiver wants to
    be compared of what comes from a GPU; the stricter one counts. A later grant asks
    for all of it once more: by the link, after another route was lost or after all
    has left. Another route is granted once, and what is lost there comes by the link.
    """

    transfer: Count
    route: RouteName = "link"
    digest: Literal["full", "edges", "off"] = "full"


class Sent(Base, frozen=True, tag="sent"):
    """The last byte of one part was sent by ``route``, or can be read where it lies.

    ``digest`` is of what ``kind`` says: of all its bytes, of the first and last ones,
    or there is none.

    What is read lies at ``offset`` of the memory that the sender has exported, or else
    where the offer said; if neither says so, all of the transfer is to be granted
    otherwise. It stays there until the receiver is through with it.

    From the receiver it confirms a part that a push has brought from GPU to GPU: it is
    verified. The writer says the same of it then, once it knows.
    """

    transfer: Count
    part: Count
    digest: Digest = b""
    kind: Literal["full", "edges", "off"] = "full"
    route: RouteName = "link"
    offset: Count | None = None


class Eager(Base, frozen=True, tag="eager"):
    """Small parts of a transfer: their bytes are the body, one after the other.

    There are as many ``digests``, or none where the link carries none.
    """

    transfer: Count
    parts: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_EAGER)]
    digests: Annotated[tuple[Digest, ...], msgspec.Meta(max_length=MAX_EAGER)] = ()


_Uuid = Annotated[str, msgspec.Meta(max_length=64)]


class OpenMemory(Request, frozen=True, tag="openmemory"):
    """Let one side open memory of the other, to read what lies there.

    ``of`` says whose: the lookup buffer's that the other side serves, the memory that
    this side inserts from, or what each side of a pipe sends from.

    ``gpu_uuid`` names the GPU that this side uses itself, since numbers differ from
    process to process. Without it memory of the host is meant.
    """

    of: Literal["lookup", "inserts", "pipe"]
    gpu_uuid: _Uuid = ""


class Exposed(Base, frozen=True, tag="exposed"):
    """Memory that the peer may open: a file, or with a ``handle`` one GPU allocation.

    ``ticket`` is good for one connection to the abstract socket at ``address``. The
    file comes by it, and it is to be open for as long as the memory is. ``nbytes`` are
    all that there are. ``digest`` is what this side wants to be compared; the stricter
    one counts. ``gpu_uuid`` names the GPU.
    """

    address: Id
    ticket: Token
    nbytes: Count
    handle: Annotated[bytes, msgspec.Meta(max_length=64)] = b""
    digest: Literal["full", "edges", "off"] = "edges"
    gpu_uuid: _Uuid = ""


class Proved(Base, frozen=True, tag="proved"):
    """The nonce that was read in the peer's memory, at its end."""

    nonce: Annotated[bytes, msgspec.Meta(max_length=64)]


_Description = Annotated[bytes, msgspec.Meta(max_length=4096)]
_Pipe = Annotated[int, msgspec.Meta(ge=0, le=1)]
_UniqueId = Annotated[bytes, msgspec.Meta(max_length=128)]


class OpenDevices(Request, frozen=True, tag="opendevices"):
    """May payload go from GPU to GPU? This is mine."""

    description: _Description


class Devices(Base, frozen=True, tag="devices"):
    """It may. This is mine."""

    description: _Description


class PrepareDevice(Base, frozen=True, tag="prepare"):
    """Both pipes are to be opened, and my GPU's worker is free for it. Is yours?"""


class DeviceReady(Base, frozen=True, tag="ready"):
    """My GPU's worker is free for it."""


class MeetDevice(Base, frozen=True, tag="meet"):
    """Open this pipe now. The unique id lets in who knows it: a secret."""

    pipe: _Pipe
    unique_id: _UniqueId

    def __repr__(self) -> str:
        return f"MeetDevice(pipe={self.pipe}, <hidden>)"


class DeviceMet(Base, frozen=True, tag="met"):
    """The pipe is open on this side, and its first byte has moved."""

    pipe: _Pipe


class DeviceOffer(Base, frozen=True, tag="doffer"):
    """One operation's bytes are ready to be sent, by the pipe of whoever says so."""

    number: Count
    transfer: Count
    part: Count
    offset: Count
    nbytes: Count


class DeviceGrant(Base, frozen=True, tag="dgrant"):
    """There is a place for it: both sides post it from here on, whatever happens."""

    number: Count


class DeviceSkip(Base, frozen=True, tag="dskip"):
    """Nobody wants it (any more): neither side posts it."""

    number: Count


class DeviceWithdraw(Base, frozen=True, tag="dwithdraw"):
    """The offer is void, if it was not granted yet: answered by a skip, or late."""

    number: Count


class DeviceDone(Base, frozen=True, tag="ddone"):
    """The operation's bytes have landed, and its place is free again."""

    number: Count


class DevicesFinish(Base, frozen=True, tag="dfinish"):
    """I offer nothing more; said by both sides, each when all of its own is done."""


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
