"""An asyncio loop whose time jumps to the next timer, and processes in it, killed and paused at any await."""

from __future__ import annotations

import asyncio
import signal
import traceback
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from heapq import heapify, heappop, heappush
from types import FrameType
from typing import Any

# The longest turn of an honest run takes 0.2 s of CPU, most of it the garbage collector's.
MAX_TURN_CPU_S = 10.0
MAX_FRAMES = 6  # of the stack, the innermost


class EndlessTurn(Exception):
    """One turn of the loop took more than its limit of CPU time. The text names the process and the place."""


class _Interrupted(BaseException):
    """Raised wherever the endless turn is, so that it ends; not an Exception, which a retry would take for a fault."""


# Code that goes round without giving the event loop away. Virtual time stands still meanwhile, so only CPU time
# shows it. The limit is far above what any turn takes, so that a slower machine fails no seed.
class TurnLimit:
    """Interrupts a turn that takes longer than a limit of CPU time, and remembers where it was.

    Every max_cpu_s of CPU time the number of the turn is compared with that of the last time: a turn is interrupted
    after one to two times the limit. A turn costs nothing.
    """

    def __init__(self, turn: Callable[[], int], process: Callable[[], str], *, max_cpu_s: float) -> None:
        self._turn = turn
        self._process = process
        self._max_cpu_s = max_cpu_s
        self._last = -1
        self._found = ""

    def check(self) -> None:
        """Called by the loop between two turns. Raises EndlessTurn when the one before was interrupted."""
        if self._found:
            found, self._found = self._found, ""
            raise EndlessTurn(found)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """For as long as the block runs. Only in the main thread: it is where Python handles signals."""
        handled = signal.signal(signal.SIGPROF, self._on_time)
        signal.setitimer(signal.ITIMER_PROF, self._max_cpu_s, self._max_cpu_s)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0.0)
            signal.signal(signal.SIGPROF, handled)

    def _on_time(self, _number: int, frame: FrameType | None) -> None:
        turn = self._turn()
        if turn != self._last:
            self._last = turn
            return
        if not self._found:  # else an endless turn goes on after it was interrupted: its first place is the one to know
            self._found = f"{self._process()}: a turn took more than {self._max_cpu_s:g} s of CPU: {_place(frame)}"
        raise _Interrupted


def _place(frame: FrameType | None) -> str:
    """`file:line function` of the innermost frames, the innermost first."""
    stack = reversed(traceback.extract_stack(frame)[-MAX_FRAMES:])
    return " < ".join(f"{one.filename}:{one.lineno} {one.name}" for one in stack)


EPOCH = 1_800_000_000.0  # virtual time 0 on the wall


class SimClock:
    """A process's clock: virtual time, with its own error on the wall."""

    def __init__(self, skew_s: float = 0.0) -> None:
        self.skew_s = skew_s

    def time(self) -> float:
        """Seconds since the epoch, by this process's clock."""
        return EPOCH + asyncio.get_running_loop().time() + self.skew_s

    def monotonic(self) -> float:
        """Virtual seconds."""
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        """Wait in virtual time."""
        await asyncio.sleep(seconds)


# So many turns within so little virtual time (an honest run makes some 2,500 in its busiest second): something spins.
MAX_TURNS_AT_ONCE = 200_000
AT_ONCE_S = 1.0
# Tasks that a killed process left are unwound after the run, for at most this long (virtual).
UNWIND_S = 120.0
UNWIND_TRIES = 3
# asyncio's own: the longest wait of a turn; of more timers than these the cancelled ones go when they are such a share.
MAX_WAIT_S = 24 * 3600
MIN_SCHEDULED = 100
MIN_CANCELLED = 0.5


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
        self._held: deque[_Step | _Timer] = deque()
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
        loop.put(held)

    def hold(self, step: _Step | _Timer) -> None:
        """Keep a step for later."""
        self._held.append(step)


PROCESS: ContextVar[Process | None] = ContextVar("process", default=None)


NO_CONTEXT = copy_context()


class _Step:
    """One callback of one process, run only while its process does. It is the handle of `call_soon` too."""

    __slots__ = ("args", "callback", "context", "gone", "process")

    def __init__(self, callback: Any, args: tuple[Any, ...], context: Context, process: Process | None) -> None:
        self.callback = callback
        self.args = args
        self.context = context
        self.process = process
        self.gone = False

    def cancel(self) -> None:
        """As asyncio.Handle."""
        self.gone = True
        self.callback, self.args = None, ()

    def cancelled(self) -> bool:
        """As asyncio.Handle."""
        return self.gone


class _Timer(float):
    """A step at a time, which is its value: the heap compares numbers, and no method of Python's."""

    __slots__ = ("args", "callback", "context", "gone", "loop", "process", "scheduled")

    args: tuple[Any, ...]
    callback: Any
    context: Context
    gone: bool
    loop: VirtualLoop
    process: Process | None
    scheduled: bool

    def __bool__(self) -> bool:
        return True

    def cancel(self) -> None:
        """As asyncio.TimerHandle."""
        if not self.gone and self.scheduled:
            self.loop.cancelled_timers += 1
        self.gone = True
        self.callback, self.args = None, ()

    def cancelled(self) -> bool:
        """As asyncio.TimerHandle."""
        return self.gone

    def when(self) -> float:
        """As asyncio.TimerHandle."""
        return float(self)


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop on virtual time. Sockets and threads do not exist in it.

    A turn, and the order of what is due at one time, are asyncio's to the letter. They are written anew because they
    take a third of a run: nothing is readable, nothing is debugged, and each callback has a process.
    """

    _ready: deque[_Step | _Timer]
    _scheduled: list[_Timer]
    _stopping: bool
    _closed: bool
    _clock_resolution: float

    def __init__(self, *, max_turn_cpu_s: float = MAX_TURN_CPU_S) -> None:
        self.now = 0.0
        self.turns = 0
        self.limit = TurnLimit(lambda: self.turns, _acting_process, max_cpu_s=max_turn_cpu_s)
        self.processes: list[Process] = []
        # asyncio knows its tasks only weakly: one of a dead process would be collected, and run its `finally` then.
        self._alive: dict[asyncio.Task[Any], None] = {}
        self._turns_now, self._since = 0, 0.0
        self.cancelled_timers = 0  # of those that are scheduled
        super().__init__()

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

    def _run_once(self) -> None:
        """One turn: instead of waiting for a timer, time moves to it."""
        self._remove_cancelled()
        ready, scheduled = self._ready, self._scheduled
        if ready or self._stopping:
            self.advance(0.0)
        else:
            self.advance(min(max(0.0, scheduled[0] - self.now), MAX_WAIT_S) if scheduled else None)
        end = self.now + self._clock_resolution
        while scheduled and scheduled[0] < end:
            timer = heappop(scheduled)
            timer.scheduled = False
            ready.append(timer)
        for _ in range(len(ready)):  # those that these add have the next turn
            step = ready.popleft()
            if step.gone:
                continue
            process = step.process
            if process is not None and (process.dead or process.paused):
                process.hold(step)
                continue
            try:
                step.context.run(step.callback, *step.args)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:  # asyncio's handles do the same
                self.call_exception_handler({"message": f"Exception in callback {step.callback!r}", "exception": error})

    def _remove_cancelled(self) -> None:
        """Timers that were cancelled: the first ones, or all when they are many."""
        scheduled = self._scheduled
        if len(scheduled) > MIN_SCHEDULED and self.cancelled_timers / len(scheduled) > MIN_CANCELLED:
            for timer in scheduled:
                timer.scheduled = not timer.gone
            self._scheduled = [timer for timer in scheduled if timer.scheduled]
            heapify(self._scheduled)
            self.cancelled_timers = 0
        while self._scheduled and self._scheduled[0].gone:
            self.cancelled_timers -= 1
            heappop(self._scheduled).scheduled = False

    def put(self, steps: Iterable[_Step | _Timer]) -> None:
        """Run steps that were held back, unless they are cancelled."""
        self._ready.extend(steps)

    def call_soon(  # type: ignore[override]
        self, callback: Any, *args: Any, context: Context | None = None
    ) -> _Step:
        """As ever, but a step of a process that is dead or paused does not run."""
        if self._closed:
            raise RuntimeError("Event loop is closed")
        if context is None:
            step = _Step(callback, args, copy_context(), PROCESS.get())
        else:
            step = _Step(callback, args, context, context.get(PROCESS))
        self._ready.append(step)
        return step

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Any, *args: Any, context: Context | None = None
    ) -> _Step:
        """Asynchronous generators end by way of this."""
        step = _Step(callback, args, copy_context() if context is None else context, None)
        self._ready.append(step)
        return step

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Any, *args: Any, context: Context | None = None
    ) -> _Timer:
        """As ever, but a step of a process that is dead or paused does not run."""
        return self.call_at(self.now + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: Context | None = None
    ) -> _Timer:
        """As ever, but a step of a process that is dead or paused does not run."""
        if self._closed:
            raise RuntimeError("Event loop is closed")
        timer = _Timer(when)
        timer.callback, timer.args, timer.loop, timer.gone, timer.scheduled = callback, args, self, False, True
        if context is None:
            timer.context, timer.process = copy_context(), PROCESS.get()
        else:
            timer.context, timer.process = context, context.get(PROCESS)
        heappush(self._scheduled, timer)
        return timer


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
