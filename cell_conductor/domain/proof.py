"""What a record proves of a machine that a host runs: only what is proved to be over is destroyed."""

from __future__ import annotations

from typing import Protocol

from bus.contracts.cell import UNKNOWN_ATTEMPT

from .instance import State

# A client has asked for the delete, and nothing takes that back: no attempt is wanted, whatever its number.
DELETE_ASKED = frozenset({State.TOMBSTONE, State.ABANDONING, State.DELETING, State.RELEASING, State.DELETED})
# The current attempt is wanted on its host.
WANTED = frozenset({State.BUILDING, State.ACTIVE})


class OnRecord(Protocol):
    """As much of a record as the proof reads."""

    @property
    def state(self) -> State:
        """Where the instance stands."""

    @property
    def host_uuid(self) -> str | None:
        """The current attempt's host."""

    @property
    def attempt(self) -> int:
        """The current attempt."""


def is_over(record: OnRecord, attempt: int, host_uuid: str) -> bool:
    """Whether the record proves that this attempt, run by this host, is not wanted any more.

    An attempt above the record's, or the record's own attempt on another host, was commanded by a record that this
    database does not have (it was restored from a backup): that proves nothing, and the machine is kept.
    """
    if record.state is State.ABSENT or attempt == UNKNOWN_ATTEMPT:
        return False
    if record.state in DELETE_ASKED:
        return True
    if attempt == record.attempt:
        return host_uuid == record.host_uuid and record.state not in WANTED
    return attempt < record.attempt
