"""An asyncio loop whose time jumps to the next timer, and processes in it, killed and paused at any await."""

from __future__ import annotations

import asyncio
import heapq
import selectors
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import Any

from berth.sim.turn_limit import MAX_TURN_CPU_S, TurnLimit

# So many turns within so little virtual time (an honest run makes some 2,500 in its busiest second): something spins.
MAX_TURNS_AT_ONCE = 200_000
AT_ONCE_S = 1.0
# Tasks that a killed process left are unwound after the run, for at most this long (virtual).
UNWIND_S = 120.0
UNWIND_TRIES = 3


class Deadlock(Exception):
    """All tasks wait and no timer is set: nothing will ever happen again."""


class Livelock(Exception):
    """Turn after turn, and time moves hardly or not at all."""


class Process:
    """One simulated operating-system process: the tasks that run in its context.

    dead: none of its steps runs any more, not even a `finally`, as after SIGKILL. paused: they wait, as after SIGSTOP.
    Steps of the dead are kept too: dropped, their tasks could never be unwound when the run is over.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.dead = False
        self.paused = False
        self.context: Context = copy_context()
        self.context.run(PROCESS.set, self)
        self._held: deque[_Step] = deque()
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        loop.processes.append(self)

    def spawn(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """A task of this process."""
        return asyncio.get_running_loop().create_task(work, name=name, context=self.context)

    def resume(self) -> None:
        """Go on where it stopped, in the same order."""
        self.paused = False
        if not self.dead:
            loop = asyncio.get_running_loop()
            assert isinstance(loop, VirtualLoop)
            self.unwind(loop)

    def unwind(self, loop: VirtualLoop) -> None:
        """Let every step run that was held back."""
        held, self._held = self._held, deque()
        for step in held:
            loop.call_again(step)

    def hold(self, step: _Step) -> None:
        """Keep a step for later."""
        self._held.append(step)


PROCESS: ContextVar[Process | None] = ContextVar("process", default=None)


NO_CONTEXT = copy_context()


class _Step(asyncio.Handle):
    """One callback of one process, run only while its process does."""

    __slots__ = ()
    process: Process
    _callback: Callable[..., object]
    _context: Context

    def _run(self) -> None:
        if self.process.dead or self.process.paused:
            self.process.hold(self)
        else:
            asyncio.Handle._run(self)

    def again(self) -> None:
        """After a pause, in its context: unless it was cancelled meanwhile."""
        if self._cancelled:
            return
        if self.process.dead or self.process.paused:
            self.process.hold(self)
        else:
            self._callback(*self._args)


class _SoonStep(_Step):
    """A step of the next turn."""

    __slots__ = ("process",)


class _TimedStep(_Step, asyncio.TimerHandle):
    """A step at its time."""

    __slots__ = ("process",)
    _when: float
    _scheduled: bool

    def __lt__(self, other: Any) -> bool:
        """As ever, without a look at the other's type: a turn compares eight timers."""
        due: float = other._when
        return self._when < due


class _Jump(selectors.DefaultSelector):
    """Instead of waiting for a timer, time moves to it."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[Any]:
        """Nothing ever becomes readable here: there are no sockets."""
        self.loop.advance(timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop on virtual time. Sockets and threads do not exist in it.

    Steps go into asyncio's own queues as asyncio's own would, in the same order; only the calls between are left out,
    which took a tenth of a run.
    """

    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]
    _check_closed: Callable[[], None]

    def __init__(self, *, max_turn_cpu_s: float = MAX_TURN_CPU_S) -> None:
        self.now = 0.0
        self.turns = 0
        self.limit = TurnLimit(lambda: self.turns, _acting_process, max_cpu_s=max_turn_cpu_s)
        self.processes: list[Process] = []
        # asyncio knows its tasks only weakly: one of a dead process would be collected, and run its `finally` then.
        self._alive: dict[asyncio.Task[Any], None] = {}
        self._turns_now, self._since = 0, 0.0
        jump = _Jump()
        jump.loop = self
        super().__init__(jump)

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self.now

    @property
    def tasks(self) -> list[asyncio.Task[Any]]:
        """Every task that has not ended, oldest first."""
        return list(self._alive)

    def yield_to_loop(self) -> None:
        """The tasks that spun at this moment are over."""
        self._turns_now = 0

    def create_task(self, *arguments: Any, **named: Any) -> asyncio.Task[Any]:
        """As ever; and it is remembered until it ends."""
        task = super().create_task(*arguments, **named)
        self._alive[task] = None
        task.add_done_callback(self._discard_task, context=NO_CONTEXT)
        return task

    def _discard_task(self, task: asyncio.Task[Any]) -> None:
        self._alive.pop(task, None)

    def advance(self, timeout: float | None) -> None:
        """Called once a turn with how long the next timer is away."""
        self.turns += 1
        self.limit.check()
        if timeout is None:
            raise Deadlock(f"at {self.now:.3f} s all tasks wait and no timer is set")
        self.now += timeout
        if self.now - self._since >= AT_ONCE_S:
            self._turns_now, self._since = 0, self.now
        self._turns_now += 1
        if self._turns_now > MAX_TURNS_AT_ONCE:
            raise Livelock(f"{MAX_TURNS_AT_ONCE} turns from {self._since:.3f} s to {self.now:.3f} s")

    def call_soon(  # type: ignore[override]
        self, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """As ever, but a step of a process that is dead or paused does not run."""
        if context is None:
            context = copy_context()
        process = context.get(PROCESS)
        if process is None:
            return super().call_soon(callback, *args, context=context)
        self._check_closed()
        step = _SoonStep(callback, args, self, context)
        step.process = process
        self._ready.append(step)
        return step

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """As ever."""
        return self.call_at(self.now + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """As ever, but a step of a process that is dead or paused does not run."""
        if context is None:
            context = copy_context()
        process = context.get(PROCESS)
        if process is None:
            return super().call_at(when, callback, *args, context=context)
        self._check_closed()
        step = _TimedStep(when, callback, args, self, context)
        step.process = process
        heapq.heappush(self._scheduled, step)
        step._scheduled = True
        return step

    def call_again(self, step: _Step) -> None:
        """Run a step that was held back."""
        super().call_soon(step.again, context=step._context)


def run(
    main: Callable[[], Coroutine[Any, Any, None]],
    *,
    on_unseen: Callable[[str], None],
    max_turn_cpu_s: float = MAX_TURN_CPU_S,
) -> VirtualLoop:
    """Run to the end on a fresh virtual loop; what killed processes left is unwound afterwards, without effect.

    max_turn_cpu_s: CPU seconds; a turn that takes more is interrupted, and EndlessTurn is raised.
    """
    loop = VirtualLoop(max_turn_cpu_s=max_turn_cpu_s)
    loop.set_exception_handler(lambda _, context: on_unseen(_unseen(context)))
    with loop.limit.applied():
        try:
            loop.run_until_complete(main())
        finally:
            try:
                _unwind(loop)
            finally:
                loop.close()
    return loop


def _acting_process() -> str:
    process = PROCESS.get()
    return process.name if process is not None else "the simulation itself"


def _unseen(context: dict[str, Any]) -> str:
    return f"{context.get('message')}: {context.get('exception')!r}"


def _unwind(loop: VirtualLoop) -> None:
    """Let every task end, the dead ones' too: a coroutine that is thrown away would run its `finally` at any time."""
    loop.set_exception_handler(lambda *_: None)
    loop.yield_to_loop()
    for process in loop.processes:
        process.dead = process.paused = False
        process.unwind(loop)
    # A task may need a second word: its `finally` waits for something that is gone, or starts another task.
    for _ in range(UNWIND_TRIES):
        tasks = loop.tasks
        if not tasks:
            return
        for task in tasks:
            task.cancel()
        done = asyncio.gather(*tasks, return_exceptions=True)
        done.add_done_callback(lambda _: loop.stop())
        giving_up = loop.call_at(loop.time() + UNWIND_S, loop.stop)
        loop.run_forever()
        giving_up.cancel()
