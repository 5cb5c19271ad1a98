from __future__ import annotations

import asyncio
import threading

from asynckv.testing.blocked import until
from harness.simulation.machines import Machines, open_machines
from harness.simulation.nodes import Process


def test_a_thread_of_a_node_runs_and_tells_its_loop(machines: Machines) -> None:
    seen = list[str]()

    async def main(process: Process) -> None:
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        set_done = future.set_result
        thread = threading.Thread(
            target=lambda: loop.call_soon_threadsafe(set_done, "told")
        )
        thread.start()
        seen.append(await future)

    machines.add("one").start(main)
    assert machines.world.run(lambda: bool(seen), deadline=10)
    assert seen == ["told"]


def test_a_condition_wakes_and_its_timeouts_are_virtual(machines: Machines) -> None:
    seen = list[object]()

    async def main(process: Process) -> None:
        changed = threading.Condition()

        def work() -> None:
            with changed:
                seen.append(changed.wait(30))
                seen.append(changed.wait(30))

        threading.Thread(target=work).start()
        await asyncio.sleep(10)
        with changed:
            changed.notify()

    machines.add("one").start(main)
    assert machines.world.run(lambda: len(seen) == 2, deadline=100)
    assert seen == [True, False]
    assert 39 < machines.world.now < 42


def test_the_loop_waits_for_a_lock_until_its_thread_lets_go(machines: Machines) -> None:
    seen = list[str]()

    async def main(process: Process) -> None:
        lock, inner = threading.Lock(), threading.Condition()

        def work() -> None:
            with lock:
                seen.append("taken")
            with inner:
                inner.wait()

        threading.Thread(target=work).start()
        await until(lambda: bool(seen))
        with lock:
            seen.append("taken by the loop")

    machines.add("one").start(main)
    assert machines.world.run(lambda: len(seen) == 2, deadline=100)


def test_threads_that_wait_for_ever_end_with_the_run() -> None:
    before = threading.active_count()
    with open_machines(seed=1) as machines:

        async def main(process: Process) -> None:
            changed = threading.Condition()

            def work() -> None:
                with changed:
                    changed.wait()

            threading.Thread(target=work).start()

        machines.add("one").start(main)
        machines.world.run(lambda: False, deadline=10)
        assert threading.active_count() == before + 1
    assert threading.active_count() == before


def test_what_a_thread_raises_is_a_fault_of_its_process(machines: Machines) -> None:
    async def main(process: Process) -> None:
        threading.Thread(target=lambda: int("x"), name="worker").start()

    machines.add("one").start(main)
    machines.world.run(lambda: False, deadline=10)
    (fault,) = machines.faults()
    assert fault.startswith("one: thread worker: ValueError")
