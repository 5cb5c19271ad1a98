from __future__ import annotations

import gc
import os
import socket
import threading

from harness.simulation.machines import open_machines


def test_what_was_replaced_is_put_back() -> None:
    names = (os.urandom, socket.socket, threading.Thread, threading.Condition)
    with open_machines(seed=1):
        assert (os.urandom, socket.socket) != names[:2]
    assert (os.urandom, socket.socket, threading.Thread, threading.Condition) == names
    assert gc.isenabled()
