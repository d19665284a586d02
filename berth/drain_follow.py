"""Following a drain to its end, however it is read."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from math import inf

from bus.clock import Clock
from bus.contracts.drains import DrainMoveState, DrainProgress, DrainState
from bus.faults import RequestRefused, RequestTimeout

LOOK_S = 0.25  # between two looks at a drain that is followed; a look that took long is repeated later
STUCK_S = 10.0  # everything left cannot move for this long: a service may just be restarted


async def follow(
    read: Callable[[], Awaitable[DrainProgress | None]],
    *,
    clock: Clock,
    timeout_s: float,
    on_progress: Callable[[DrainProgress], None] = lambda _: None,
) -> DrainProgress:
    """Look at a drain until it has ended, or nothing left of it can move, at most this long; its state at the last.
    read: the drain as it is; None: it is not on record.

    Raises RequestTimeout when no scheduler answered before the time ran out, or RequestRefused (`drain.unknown`).
    """
    retry_until = clock.monotonic() + timeout_s
    stuck_s, stuck_at, moved, refused = 0.0, inf, 0, set[str]()
    while True:
        asked_at = clock.monotonic()
        try:
            seen = await read()
        except RequestTimeout:
            if clock.monotonic() >= retry_until:
                raise
            continue
        if seen is None:  # the schedulers' database was set back
            raise RequestRefused("the drain is on record no more", code="drain.unknown")
        on_progress(seen)
        now, refused = clock.monotonic(), refused.union(one.instance_uuid for one in seen.failed)
        moved, moved_before = seen.counts.get(DrainMoveState.MOVED, 0), moved
        if moved > moved_before or not is_stuck(seen, refused):
            stuck_s, stuck_at = 0.0, inf
        elif seen.under_way:  # one more try: its time does not count, and nothing begins anew
            stuck_at = inf
        else:
            stuck_s, stuck_at = stuck_s + max(0.0, now - stuck_at), now
        if seen.state is DrainState.ENDED or now >= retry_until or stuck_s >= STUCK_S:
            return seen
        await clock.sleep(max(LOOK_S, 5 * (now - asked_at)))


def is_stuck(seen: DrainProgress, refused: Collection[str] = ()) -> bool:
    """Whether nothing that is left can move now: everything was refused three times, or has a reason that stays.

    refused: instances that could not move before: another move of one is one more try.
    """
    left = bool(seen.failed or seen.under_way) and seen.state is DrainState.RUNNING
    return left and not (seen.not_started or seen.more or set(seen.under_way).difference(refused))
