"""How fast and how small the prefix index is, beside a scan over every entry.

Run ``python -m benchmarks.matching [--json]``. Queries and entries are tensors;
turning them into key bytes is part of every time. The scan compares a query
with each stored tensor by ``torch.equal`` on what both have. Every limit is a
ratio within this run; the exit status is 1 if one is missed. The data and the
modules are frozen out of the garbage collector's sight, the index is not.
"""

from __future__ import annotations

import gc
import random
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterable, Sequence

import torch

from asynckv.buffers.entries.prefix_index import Place, PrefixIndex
from asynckv.cli.bench.report import percentile
from benchmarks.pairing.runs import Figure, arguments_of, figures_of, report

__all__ = ("main",)

ENTRIES = 10_000
TOKENS = 2_048
VOCABULARY = 128_256
GROUP = 10
"""Entries of one group share their first 1,024 tokens, or 2,040 in 100 groups."""


class Stopwatch:
    """Times single calls, in microseconds."""

    def __init__(self) -> None:
        self.times_us: list[float] = []

    def time(self, call: Callable[[], object]) -> None:
        begin = time.perf_counter_ns()
        call()
        self.times_us.append((time.perf_counter_ns() - begin) / 1e3)

    def quantile(self, share: float) -> float:
        return percentile(self.times_us, share)


def key_of(tokens: torch.Tensor) -> bytes:
    key: bytes = tokens.numpy().tobytes()
    return key


def grouped_entries(generator: torch.Generator) -> list[torch.Tensor]:
    rows = torch.randint(VOCABULARY, (ENTRIES, TOKENS), generator=generator)
    for group, start in enumerate(range(0, ENTRIES, GROUP)):
        shared = 2_040 if group % 10 == 0 else 1_024
        rows[start : start + GROUP, :shared] = rows[start, :shared]
    order = torch.randperm(ENTRIES, generator=generator)
    return [rows[index].clone() for index in order.tolist()]


def queries_for(
    entries: Sequence[torch.Tensor], generator: torch.Generator
) -> list[tuple[torch.Tensor, bool]]:
    """Make 2,000 queries, each with whether some entry matches it."""
    extra = torch.randint(VOCABULARY, (256,), generator=generator)
    queries = []
    for entry in entries[:500]:
        last_differs, middle_differs = entry.clone(), entry.clone()
        last_differs[-1] = (last_differs[-1] + 1) % VOCABULARY
        middle_differs[1_024:] = middle_differs[1_024:].flip(0)
        queries += [
            (entry.clone(), True),
            (torch.cat((entry, extra)), True),
            (last_differs, False),
            (middle_differs, False),
        ]
    return queries


def scan(query: torch.Tensor, entries: Iterable[torch.Tensor]) -> int:
    """Find how many tokens match best, by asking every entry."""
    best, size = 0, len(query)
    for entry in entries:
        shared = min(size, len(entry))
        ours = query if shared == size else query[:shared]
        theirs = entry if shared == len(entry) else entry[:shared]
        if torch.equal(ours, theirs) and shared > best:
            best = shared
    return best


def scan_p50_us(queries: Iterable[torch.Tensor], entries: list[torch.Tensor]) -> float:
    watch = Stopwatch()
    for query in queries:
        watch.time(lambda query=query: scan(query, entries))  # type: ignore[misc]
    return watch.quantile(0.5)


def distinct_nbytes(keys: list[bytes]) -> int:
    """Count the bytes of all keys, those of shared first tokens once."""
    total, before = 0, b""
    for key in sorted(keys):
        ours = torch.frombuffer(bytearray(key), dtype=torch.int64)
        size = min(len(ours), len(before) // 8)
        differs = (
            ours[:size]
            != torch.frombuffer(bytearray(before or bytes(8)), dtype=torch.int64)[:size]
        )
        shared = int(differs.to(torch.uint8).argmax()) if differs.any() else size
        total += len(key) - 8 * shared
        before = key
    return total


def index_nbytes(entries: Sequence[torch.Tensor]) -> int:
    """Measure what an index over ``entries`` takes."""
    gc.collect()
    tracemalloc.start()
    index: PrefixIndex[None] = PrefixIndex()
    before = tracemalloc.get_traced_memory()[0]
    places = [index.add(key_of(entry), seq, None) for seq, entry in enumerate(entries)]
    nbytes = tracemalloc.get_traced_memory()[0] - before - sys.getsizeof(places)
    tracemalloc.stop()
    return nbytes


def measure_groups(generator: torch.Generator) -> tuple[list[Figure], float]:
    """Measure the grouped entries; also return the scan's p50."""
    entries = grouped_entries(generator)
    queries = queries_for(entries, generator)
    gc.freeze()
    index: PrefixIndex[int] = PrefixIndex()
    inserts, matches, removes = Stopwatch(), Stopwatch(), Stopwatch()
    places: list[Place[int]] = []

    def insert(seq: int) -> None:
        places.append(index.add(key_of(entries[seq]), seq, seq))

    for seq in range(ENTRIES):
        inserts.time(lambda seq=seq: insert(seq))  # type: ignore[misc]
    for query, is_there in queries:
        found: list[tuple[int, int] | None] = []
        matches.time(lambda: found.append(index.best(key_of(query))))  # noqa: B023
        assert (found[0] is not None) is is_there
    naive_us = scan_p50_us([query for query, _ in queries[:24]], entries)
    keys = [key_of(entry) for entry in entries]
    nbytes = index_nbytes(entries)
    own = distinct_nbytes(keys)
    for place in places:
        removes.time(lambda place=place: index.remove(place))  # type: ignore[misc]
    assert len(index) == 0
    said = {
        "naive scan p50, us": naive_us,
        "match p50, us": matches.quantile(0.5),
        "scan p50 over match p99": naive_us / matches.quantile(0.99),
        "insert p50, us": inserts.quantile(0.5),
        "scan p50 over insert p99": naive_us / inserts.quantile(0.99),
        "remove p99, us": removes.quantile(0.99),
        "overhead an entry, bytes": (nbytes - own) / ENTRIES,
    }
    limits = {
        "match p99, us": (matches.quantile(0.99), naive_us / 30),
        "insert p99, us": (inserts.quantile(0.99), naive_us / 15),
        "memory over distinct tokens": (nbytes / own, 2),
        "memory over all tokens": (nbytes / (ENTRIES * TOKENS * 8), 2),
    }
    return [
        *figures_of("groups", said),
        *(
            Figure(f"groups: {what}", found, at_most=most)
            for what, (found, most) in limits.items()
        ),
    ], naive_us


def measure_chain(generator: torch.Generator, groups_scan_us: float) -> list[Figure]:
    """Measure entries of which each extends the one before by 1 to 16 tokens."""
    steps = torch.randint(1, 17, (ENTRIES,), generator=generator)
    ends: list[int] = steps.cumsum(0).tolist()
    tokens = torch.randint(VOCABULARY, (ends[-1] + 16,), generator=generator)
    entries = [tokens[:end] for end in ends]
    naive_us = scan_p50_us([tokens.clone() for _ in range(5)], entries)
    slowest_us = 0.0
    rows = [Figure("chain: naive scan p50, us", naive_us)]
    shuffled = torch.randperm(ENTRIES, generator=generator).tolist()
    upwards, downwards = list(range(ENTRIES)), list(reversed(range(ENTRIES)))
    for name, adding, removing in (
        ("shortest first", upwards, upwards),
        ("longest first", downwards, upwards),
        ("any order", shuffled, downwards),
    ):
        watches = run_chain(tokens, entries, adding, removing)
        for verb, watch in watches.items():
            longest_us = max(watch.times_us)
            slowest_us = max(slowest_us, longest_us)
            what = f"chain, {name}: {verb} max, us"
            rows.append(Figure(what, longest_us, at_most=2 * naive_us))
    over = slowest_us / groups_scan_us
    return [
        *rows,
        Figure("chain: slowest over its scan's p50", slowest_us / naive_us, at_most=2),
        Figure("chain: slowest over groups' scan p50", over),
    ]


def run_chain(
    tokens: torch.Tensor,
    entries: Sequence[torch.Tensor],
    adding: Sequence[int],
    removing: Sequence[int],
) -> dict[str, Stopwatch]:
    index: PrefixIndex[int] = PrefixIndex()
    verbs = ("add", "best", "best refusing", "oldest", "remove", "add again")
    watches = {verb: Stopwatch() for verb in verbs}
    places: dict[int, Place[int]] = {}

    def add(seq: int, number: int) -> None:
        places[number] = index.add(key_of(entries[number]), seq, number)

    for seq, number in enumerate(adding):
        watches["add"].time(lambda s=seq, n=number: add(s, n))  # type: ignore[misc]
    for query in (tokens, entries[0], entries[-1], entries[ENTRIES // 2]) * 10:
        watches["best"].time(lambda q=query: index.best(key_of(q)))  # type: ignore[misc]
        watches["oldest"].time(lambda q=query: index.oldest(key_of(q)))  # type: ignore[misc]
        refused = iter([False, False, False])
        watches["best refusing"].time(
            lambda q=query, r=refused: index.best(  # type: ignore[misc]
                key_of(q), accept=lambda item: next(r, True)
            )
        )
    for number in (*removing[:500], *removing[-500:]):
        seq = places[number].seq
        watches["remove"].time(lambda n=number: index.remove(places[n]))  # type: ignore[misc]
        watches["add again"].time(lambda s=seq, n=number: add(s, n))  # type: ignore[misc]
    for number in removing:
        watches["remove"].time(lambda n=number: index.remove(places[n]))  # type: ignore[misc]
    assert len(index) == 0
    return watches


def measure_waiting(generator: torch.Generator) -> list[Figure]:
    """Measure finding the one query out of 10,000 that a new entry is for."""
    queries = grouped_entries(generator)
    index: PrefixIndex[int] = PrefixIndex()
    places = [index.add(key_of(q), seq, seq) for seq, q in enumerate(queries)]
    wakes = Stopwatch()
    chosen = random.Random(2).sample(range(ENTRIES), 2_000)
    for number in chosen:
        entry = queries[number].clone()
        found: list[tuple[int, int] | None] = []

        def wake() -> None:
            found.append(index.oldest(key_of(entry)))  # noqa: B023
            index.remove(places[number])  # noqa: B023

        wakes.time(wake)
        assert found == [(number, TOKENS)]
    same: PrefixIndex[int] = PrefixIndex()
    alike = [same.add(key_of(queries[0]), seq, seq) for seq in range(ENTRIES)]
    in_line = Stopwatch()
    for seq, place in enumerate(alike):
        assert same.oldest(key_of(queries[0])) == (seq, TOKENS)
        in_line.time(lambda p=place: same.remove(p))  # type: ignore[misc]
    said = {
        "find and wake p50, us": wakes.quantile(0.5),
        "find and wake p99, us": wakes.quantile(0.99),
        "for one key: remove p99, us": in_line.quantile(0.99),
    }
    return figures_of("10,000 waiting", said)


def main() -> None:
    """Run everything, print it, and exit 1 where a limit is missed."""
    given = arguments_of(__doc__).parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(2)
    figures, scan_us = measure_groups(generator)
    figures += measure_waiting(generator) + measure_chain(generator, scan_us)
    report(figures, given)


if __name__ == "__main__":
    main()
