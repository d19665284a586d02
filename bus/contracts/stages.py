"""The stages of one build, and when each of them ended: carried along in the messages, from the request to its end.

Every stamp is the wall clock of the process that wrote it. Clocks of two computers differ, so a stage that ends on
another computer than it began may seem to end before; `durations` never lets it take less than nothing.
"""

from __future__ import annotations

from msgspec import Struct

# In the order of a build's life. StageTimes has a field for each.
STAGES = ("queued", "decided", "claimed", "dispatched", "built", "announced")


class StageTimes(Struct, frozen=True, array_like=True):
    """When each stage of a build ended, in seconds since the epoch (0: it never came to that, or is not known)."""

    requested: float = 0.0  # the client published it
    queued: float = 0.0  # a scheduler took the delivery that settled it
    decided: float = 0.0  # a host was chosen (or none was found)
    claimed: float = 0.0  # placement gave the claim, lost claims and the choices after them included
    dispatched: float = 0.0  # the compute service of the first host took the command
    built: float = 0.0  # a host reported how its attempt ended, the last if there were several
    announced: float = 0.0  # the scheduler passed that on; its reader knows when it arrived
    lost_claims: int = 0  # how many claims others won before one was given; part of `claimed`


def durations(stage_times: StageTimes, *, since: float | None = None, until: float | None = None) -> dict[str, float]:
    """Seconds in each stage, in order, which add up to `until - since`. since, until: the reader's own times instead of
    the first and the last stamp. A stage without a stamp is left out: its time is in the next one. None is negative or
    ends after `until`.
    """
    ends = (
        stage_times.queued,
        stage_times.decided,
        stage_times.claimed,
        stage_times.dispatched,
        stage_times.built,
        stage_times.announced if until is None else until,
    )
    last = since if since is not None else stage_times.requested or next((end for end in ends if end), 0.0)
    spent: dict[str, float] = {}
    for stage, stamp in zip(STAGES, ends, strict=True):
        if stamp:
            end = max(last, stamp if until is None else min(stamp, until))
            spent[stage] = end - last
            last = end
    return spent
