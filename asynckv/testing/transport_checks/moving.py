"""Bytes land as they were, whatever their number, and digests tell so."""

from __future__ import annotations

import random
from typing import Final

from asynckv.protocol.wire import digest_of
from asynckv.testing.expectations import expect
from asynckv.testing.transport_checks.sides import (
    CHUNK,
    LARGE,
    MakeTransportPair,
    TransportCheck,
    after_turns,
    memory,
    noise,
    open_sides,
)

__all__ = (
    "MOVING_CHECKS",
    "a_known_digest_is_told_and_not_computed",
    "both_directions_move_at_once",
    "bytes_of_any_size_land",
    "it_describes_itself_in_few_bytes",
    "many_transfers_move_at_once",
    "parts_land_in_their_own_memory_in_any_order",
    "what_has_landed_is_counted_while_it_is_on_its_way",
    "without_digests_they_are_empty",
)

_SIZES: Final = (
    *(0, 1, 2**16 - 1, 2**16, 2**16 + 1),
    *(CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 1),
)


async def bytes_of_any_size_land(make_pair: MakeTransportPair) -> None:
    """None, one, a chunk and one more or less; nothing beside them is touched."""
    async with open_sides(make_pair) as (near, far):
        for transfer, nbytes in enumerate(_SIZES):
            source, around = noise(nbytes), memory(nbytes + 6, 7)
            landing = far.receive(transfer, 0, around[3 : nbytes + 3])
            leaving = near.send(transfer, 0, source)
            expect(await landing == digest_of(source), f"digest of {nbytes} landed")
            expect(await leaving == digest_of(source), f"digest of {nbytes} sent")
            expect(around[3 : nbytes + 3].tobytes() == source, f"{nbytes} bytes")
            beside = (*around[:3], *around[nbytes + 3 :])
            expect(beside == (7,) * 6, f"written beside {nbytes} bytes")
            expect(not far.transport.landed_bytes(transfer), "counted after landing")


async def parts_land_in_their_own_memory_in_any_order(
    make_pair: MakeTransportPair,
) -> None:
    """Three hundred of one transfer, received in one order and sent in another."""
    async with open_sides(make_pair) as (near, far):
        order = random.Random(1)
        numbers = order.sample(range(1000), 300)
        sources = {number: noise(number * 97, number) for number in numbers}
        targets = {number: memory(len(sources[number])) for number in numbers}
        for number in order.sample(numbers, len(numbers)):
            far.receive(1, number, targets[number])
        for number in order.sample(numbers, len(numbers)):
            near.send(1, number, sources[number])
        for landing in [*near.landings, *far.landings]:
            await landing
        for number in numbers:
            expect(targets[number].tobytes() == sources[number], f"part {number}")


async def many_transfers_move_at_once(make_pair: MakeTransportPair) -> None:
    """Small ones beside large ones, each with its own digests."""
    async with open_sides(make_pair) as (near, far):
        sizes = (CHUNK + 1, 10, 70_000)
        targets = [[memory(nbytes) for nbytes in sizes] for _ in range(24)]
        for transfer, parts in enumerate(targets):
            for part, target in enumerate(parts):
                far.receive(transfer, part, target)
        for transfer in range(24):
            for part, nbytes in enumerate(sizes):
                near.send(transfer, part, noise(nbytes, transfer % 4))
        for landing, leaving in zip(far.landings, near.landings, strict=True):
            expect(await landing == await leaving, f"of {landing.transfer}")
        for transfer, parts in enumerate(targets):
            for target in parts:
                is_same = target.tobytes() == noise(target.nbytes, transfer % 4)
                expect(is_same, f"the bytes of {transfer}")


async def both_directions_move_at_once(make_pair: MakeTransportPair) -> None:
    """Neither waits for the other, though both fill what lies between them."""
    async with open_sides(make_pair) as (near, far):
        targets = [memory(LARGE) for _ in range(4)]
        for part in (0, 1):
            far.receive(1, part, targets[part])
            near.receive(2, part, targets[2 + part])
        for part in (0, 1):
            near.send(1, part, noise(LARGE, 1))
            far.send(2, part, noise(LARGE, 2))
        for landing in [*near.landings, *far.landings]:
            await landing
        for number, target in enumerate(targets):
            expect(target.tobytes() == noise(LARGE, 1 + number // 2), f"of {number}")


async def a_known_digest_is_told_and_not_computed(
    make_pair: MakeTransportPair,
) -> None:
    """On the sending side alone: the other tells that of what has landed."""
    async with open_sides(make_pair) as (near, far):
        for transfer, nbytes in enumerate((0, 5, 2**17)):
            known, source = b"k" * 16, noise(nbytes)
            landing = far.receive(transfer, 0, memory(nbytes))
            leaving = near.send(transfer, 0, source, digest=known)
            expect(await leaving == known, "the digest that was known")
            expect(await landing == digest_of(source), "the digest that was found")


async def without_digests_they_are_empty(make_pair: MakeTransportPair) -> None:
    """Also where one is known, and for a part that nobody waits for."""
    async with open_sides(make_pair, digest=False) as (near, far):
        far.transport.announce(9)
        for transfer, nbytes in enumerate((0, 5, 2**17)):
            target = memory(nbytes)
            far.receive(transfer, 0, target)
            near.send(transfer, 0, noise(nbytes), digest=b"k" * 16)
            near.send(9, transfer, noise(nbytes), digest=b"k" * 16)
            for landing in [*near.landings, *far.landings]:
                expect(await landing == b"", "a digest")
            expect(target.tobytes() == noise(nbytes), "the bytes")


async def what_has_landed_is_counted_while_it_is_on_its_way(
    make_pair: MakeTransportPair,
) -> None:
    """Never more than there is, and never less than before until a part is whole."""
    async with open_sides(make_pair) as (near, far):
        landing, seen = far.receive(1, 0, memory(LARGE)), [0]
        near.send(1, 0, noise(LARGE))
        while not landing.is_told:
            seen.append(far.transport.landed_bytes(1))
            await after_turns(1)
        rising = seen[:-1] if seen[-1] == 0 else seen
        expect(rising == sorted(rising) and max(seen) <= LARGE, f"counted {seen}")
        far.receive(3, 0, memory(LARGE))
        far.stop(3)
        counts = [far.transport.landed_bytes(transfer) for transfer in (1, 3, 99)]
        expect(counts == [0, 0, 0], f"counted {counts} of what is not on its way")


async def it_describes_itself_in_few_bytes(make_pair: MakeTransportPair) -> None:
    """The link carries it in a frame: 4 KiB at most."""
    async with open_sides(make_pair) as sides:
        for side in sides:
            description = side.transport.describe()
            expect(isinstance(description, bytes), "bytes")
            expect(len(description) <= 4096, f"{len(description)} bytes")


MOVING_CHECKS: Final[tuple[TransportCheck, ...]] = (
    bytes_of_any_size_land,
    parts_land_in_their_own_memory_in_any_order,
    many_transfers_move_at_once,
    both_directions_move_at_once,
    a_known_digest_is_told_and_not_computed,
    without_digests_they_are_empty,
    what_has_landed_is_counted_while_it_is_on_its_way,
    it_describes_itself_in_few_bytes,
)
