"""``python -m harness.disk_writer PATH MAX_BYTES``: a writer for each seed it is told.

It forks one for each line of its input, which says ``pid 123`` and writes until it is
killed; ``over`` is said then. A writer says each change before it begins, and when it
was accepted: ``begin k1/3 17``, then ``done k1/3 17``; 0 is a delete. Imports no torch.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import random
import sys

from asynckv.abc.tiers import TierMemory, TierResult, TierValue, WantedValue
from asynckv.protocol.wire import digest_of
from asynckv.stores.disk import DiskTier

__all__ = ("KEYS", "Found", "data_of", "find")

KEYS = tuple(f"k1/{number}" for number in range(8))
_SIZES = (0, 5000, 300_000, 9 * 2**20 + 1)
"""The last one is several calls of the system, between which a kill comes."""
_WRITERS = 3
_PAGE_NBYTES = 4096


def data_of(key: str, seed: int) -> bytes:
    """Return the bytes of the value that is written with this seed."""
    nbytes = random.Random(f"{key} {seed}").choice(_SIZES)
    block = digest_of(f"{key} {seed}".encode())
    return (block * (nbytes // len(block) + 1))[:nbytes]


class Found(WantedValue):
    """What is on the disk for a key."""

    is_held = False

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.memory = memoryview(b"")
        self.header = b""

    @property
    def lent_nbytes(self) -> int:
        return len(self.memory)

    async def place(self, header: bytes | memoryview) -> TierMemory:
        self.header, self.header_nbytes = bytes(header), len(header)
        nbytes = int(self.header.split()[2])
        space = memoryview(mmap.mmap(-1, max(_padded(nbytes), 1)))
        self.memory = space[:nbytes]
        return TierMemory(nbytes, [self.memory], [space[: _padded(nbytes)]])

    @property
    def seed(self) -> int:
        """Which value it is, if its bytes are right; -1 if they are torn.

        :raises AssertionError: they are right, and were never written
        """
        key, seed, _, digest = self.header.decode().split()
        if digest_of(self.memory).hex() != digest:
            return -1
        if key != self.key or data_of(key, int(seed)) != self.memory:
            raise AssertionError(f"{self.key} has what was never written there")
        return int(seed)


async def find(tier: DiskTier, key: str) -> int:
    """Return the seed of what a key has; 0: nothing, -1: what is torn."""
    found = Found(key)
    (result,) = await tier.fetch([found])
    return found.seed if result is TierResult.DONE else 0


async def _write(tier: DiskTier, seed: int, keys: tuple[str, ...]) -> None:
    for turn in range(seed, 2**31):
        key = random.choice(keys)
        deletes = random.random() < 0.1
        _say(f"begin {key} {0 if deletes else turn}")
        if deletes:
            results = await tier.delete([key])
        else:
            data = data_of(key, turn)
            header = f"{key} {turn} {len(data)} {digest_of(data).hex()}".encode()
            space = memoryview(mmap.mmap(-1, max(_padded(len(data)), 1)))
            space[: len(data)] = data
            memory = TierMemory(
                len(data), [space[: len(data)]], [space[: _padded(len(data))]]
            )
            results = await tier.store([TierValue(key, header, memory)])
        if list(results) == [TierResult.DONE]:
            _say(f"done {key} {0 if deletes else turn}")
        elif list(results) != [TierResult.REFUSED]:  # there was no room
            raise RuntimeError(f"a change of {key}: {results}")


def _padded(nbytes: int) -> int:
    return -(-nbytes // _PAGE_NBYTES) * _PAGE_NBYTES


def _say(line: str) -> None:
    os.write(1, f"{line}\n".encode())


async def _main(path: str, max_bytes: int, seed: int) -> None:
    async with DiskTier(path, max_bytes) as tier:
        await tier.probe()
        await tier.scanned()
        # Each has keys of its own: what it has said last of one is so.
        shares = [KEYS[number::_WRITERS] for number in range(_WRITERS)]
        await asyncio.gather(*(_write(tier, seed, keys) for keys in shares))


def _write_when_told(path: str, max_bytes: int) -> None:
    for seed in sys.stdin:
        pid = os.fork()
        if not pid:
            _say(f"pid {os.getpid()}")
            random.seed()  # else each would do as the last one
            asyncio.run(_main(path, max_bytes, int(seed)))
            os._exit(1)
        os.waitpid(pid, 0)
        _say("over")


if __name__ == "__main__":
    if "torch" in sys.modules:
        raise RuntimeError("it has imported torch")
    _write_when_told(sys.argv[1], int(sys.argv[2]))
