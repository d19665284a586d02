"""The stages of one boot, from its last event."""

from __future__ import annotations

from bus.contracts.build import BuildEvent
from bus.contracts.stages import durations


def stages_of(event: BuildEvent, *, since: float | None = None, until: float | None = None) -> dict[str, float]:
    """Seconds in each stage of `record.STAGES` that the event has; a stage without a stamp is absent.

    since, until: when the client meant to publish and when it received the event, both by its own wall clock. Given
    both, the stages add up to the latency between them whatever the clocks of other machines show. Left out: from when
    the broker was given the request (`queued`), and to when the scheduler passed the end on (`announced`).
    """
    return {} if event.stamps is None else durations(event.stamps, since=since, until=until)


def conflicts_of(event: BuildEvent) -> int | None:
    """Claims that this boot lost to others before one held; None when the event does not contain it."""
    return None if event.stamps is None else event.stamps.lost_claims
