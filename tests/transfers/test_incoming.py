"""One transfer, without sockets and GPUs: in any order, by the link or by a route."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from asynckv.devices.copying import CopyPool
from asynckv.devices.cuda import DeviceMemory
from asynckv.errors import ChecksumError, GPUFailed, RemoteProtocolError
from asynckv.protocol.frames import Commit, Frame
from asynckv.protocol.transfer import EAGER_NBYTES
from asynckv.protocol.transfer_frames import (
    Eager,
    Grant,
    Sent,
)
from asynckv.protocol.wire import digest_of
from asynckv.sharing.gpu_channel import RouteLost
from asynckv.tensors.views import empty_tensor
from asynckv.testing.blocked import until, until_blocked
from asynckv.transfers import incoming as incoming_module
from asynckv.transfers.incoming import Incoming, Route, receive_frame
from asynckv.transfers.targets import DeviceTarget, HostTarget, Target
from asynckv.types import TensorSpec

LARGE = EAGER_NBYTES + 1
Done_ = Callable[[bytes, BaseException | None], None]


class Moving:
    """A payload transport, or a route, that only remembers what it was told."""

    reads_peer = False

    def __init__(self, *, is_to_gpu: bool = True, is_granted: bool = True) -> None:
        self.is_to_gpu = is_to_gpu
        self.is_granted = is_granted
        self.done: dict[int, Done_] = {}
        self.stopped = 0
        self.quiesced = 0
        self.expected: list[int] = []
        self.noted_bytes = 0
        self.is_given_up = False
        self.working = False
        self.sent_frames: list[Frame] = []
        self.quiet = asyncio.Event()
        self.quiet.set()
        self.progress: Any = self

    def receive(self, transfer: int, part: int, target: Any, done: Done_) -> None:
        self.done[part] = done

    def sent(self, frame: Frame) -> None:
        self.sent_frames.append(frame)

    def grant(self, transfer: int) -> Grant | None:
        return Grant(transfer, "nccl", "full") if self.is_granted else None

    def landed_bytes(self, transfer: int) -> int:
        return 5

    def stop(self, transfer: int) -> None:
        self.stopped += 1

    async def quiesce(self, transfer: int) -> None:
        self.quiesced += 1
        await self.quiet.wait()

    def expect(self, transfer: int) -> None:
        self.expected.append(transfer)

    def forget(self, transfer: int) -> None:
        self.expected.remove(transfer)

    def note(self, nbytes: int) -> None:
        self.noted_bytes += nbytes

    def is_working(self, transfer: int) -> bool:
        return self.working


class Transfer:
    """Parts of so many bytes, and what was said and told of them."""

    def __init__(
        self,
        *sizes: int,
        digest: str = "full",
        targets: Sequence[Target] = (),
        route: Moving | None = None,
        **options: Any,
    ) -> None:
        self.payload, self.route = Moving(), route
        self.frames: list[Frame] = []
        self.told: list[tuple[int, bytes]] = []
        self.errors: list[Exception] = []
        self.memory = [bytearray(size) for size in sizes]
        self.link = SimpleNamespace(
            payload=self.payload,
            progress=self.payload,
            digest=digest,
            loop=asyncio.get_running_loop(),
        )
        stream = SimpleNamespace(link=self.link, send=self.frames.append)
        self.incoming = Incoming(
            stream,  # type: ignore[arg-type]
            7,
            targets or [HostTarget(memoryview(memory)) for memory in self.memory],
            lambda part, found: self.told.append((part, found)),
            route=None if route is None else self._find,
            **{"failed": self.errors.append} | options,
        )

    def _find(self) -> Route | None:
        return self.route

    def say(self, frame: Frame, body: bytes = b"") -> None:
        self.incoming.on_frame(frame, body)

    def land(self, part: int, landed: bytes, sent: bytes) -> None:
        """Let a part land that has one digest here, and another at the peer's."""
        self.payload.done[part](landed, None)
        self.say(Sent(7, part, sent))

    async def receiving(self) -> asyncio.Task[None]:
        """Wait for all of it in a task."""
        task = asyncio.create_task(self.incoming.receive())
        await until_blocked(task)
        return task

    def ride(self, *parts: int, wrong: Sequence[int] = ()) -> None:
        """Send small parts, some with other bytes than their digests are of."""
        pieces = [bytes([p + 1]) * len(self.memory[p]) for p in parts]
        digests = tuple(
            b"wrong" if p in wrong else digest_of(piece)
            for p, piece in zip(parts, pieces, strict=True)
        )
        self.say(Eager(7, parts, digests), b"".join(pieces))


def granted(*sizes: int, **options: Any) -> Transfer:
    """Return one whose parts may come."""
    transfer = Transfer(*sizes, **options)
    transfer.incoming.grant()
    return transfer


async def test_bytes_are_expected_until_all_have_landed_or_nobody_wants_them() -> None:
    whole, stopped = Transfer(LARGE, LARGE), Transfer(LARGE)
    whole.incoming.grant()
    stopped.incoming.grant()
    whole.payload.done[1](b"digest", None)
    assert whole.payload.expected == [7] and whole.frames == [Grant(7)]
    whole.payload.done[0](b"digest", None)
    whole.incoming.expect()
    stopped.incoming.stop()
    stopped.incoming.expect()
    assert not whole.payload.expected and not stopped.payload.expected


async def test_many_parts_are_granted_once_all_may_land_in_several_turns() -> None:
    transfer = granted(*[LARGE] * 150)
    assert len(transfer.payload.done) < 150 and not transfer.frames
    await until(lambda: bool(transfer.frames))
    assert transfer.frames == [Grant(7)] and len(transfer.payload.done) == 150
    assert transfer.payload.expected == [7]


async def test_what_is_stopped_before_all_parts_may_land_is_never_granted() -> None:
    transfer = granted(*[LARGE] * 150)
    begun = len(transfer.payload.done)
    transfer.incoming.stop()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not transfer.frames and len(transfer.payload.done) == begun
    assert transfer.payload.stopped == 1


async def test_what_is_not_whole_yet_is_not_expected() -> None:
    transfer = Transfer(LARGE)
    transfer.incoming.grant(whole=False)
    assert not transfer.payload.expected
    transfer.incoming.expect()
    transfer.incoming.expect()
    assert transfer.payload.expected == [7]


async def test_a_part_counts_when_it_has_landed_and_its_digest_agrees() -> None:
    transfer = granted(LARGE, LARGE)
    transfer.payload.done[1](b"digest", None)
    assert not transfer.told and not transfer.incoming.has_come
    transfer.say(Sent(7, 1, b"digest"))
    transfer.say(Sent(7, 0, b"other"))
    assert transfer.told == [(1, b"digest")]
    transfer.payload.done[0](b"other", None)
    assert transfer.told == [(1, b"digest"), (0, b"other")]
    assert transfer.incoming.has_come


async def test_what_has_all_landed_is_not_stopped_anywhere() -> None:
    transfer = granted(LARGE)
    transfer.land(0, b"digest", b"digest")
    transfer.incoming.stop()
    await transfer.incoming.quiesce()
    assert not transfer.payload.stopped and not transfer.payload.quiesced


async def test_other_bytes_than_were_sent_fail_and_stop_the_transfer() -> None:
    transfer = granted(LARGE, LARGE)
    transfer.land(0, b"landed", b"sent")
    assert not transfer.told and isinstance(transfer.errors[0], ChecksumError)
    assert transfer.payload.stopped == 1
    await transfer.incoming.quiesce()
    assert transfer.payload.quiesced == 1


@pytest.mark.parametrize(
    ("part", "frame"),
    [(0, None), (1, None), (2, Sent(7, 2, b"")), (3, None)],
    ids=["a small part", "that came", "sent before", "does not exist"],
)
async def test_a_part_that_needs_no_word_or_had_it_is_a_lie(
    part: int, frame: Frame | None
) -> None:
    transfer = granted(8, 8, LARGE)
    transfer.ride(1)
    if frame is not None:
        transfer.say(frame)
    with pytest.raises(RemoteProtocolError, match="makes no sense"):
        transfer.say(Sent(7, part, b""))


async def test_what_belongs_to_no_transfer_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="no Commit belongs here"):
        Transfer(8).say(Commit())
    with pytest.raises(RemoteProtocolError, match="no Sent belongs here"):
        receive_frame(None, Sent(7, 0), b"")


async def test_a_stopped_transfer_tells_nothing_more() -> None:
    transfer = granted(LARGE, 8)
    transfer.incoming.stop()
    transfer.land(0, b"d", b"d")
    transfer.ride(1)
    assert not transfer.told and not transfer.errors and not any(transfer.memory[1])


async def test_an_error_of_the_transport_is_left_to_the_link() -> None:
    transfer = granted(LARGE)
    transfer.payload.done[0](b"", ConnectionError())
    transfer.say(Sent(7, 0, b""))
    assert not transfer.told and not transfer.errors


@pytest.mark.parametrize("end", ["whole", "stopped", "other"])
async def test_it_forgets_who_is_told_when_nothing_more_is_to_be_told(end: str) -> None:
    class Owner:
        def landed(self, part: int, digest: bytes) -> None:
            """Be told."""

        def failed(self, error: Exception) -> None:
            """Be told."""

    transfer, owner = Transfer(LARGE), Owner()
    incoming = transfer.incoming
    incoming._landed, incoming._failed = owner.landed, owner.failed
    incoming.grant()
    is_gone = weakref.ref(owner)
    if end == "stopped":
        incoming.stop()
    else:
        transfer.payload.done[0](b"digest", None)
        transfer.say(Sent(7, 0, b"digest" if end == "whole" else b"other"))
    del owner
    assert is_gone() is None


async def test_memory_is_the_transports_alone_once_it_is_granted() -> None:
    memory = numpy.zeros(LARGE, numpy.uint8)
    is_gone = weakref.ref(memory)
    transfer = Transfer(targets=[HostTarget(memoryview(memory))])  # type: ignore[arg-type]
    del memory
    transfer.incoming.grant()
    assert is_gone() is None


async def test_small_parts_come_eagerly_and_large_ones_take_a_lane() -> None:
    transfer = granted(8, LARGE, EAGER_NBYTES, 0)
    assert [*transfer.payload.done] == [1]
    transfer.ride(2, 3, 0)
    assert [part for part, _ in transfer.told] == [2, 3, 0]
    assert bytes(transfer.memory[2]) == bytes([3]) * EAGER_NBYTES
    assert transfer.payload.noted_bytes == EAGER_NBYTES + 8
    assert transfer.payload.expected == [7]
    transfer.land(1, b"digest", b"digest")
    assert len(transfer.told) == 4 and not transfer.payload.expected


async def test_where_nothing_comes_eagerly_even_small_parts_take_a_lane() -> None:
    transfer = granted(8, is_eager=False)
    assert [*transfer.payload.done] == [0]


async def test_where_a_link_carries_no_digests_small_parts_have_none() -> None:
    transfer = granted(8, 8, digest="off")
    transfer.say(Eager(7, (0, 1)), bytes(16))
    assert transfer.told == [(0, b""), (1, b"")] and not transfer.payload.expected


async def test_a_small_part_with_other_bytes_than_were_sent_ends_the_transfer() -> None:
    transfer = granted(8, 8, 8, LARGE)
    transfer.ride(0, 1, 2, wrong=[1])
    assert [part for part, _ in transfer.told] == [0]
    assert isinstance(transfer.errors[0], ChecksumError)
    assert transfer.payload.stopped and not any(transfer.memory[2])


@pytest.mark.parametrize(
    ("parts", "nbytes"),
    [((0, 0), 16), ((1,), 8), ((2,), LARGE), ((3,), 8), ((0,), 7)],
    ids=["twice", "came before", "takes a lane", "does not exist", "too short"],
)
async def test_small_parts_that_make_no_sense_end_the_link(
    parts: tuple[int, ...], nbytes: int
) -> None:
    transfer = granted(8, 8, LARGE)
    transfer.ride(1)
    with pytest.raises(RemoteProtocolError):
        transfer.say(Eager(7, parts), bytes(nbytes))
    assert not any(transfer.memory[0])


async def test_who_waits_is_told_when_all_has_landed() -> None:
    transfer = Transfer(LARGE, 8)
    receiving = await transfer.receiving()
    transfer.ride(1)
    transfer.land(0, b"digest", b"digest")
    await receiving
    assert len(transfer.told) == 2


async def test_who_waits_is_told_of_other_bytes_when_the_memory_is_quiet() -> None:
    transfer = Transfer(LARGE, LARGE)
    transfer.payload.quiet.clear()
    receiving = await transfer.receiving()
    transfer.land(0, b"digest", b"other")
    await until_blocked(receiving)
    transfer.payload.quiet.set()
    with pytest.raises(ChecksumError) as told:
        await receiving
    assert told.value.__traceback__ is not None


async def test_who_waits_is_told_of_other_bytes_where_nobody_else_is() -> None:
    transfer = Transfer(LARGE, failed=None)
    receiving = await transfer.receiving()
    transfer.land(0, b"digest", b"other")
    with pytest.raises(ChecksumError):
        await receiving


async def test_a_failure_just_after_a_cancellation_is_no_matter() -> None:
    transfer = Transfer(LARGE)
    receiving = await transfer.receiving()
    receiving.cancel()
    transfer.land(0, b"digest", b"other")
    with pytest.raises(asyncio.CancelledError):
        await receiving


@pytest.mark.parametrize("ends", ["whole", "failed"])
async def test_the_end_of_what_nobody_waits_for_any_more_is_no_matter(
    ends: str,
) -> None:
    transfer = Transfer(LARGE)
    receiving = await transfer.receiving()
    whole = transfer.incoming._whole
    assert whole is not None
    whole.cancel()  # as a cancellation does, before the one who waits is woken
    transfer.payload.done[0](b"digest", None)
    transfer.say(Sent(7, 0, b"digest" if ends == "whole" else b"other"))
    with pytest.raises(asyncio.CancelledError):
        await receiving


class OnGpu:
    """Parts of a GPU that is not there, each in a tensor of the host."""

    def __init__(self, *sizes: int) -> None:
        self.pool = CopyPool()
        self.tensors = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
        self.targets = [self._target(tensor) for tensor in self.tensors]

    def _target(self, tensor: torch.Tensor) -> DeviceTarget:
        spec = TensorSpec((len(tensor),), "uint8")
        target = Routed(spec, self.pool, empty=empty_tensor)
        target.tensor = tensor
        return target


class Routed(DeviceTarget):
    """Copied to a tensor, and somewhere on a GPU too."""

    tensor: torch.Tensor
    was_given_up = False

    def place(self) -> torch.Tensor:
        return self.tensor

    def device(self) -> DeviceMemory:
        return DeviceMemory(4096, self.nbytes, 0)

    def give_up(self, error: GPUFailed) -> None:
        self.was_given_up = True


def lost() -> RouteLost:
    return RouteLost(OSError("gone"))


async def by_link(transfer: Transfer, part: int, piece: bytes) -> None:
    """Let bytes land that came by the link."""
    bounce = transfer.incoming._on_device[part]._bounce
    assert bounce is not None
    bounce.copy_(torch.frombuffer(bytearray(piece), dtype=torch.uint8))
    transfer.payload.done[part](digest_of(piece), None)
    transfer.say(Sent(7, part, digest_of(piece)))


async def test_what_lands_in_host_memory_for_a_gpu_is_told_when_it_is_there() -> None:
    gpu = OnGpu(LARGE, 8)
    transfer = granted(LARGE, 8, targets=gpu.targets)
    transfer.ride(1)
    assert not transfer.told and transfer.incoming.is_working
    await until(lambda: len(transfer.told) == 1)
    await until(lambda: not transfer.incoming.is_working)
    await by_link(transfer, 0, b"x" * LARGE)
    assert transfer.incoming.has_come
    await until(lambda: len(transfer.told) == 2)
    assert bytes(gpu.tensors[0].tolist()) == b"x" * LARGE
    assert gpu.tensors[1].tolist() == [2] * 8


async def test_a_copy_that_takes_too_long_is_no_work_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = asyncio.Event()

    async def copy(*anything: object) -> None:
        await gate.wait()

    monkeypatch.setattr(incoming_module, "copy_to_device", copy)
    transfer = granted(8, 8, targets=OnGpu(8, 8).targets)
    transfer.ride(0)
    assert transfer.incoming.is_working
    with monkeypatch.context() as patch:
        patch.setattr(incoming_module, "OWN_WORK_S", 0.0)
        assert not transfer.incoming.is_working
    transfer.ride(1)
    gate.set()
    await until(lambda: len(transfer.told) == 2)


async def test_what_comes_with_a_frame_is_copied_to_its_gpu() -> None:
    gpu, memory = OnGpu(8), memoryview(bytearray(8))
    there = Transfer(8, targets=gpu.targets)
    here = Transfer(8, targets=[HostTarget(memory)])
    for transfer in (there, here):
        transfer.incoming.take(memoryview(b"x" * 8), digest_of(b"x" * 8))
    assert here.told and memory == b"x" * 8 and not there.told
    await until(lambda: bool(there.told))
    assert bytes(gpu.tensors[0].tolist()) == b"x" * 8


async def test_a_gpu_that_fails_ends_the_transfer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def fail(*anything: object) -> None:
        raise GPUFailed("off the bus")

    monkeypatch.setattr(incoming_module, "copy_to_device", fail)
    transfer = granted(8, LARGE, targets=OnGpu(8, LARGE).targets)
    transfer.ride(0)
    await until(lambda: bool(transfer.errors))
    assert isinstance(transfer.errors[0], GPUFailed) and transfer.payload.stopped


@pytest.mark.parametrize("fails", [False, True])
async def test_a_copy_that_is_stopped_tells_nothing(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    ended = list[bool]()

    async def copy(*anything: object) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)
            if fails:
                raise GPUFailed("off the bus") from None

    monkeypatch.setattr(incoming_module, "copy_to_device", copy)
    transfer = granted(8, targets=OnGpu(8).targets)
    transfer.ride(0)
    await asyncio.sleep(0)
    if not fails:
        transfer.incoming.stop()
    await transfer.incoming.quiesce()
    assert ended and not transfer.told and not transfer.errors


async def test_a_copy_that_ends_as_it_is_stopped_tells_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def copy(*anything: object) -> None:
        transfer.incoming.stop()

    monkeypatch.setattr(incoming_module, "copy_to_device", copy)
    transfer = granted(8, targets=OnGpu(8).targets)
    transfer.ride(0)
    await asyncio.sleep(0)
    await transfer.incoming.quiesce()
    assert not transfer.told and not transfer.errors


async def test_what_is_here_already_may_come_again_when_all_else_is_there() -> None:
    route, gpu = Moving(), OnGpu(LARGE, LARGE)
    transfer = granted(LARGE, LARGE, targets=gpu.targets, route=route)
    route.done[0](b"digest", None)
    route.done[1](b"", lost())
    await until(lambda: len(transfer.frames) == 2)
    await by_link(transfer, 1, b"x" * LARGE)
    await until(lambda: len(transfer.told) == 2)
    transfer.land(0, b"again", b"again")
    assert len(transfer.told) == 2 and not transfer.errors


async def test_what_comes_by_a_route_is_told_at_once_and_small_parts_beside_it() -> (
    None
):
    route = Moving()
    transfer = granted(LARGE, 8, targets=OnGpu(LARGE, 8).targets, route=route)
    assert transfer.frames == [Grant(7, "nccl", "full")]
    assert [*route.done] == [0] and not transfer.payload.done
    assert route.expected == transfer.payload.expected == [7]
    frame = Sent(7, 0, b"digest", "full", "nccl")
    transfer.say(frame)
    assert route.sent_frames == [frame] and transfer.incoming.landed_bytes == 10
    route.working = True
    assert transfer.incoming.is_working
    route.done[0](b"digest", None)
    assert transfer.told == [(0, b"digest")] and not route.expected
    transfer.ride(1)
    await until(lambda: len(transfer.told) == 2)
    await transfer.incoming.quiesce()
    assert route.quiesced and not transfer.payload.quiesced


@pytest.mark.parametrize("sizes", [(8,), (8, LARGE)])
async def test_a_route_is_taken_only_where_all_large_parts_are_on_a_gpu(
    sizes: tuple[int, ...],
) -> None:
    targets: list[Target] = [HostTarget(memoryview(bytearray(n))) for n in sizes]
    targets += OnGpu(8, *sizes[1:]).targets
    transfer = granted(targets=targets, route=Moving())
    assert transfer.frames == [Grant(7)]


async def test_what_the_peer_has_shown_before_need_not_be_granted() -> None:
    route = Moving(is_to_gpu=False, is_granted=False)
    targets = [HostTarget(memoryview(bytearray(LARGE)))]
    transfer = granted(targets=targets, route=route)
    assert not transfer.frames and not transfer.payload.done
    route.done[0](b"", RouteLost(OSError("gone")))
    await until(lambda: transfer.frames == [Grant(7)])
    transfer.land(0, b"digest", b"digest")
    assert transfer.told == [(0, b"digest")]


async def test_where_there_is_no_route_all_comes_by_the_link() -> None:
    transfer = Transfer(LARGE, targets=OnGpu(LARGE).targets, route=Moving())
    transfer.route = None
    transfer.incoming.grant()
    assert transfer.frames == [Grant(7)] and [*transfer.payload.done] == [0]
    with pytest.raises(RemoteProtocolError, match="not asked for"):
        transfer.say(Sent(7, 0, b"", "off", "nccl"))
    assert not transfer.incoming.reads_peer and not transfer.incoming.is_given_up
    assert transfer.incoming.landed_bytes == 5 and not transfer.incoming.is_working


async def test_an_error_of_a_route_ends_the_transfer() -> None:
    route = Moving()
    transfer = granted(LARGE, targets=OnGpu(LARGE).targets, route=route)
    route.done[0](b"", ChecksumError("other bytes"))
    assert isinstance(transfer.errors[0], ChecksumError) and route.stopped
    route.done[0](b"", None)
    assert not transfer.told


async def test_what_a_route_has_lost_comes_by_the_link_in_place() -> None:
    route, gpu = Moving(), OnGpu(LARGE, LARGE, 8)
    transfer = granted(LARGE, LARGE, 8, targets=gpu.targets, route=route)
    route.done[0](b"digest", None)
    route.quiet.clear()
    route.done[1](b"", lost())
    route.done[1](b"", lost())
    assert not route.expected and transfer.payload.expected == [7]
    await until(lambda: bool(route.quiesced))
    assert len(transfer.frames) == 1
    route.quiet.set()
    await until(lambda: len(transfer.frames) == 2)
    assert transfer.frames[1] == Grant(7) and [*transfer.payload.done] == [0, 1]
    transfer.say(Sent(7, 1, b"", "full", "nccl"))  # late
    assert not route.sent_frames
    for part in (0, 1):
        await by_link(transfer, part, b"x" * LARGE)
    transfer.ride(2)
    await until(lambda: len(transfer.told) == 3)
    assert [part for part, _ in transfer.told].count(0) == 1
    assert not gpu.tensors[0].any()  # what was told already is not written again
    assert bytes(gpu.tensors[1].tolist()) == b"x" * LARGE
    assert not transfer.errors and not transfer.payload.expected


async def test_what_is_not_whole_when_its_route_is_lost_is_not_expected_yet() -> None:
    route, waited = Moving(), list[bool]()

    async def room() -> None:
        waited.append(True)

    targets = OnGpu(LARGE).targets
    transfer = Transfer(LARGE, targets=targets, route=route, room=room)
    transfer.incoming.grant(whole=False)
    route.done[0](b"", lost())
    await until(lambda: len(transfer.frames) == 2)
    assert waited and not transfer.payload.expected
    transfer.incoming.expect()
    assert transfer.payload.expected == [7]


async def test_a_route_that_is_lost_when_nobody_wants_it_is_no_matter() -> None:
    route = Moving()
    transfer = granted(LARGE, targets=OnGpu(LARGE).targets, route=route)
    route.quiet.clear()
    route.done[0](b"", lost())
    await until(lambda: bool(route.quiesced))
    transfer.incoming.stop()
    route.quiet.set()
    await transfer.incoming.quiesce()
    assert transfer.frames == [Grant(7, "nccl", "full")] and not transfer.errors


@pytest.mark.parametrize("has_other", [True, False])
async def test_where_a_gpu_may_write_for_ever_nothing_lands_again(
    monkeypatch: pytest.MonkeyPatch, has_other: bool
) -> None:
    route, gpu = Moving(), OnGpu(LARGE, LARGE)
    if not has_other:
        monkeypatch.setattr(Routed, "give_up", Target.give_up)
    transfer = granted(LARGE, LARGE, targets=gpu.targets, route=route)
    route.done[0](b"digest", None)
    route.is_given_up = True
    assert transfer.incoming.is_given_up
    route.done[1](b"", lost())
    await until(lambda: len(transfer.frames) == 2 or bool(transfer.errors))
    if has_other:
        given_up = [t.was_given_up for t in gpu.targets if isinstance(t, Routed)]
        assert given_up == [False, True]
    else:
        assert isinstance(transfer.errors[0], GPUFailed)
        await transfer.incoming.quiesce()
        assert transfer.incoming.is_given_up


async def test_what_was_quiet_stays_so_when_its_gpu_is_given_up() -> None:
    route = Moving()
    transfer = granted(LARGE, targets=OnGpu(LARGE).targets, route=route)
    await transfer.incoming.quiesce()
    route.is_given_up = True
    assert not transfer.incoming.is_given_up


async def test_what_the_peer_confirms_is_told_when_it_has() -> None:
    route = Moving()
    transfer = granted(LARGE, targets=OnGpu(LARGE).targets, route=route, confirms=True)
    route.done[0](b"digest", None)
    confirmed = Sent(7, 0, route="nccl")
    assert transfer.frames[1:] == [confirmed] and not transfer.told
    with pytest.raises(RemoteProtocolError, match="makes no sense"):
        transfer.say(Sent(7, 0))
    assert not transfer.incoming.has_come
    transfer.say(confirmed)
    assert transfer.told == [(0, b"digest")] and transfer.incoming.has_come
