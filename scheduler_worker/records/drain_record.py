"""Drains as they are recorded, and the requests of a level that move instances away. Pure."""

from __future__ import annotations

from msgspec import Struct

from bus.contracts.actions import ActionState
from scheduler_worker.records.action_record import ActionContext

HOST_FENCED, SERVICE_DOWN = "host.fenced", "service.down"  # why nothing can be moved away from a host
_WHY = {
    HOST_FENCED: "{} is fenced: its instances are evacuated, not moved",
    SERVICE_DOWN: "the compute service of {} is down: fence the host and evacuate, or wait for it",
}


class DrainedHost(Struct, frozen=True):
    """A host that is emptied, or is to be."""

    uuid: str
    name: str
    code: str = ""  # why nothing can be moved away from it now; "": it can
    drain: str = ""  # what its requests have on record as theirs

    @property
    def reason(self) -> str:
        """The code in words."""
        return _WHY[self.code].format(self.name)


class BegunMoves(Struct, frozen=True):
    """The requests of a level on record: how many are under way, and when the newest was made."""

    under_way: int = 0
    last_at: float = 0.0


class EndedRequest(Struct, frozen=True, kw_only=True):
    """A request that has ended."""

    request_id: str
    instance_uuid: str
    state: ActionState
    code: str = ""
    reason: str = ""
    drain: str | None = None  # the drain or fence that made it (None: a client)
    updated_at: float = 0.0  # when it ended


class InstanceOnHost(Struct, frozen=True, kw_only=True):
    """An instance, and a host that holds something of it."""

    instance_uuid: str
    project_id: str
    source: DrainedHost
    # code, reason: why it cannot be moved away now; "": it is active there
    code: str = ""
    reason: str = ""
    known: ActionContext = ActionContext()  # what is on record of it
