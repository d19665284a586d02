"""The virtual loop: time jumps, deadlocks are raised, processes are killed and paused at their awaits."""

from __future__ import annotations

import asyncio
import random
import selectors
from typing import Any
from unittest.mock import patch

import pytest
from msgspec.structs import replace

from bus.yielding import yield_to_loop
from lab.simulation.draw import plan_of
from lab.simulation.event_log import EventLog
from lab.simulation.loop import PROCESS, Deadlock, EndlessTurn, Livelock, Process, VirtualLoop, run
from lab.simulation.world import World


def received(_: str) -> None:
    return None


class Jump(selectors.DefaultSelector):
    """Moves the time of asyncio's own loop, as the virtual loop moves its own."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        self.now += timeout or 0.0
        return []


def order_of_steps(loop: asyncio.AbstractEventLoop, seed: int) -> list[tuple[int, float]]:
    """Steps as they run: many at the same times, many cancelled, some of which the loop clears away at once."""
    rng, ran, handles = random.Random(seed), [], []

    def step(number: int) -> None:
        ran.append((number, loop.time()))
        for handle in rng.sample(handles[-200:], 2):
            handle.cancel()
        if number < 2000:
            for _ in range(rng.randrange(5)):
                begin(number + 100 + rng.randrange(1000))

    def begin(number: int) -> None:
        if rng.random() < 0.2:
            handles.append(loop.call_soon(step, number))
        else:
            handles.append(loop.call_later(rng.choice((0.0, 0.1, 0.1 + 1e-10, 0.3, 1.0)), step, number))

    async def main() -> None:
        for number in range(300):
            begin(number)
        for handle in rng.sample(handles, 200):
            handle.cancel()
        await asyncio.sleep(100.0)

    loop.run_until_complete(main())
    loop.close()
    return ran


@pytest.mark.parametrize("seed", range(5))
def test_steps_have_the_order_and_the_times_of_asyncios_own_loop(seed: int) -> None:
    jump = Jump()
    own = asyncio.SelectorEventLoop(jump)
    own.time = lambda: jump.now  # type: ignore[method-assign]
    ran = order_of_steps(own, seed)
    assert len(ran) > 300
    assert order_of_steps(VirtualLoop(), seed) == ran


def test_a_deadlock_is_raised() -> None:
    async def main() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(Deadlock):
        run(main, on_unseen=received)


@pytest.mark.parametrize("turn_s", [0, 1e-9], ids=["who spins", "time that moves by next to nothing"])
def test_a_loop_that_does_not_get_on_is_found_out(turn_s: float) -> None:
    async def main() -> None:
        while asyncio.get_running_loop().time() < 1.0:  # noqa: ASYNC110  (spinning is the point)
            await asyncio.sleep(turn_s)

    with pytest.raises(Livelock):
        run(main, on_unseen=received)


def test_a_turn_that_never_ends_is_interrupted_and_its_process_and_place_are_named() -> None:
    """Seed 80014: a relay that drained went round without giving the loop away, and the simulation hung for ever."""

    async def goes_round() -> None:
        while True:
            try:
                while True:
                    pass
            except BaseException:  # no retry of the process's own hides it
                await asyncio.sleep(0)

    async def main() -> None:
        process = Process("relay of cell0")
        process.spawn(goes_round(), "relay")
        await asyncio.sleep(1.0)

    with pytest.raises(EndlessTurn, match=r"^relay of cell0: a turn took more than 0\.1 s of CPU: .* goes_round < "):
        run(main, on_unseen=received, max_turn_cpu_s=0.1)


def test_a_killed_process_runs_no_line_more_not_even_finally() -> None:
    seen: list[str] = []
    when_killed: list[list[str]] = []

    async def work() -> None:
        try:
            for n in range(10):
                seen.append(f"{n}")
                await asyncio.sleep(1.0)
        finally:
            seen.append("finally")

    async def main() -> None:
        process = Process("one")
        process.spawn(work(), "work")
        await asyncio.sleep(2.5)
        process.dead = True
        await asyncio.sleep(10.0)
        when_killed.append(list(seen))

    run(main, on_unseen=received)
    assert when_killed == [["0", "1", "2"]]
    assert seen[-1] == "finally"  # unwound when the run is over, so that no coroutine is left to the collector


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_process_that_stops_in_the_middle_of_long_work_holds_up_no_other(is_killed: bool) -> None:
    """Real ones have an event loop each; here all share one, and its turns for long work."""
    went_on: list[str] = []

    async def work(name: str) -> None:
        for _ in range(5):
            await yield_to_loop()
            went_on.append(name)

    async def main() -> None:
        stopped, other = Process("stopped"), Process("other")
        for turns in range(4):
            stopped.dead = stopped.paused = False
            first = stopped.spawn(work("stopped"), "first"), stopped.spawn(work("stopped"), "second")
            done = other.spawn(work("other"), "other")
            for _ in range(turns):
                await asyncio.sleep(0)
            stopped.dead, stopped.paused = is_killed, not is_killed
            await asyncio.wait_for(done, 60.0)
            if not is_killed:
                stopped.resume()
                await asyncio.gather(*first)

    run(main, on_unseen=received)
    assert went_on.count("other") == 20
    assert is_killed or went_on.count("stopped") == 40


def test_what_a_task_starts_at_its_end_is_unwound_too() -> None:
    """A service that is killed while it starts begins its consumers as it unwinds."""
    seen: list[str] = []

    async def started_late() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            seen.append("finally")

    async def starting() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            asyncio.get_running_loop().create_task(started_late())
            await asyncio.sleep(0)

    async def main() -> None:
        Process("one").spawn(starting(), "starting")
        await asyncio.sleep(1.0)

    assert run(main, on_unseen=received).tasks == []
    assert seen == ["finally"]


def test_a_paused_process_goes_on_where_it_was_in_order() -> None:
    seen: list[tuple[float, str]] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()

        async def work(name: str, seconds: float) -> None:
            await asyncio.sleep(seconds)
            seen.append((loop.time(), name))

        process = Process("one")
        process.spawn(work("b", 2.0), "b")
        process.spawn(work("a", 1.0), "a")
        process.paused = True
        await asyncio.sleep(5.0)
        assert not seen
        process.resume()
        await asyncio.sleep(5.0)

    run(main, on_unseen=received)
    assert [name for _, name in seen] == ["a", "b"]
    assert all(at >= 5.0 for at, _ in seen)


def test_what_a_process_makes_when_it_is_built_dies_with_it() -> None:
    """A consumer's batches run in the context in which it was made: made elsewhere, they outlived a kill."""
    built: dict[str, Process | None] = {}

    async def main() -> None:
        world = World(replace(plan_of(1), metal=None), EventLog())
        build = world.wiring.build

        def noting(name: str, *arguments: Any) -> Any:
            built[name] = PROCESS.get()
            return build(name, *arguments)

        with patch.object(world.wiring, "build", noting):
            names = ["placement0", f"compute-{next(iter(world.fleets))}", "scheduler0"]
            lives = {name: world.start(name) for name in names}
        assert built == {name: life.process for name, life in lives.items()}
        for name in names:
            world.kill(name)

    run(main, on_unseen=received)
    assert built
