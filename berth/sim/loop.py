"""An asyncio loop whose time jumps to the next timer, and processes in it, killed and paused at any await."""

from __future__ import annotations

import asyncio
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
            self.unwind(asyncio.get_running_loop())

    def unwind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let every step run that was held back."""
        held, self._held = self._held, deque()
        for step in held:
            loop.call_soon(step.again, context=step.context)

    def hold(self, step: _Step) -> None:
        """Keep a step for later."""
        self._held.append(step)


PROCESS: ContextVar[Process | None] = ContextVar("process", default=None)


NO_CONTEXT = copy_context()


class _Step:
    """One callback of one process, run only while its process does."""

    __slots__ = ("args", "callback", "context", "handle", "process")

    def __init__(self, process: Process, callback: Callable[..., object], args: Any, context: Context) -> None:
        self.process = process
        self.callback = callback
        self.args = args
        self.context = context
        self.handle: asyncio.Handle | None = None

    def __call__(self) -> None:
        process = self.process
        if process.dead or process.paused:
            process.hold(self)
            return
        self.callback(*self.args)

    def again(self) -> None:
        """After a pause: unless it was cancelled meanwhile."""
        if self.handle is None or not self.handle.cancelled():
            self()


class _Jump(selectors.DefaultSelector):
    """Instead of waiting for a timer, time moves to it."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[Any]:
        """Nothing ever becomes readable here: there are no sockets."""
        self.loop.advance(timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop on virtual time. Sockets and threads do not exist in it."""

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
        self.now += max(timeout, 0.0)
        if self.now - self._since >= AT_ONCE_S:
            self._turns_now, self._since = 0, self.now
        self._turns_now += 1
        if self._turns_now > MAX_TURNS_AT_ONCE:
            raise Livelock(f"{MAX_TURNS_AT_ONCE} turns from {self._since:.3f} s to {self.now:.3f} s")

    def call_soon(  # type: ignore[override]
        self, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """As ever, but a step of a process that is dead or paused does not run."""
        step = _step(callback, args, context)
        if step is None:
            return super().call_soon(callback, *args, context=context)
        step.handle = super().call_soon(step, context=step.context)
        return step.handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """As ever, but a step of a process that is dead or paused does not run."""
        step = _step(callback, args, context)
        if step is None:
            return super().call_at(when, callback, *args, context=context)
        handle = super().call_at(when, step, context=step.context)
        step.handle = handle
        return handle


def _step(callback: Any, args: Any, context: Context | None) -> _Step | None:
    if isinstance(callback, _Step) or getattr(callback, "__func__", None) is _Step.again:
        return None
    process = PROCESS.get() if context is None else context.get(PROCESS)
    if process is None:
        return None
    return _Step(process, callback, args, context if context is not None else copy_context())


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
