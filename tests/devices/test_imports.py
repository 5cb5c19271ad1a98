from __future__ import annotations

import pytest

from asynckv.devices.arena import MARK_NBYTES, DeviceAllocation
from asynckv.devices.imports import import_allocation, open_allocation
from asynckv.errors import GPUFailed
from harness.fake_devices import FakeDevice, fake_device_of
from harness.fake_gpus import FakeGpus

NBYTES = 4096


@pytest.fixture
def theirs(gpus: FakeGpus) -> FakeDevice:
    return fake_device_of(gpus.process())


def show(gpus: FakeGpus) -> DeviceAllocation:
    """Return memory of another process. No fixture: it has to go before the GPUs do."""
    opened = fake_device_of(gpus.process()).device.opened()
    return DeviceAllocation(opened, opened.cuda.malloc(NBYTES))


def test_what_is_open_holds_what_its_owner_wrote(
    gpus: FakeGpus, theirs: FakeDevice
) -> None:
    shown = show(gpus)
    found = import_allocation(theirs.process.cuda, 0, shown.handle, NBYTES)
    assert found.nonce() == shown.nonce and found.nbytes == shown.nbytes
    found.release()


def test_it_is_open_once_and_closed_with_the_last_user(
    gpus: FakeGpus, theirs: FakeDevice
) -> None:
    shown = show(gpus)
    cuda = theirs.process.cuda
    first = import_allocation(cuda, 0, shown.handle, NBYTES)
    second = import_allocation(cuda, 0, shown.handle, NBYTES)
    assert first is second and len(cuda._opened) == 1
    first.release()
    assert len(cuda._opened) == 1
    second.release()
    assert not cuda._opened


def test_another_size_is_refused(gpus: FakeGpus, theirs: FakeDevice) -> None:
    shown = show(gpus)
    first = import_allocation(theirs.process.cuda, 0, shown.handle, NBYTES)
    with pytest.raises(GPUFailed, match="8192"):
        import_allocation(theirs.process.cuda, 0, shown.handle, 8192)
    first.release()
    assert not theirs.process.cuda._opened


@pytest.mark.parametrize("nbytes", [0, MARK_NBYTES])
def test_what_has_no_room_is_not_opened(
    gpus: FakeGpus, theirs: FakeDevice, nbytes: int
) -> None:
    shown = show(gpus)
    with pytest.raises(GPUFailed, match="no room"):
        import_allocation(theirs.process.cuda, 0, shown.handle, nbytes)
    assert not theirs.process.cuda._opened


async def test_it_is_opened_off_the_loop_and_has_not_ended(
    gpus: FakeGpus, theirs: FakeDevice
) -> None:
    shown, ends = show(gpus), list[None]()
    cuda = theirs.process.cuda
    found, nonce = await open_allocation(
        cuda, 0, shown.handle, NBYTES, lambda: ends.append(None)
    )
    assert nonce == shown.nonce and not ends
    found.release()


async def test_what_cannot_be_opened_has_ended(
    gpus: FakeGpus, theirs: FakeDevice
) -> None:
    shown, ends = show(gpus), list[None]()
    cuda = theirs.process.cuda
    with pytest.raises(GPUFailed, match="no room"):
        await open_allocation(cuda, 0, shown.handle, 0, lambda: ends.append(None))
    assert len(ends) == 1


def test_each_gpu_of_a_process_opens_what_it_can_reach(two_gpus: FakeGpus) -> None:
    shown, cuda = show(two_gpus), two_gpus.process().cuda
    with pytest.raises(GPUFailed, match="cannot reach"):
        import_allocation(cuda, 1, shown.handle, NBYTES)
    two_gpus.has_peer_access = True
    every = [import_allocation(cuda, gpu, shown.handle, NBYTES) for gpu in (0, 1)]
    assert [one.memory.device for one in every] == [0, 1] and len(cuda._opened) == 2
    assert every[1].nonce() == shown.nonce
    for one in every:
        one.release()
    assert not cuda._opened
