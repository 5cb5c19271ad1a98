"""The process that has Mooncake's client: it is asked by lines, and answers by lines.

A question is ``[number, what, keys, places, sizes]`` in JSON: places in the memory that
it shares with who asks. An answer is ``[number, codes]``, one code a key, or ``[number,
text]``: it could not be asked at all. Answer 0 says how the start went. Each question
has a thread, so what hangs keeps nothing else from being answered.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

__all__ = (
    "MISSING",
    "NO_ANSWER",
    "NO_ROOM",
    "OUT_OF_TIME",
    "REPLACED",
    "Place",
    "Question",
)

MISSING: Final = -704
NO_ROOM: Final = -200
NO_ANSWER: Final = -900
OUT_OF_TIME: Final = -901
REPLACED: Final = -600
"""The value is longer than its size was when that was asked for."""
_PR_SET_PDEATHSIG: Final = 1

Question = tuple[int, str, list[str], list[int], list[int]]


class Place(msgspec.Struct, frozen=True):
    """Where the store's master is, and by what bytes go to those who have memory."""

    host: str
    port: int
    protocol: str = "tcp"
    device: str = ""
    staging_nbytes: int = 128 * 2**20
    patience_s: float = 1.0


class _Client:
    """What may be asked. Everything here blocks."""

    def __init__(self, store: Any, staging: mmap.mmap) -> None:
        self._store = store
        self._staging = ctypes.c_char.from_buffer(staging)  # mapped as long as this is
        self._base = ctypes.addressof(self._staging)
        self.calls: dict[str, Callable[..., Sequence[int]]] = {
            "contains": lambda keys, places, sizes: store.batch_is_exist(keys),
            "remove": lambda keys, places, sizes: store.batch_remove(keys, True),
            "sizes": self._sizes,
            "get": self._get,
            "put": self._put,
        }

    def set_up(self, place: Place, own_address: str, nbytes: int) -> int:
        """Connect, and say where the memory is. 0: it has worked."""
        master = f"{place.host}:{place.port}"
        # Its own addresses are found by shaking hands; it brings no memory.
        told = own_address, "P2PHANDSHAKE", 0, 0, place.protocol, place.device, master
        status: int = self._store.setup(*told)
        return status or int(self._store.register_buffer(self._base, nbytes))

    def _sizes(
        self, keys: list[str], places: list[int], sizes: list[int]
    ) -> Sequence[int]:
        found = self._store.batch_get_replica_desc(keys)
        told = {key: size for key in found if (size := _size_of(found[key]))}
        # No answer from the master, too, is that nothing was found.
        left = [key for key in keys if key not in told]
        for key, there in zip(left, self._store.batch_is_exist(left), strict=True):
            told[key] = MISSING if there == 0 else there
            if there == 1:
                told[key] = self._store.get_size(key)
        return [told[key] for key in keys]

    def _get(
        self, keys: list[str], places: list[int], sizes: list[int]
    ) -> Sequence[int]:
        at = [self._base + place for place in places]
        codes: Sequence[int] = self._store.batch_get_into(keys, at, sizes)
        return codes

    def _put(
        self, keys: list[str], places: list[int], sizes: list[int]
    ) -> Sequence[int]:
        # What is there stays, and the answer would be that all is well.
        codes = dict(zip(keys, self._store.batch_remove(keys, True), strict=True))
        values = [
            (key, self._base + place, size)
            for key, place, size in zip(keys, places, sizes, strict=True)
            if codes[key] in (0, MISSING)
        ]
        if values:
            new, at, each = map(list, zip(*values, strict=True))
            codes.update(
                zip(new, self._store.batch_put_from(new, at, each), strict=True)
            )
        return [codes[key] for key in keys]


def _size_of(replicas: Sequence[Any]) -> int | None:
    for one in replicas:
        if one.is_memory_replica():
            return int(one.get_memory_descriptor().buffer_descriptor.size)
    return None


def _start(place: Place, staging: mmap.mmap) -> _Client | int:
    """Return a client that is connected, or why there is none.

    :raises ImportError: the wheel, or a library of its, is not installed
    """
    from mooncake.store import MooncakeDistributedStore

    try:
        # Else the wheel tries for a minute and a half.
        master = (place.host, place.port)
        with socket.create_connection(master, place.patience_s) as connected:
            own_address = connected.getsockname()[0]
    except OSError:
        return NO_ANSWER
    client = _Client(MooncakeDistributedStore(), staging)
    return client.set_up(place, own_address, len(staging)) or client


def _answer_all(client: _Client, answer: Callable[[int, Any], None]) -> None:
    def work(number: int, what: str, *asked: list[Any]) -> None:
        try:
            answer(number, client.calls[what](*asked))
        except Exception as exc:  # noqa: BLE001 - who has asked hears of it
            answer(number, f"{type(exc).__name__}: {exc}")

    for line in sys.stdin.buffer:
        question = msgspec.json.decode(line, type=Question)
        threading.Thread(target=work, args=question, daemon=True).start()


def main() -> None:
    """Answer until nobody asks any more."""
    # Also while it hangs somewhere: who has asked is gone.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    answers = os.dup(1)
    os.dup2(2, 1)  # the wheel prints
    writing = threading.Lock()

    def answer(number: int, codes: Sequence[int] | str) -> None:
        with writing, open(answers, "wb", closefd=False) as pipe:
            pipe.write(msgspec.json.encode((number, codes)) + b"\n")

    place = msgspec.json.decode(sys.argv[1], type=Place)
    try:
        client = _start(place, mmap.mmap(int(sys.argv[2]), place.staging_nbytes))
    except ImportError as exc:
        answer(0, str(exc))
        return
    if isinstance(client, int):
        answer(0, [client])
    else:
        answer(0, [0])
        _answer_all(client, answer)
    os._exit(0)  # it need not wait for what hangs


if __name__ == "__main__":
    main()
