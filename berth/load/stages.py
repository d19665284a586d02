"""What one boot's last event says of where its time went. (Whoever adds timestamps to events fills this in.)"""

from __future__ import annotations

from bus.contracts.build import BuildEvent


def stages_of(event: BuildEvent) -> dict[str, float]:
    """Seconds in each stage of `record.STAGES` that the event tells of; stages it does not tell of are absent.

    `queued` may lack the time before the broker confirmed, `announced` is completed by the load generator (it alone
    knows when it heard): leave it out.
    """
    return {}


def conflicts_of(event: BuildEvent) -> int | None:
    """Claims that this boot lost to others before one held; None when the event does not tell."""
    return None
