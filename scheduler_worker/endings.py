"""A request on its way through the claim rounds, and every way in which that ends."""

from __future__ import annotations

from msgspec import Struct

from bus.contracts.build import BuildRequest
from bus.contracts.cell import Selection
from bus.contracts.placement import ClaimOption
from bus.faults import Transient
from scheduler_worker.domain.ranking import Candidate, Choice
from scheduler_worker.domain.request_spec import RequestSpec
from scheduler_worker.domain.selector import NoValidHost

CONSUMER_CHANGED = "claim.consumer_changed"  # the allocation is somebody else's: never ours to release
ATTEMPT = 1  # the scheduler's claim is the first attempt; the conductor's are the next


class Away(Transient):
    """The resource book does not answer."""

    code = "placement.away"


class Placed(Struct, frozen=True, kw_only=True):
    """Claimed: the selected host (which is where the claim is), and the alternates."""

    cell: str
    selections: tuple[Selection, ...]
    consumer_generation: int
    passed: int
    score: float
    claims: int
    decided_at: float = 0.0  # the first choice
    claimed_at: float = 0.0
    lost: tuple[str, ...] = ()  # claims that came to nothing before, in order: "host: outcome"


class Stopped(Struct, frozen=True):
    """It must not be tried any further."""

    code: str
    reason: str


class Contended(Struct, frozen=True):
    """The bounds of this delivery are used up, though not every host was asked."""

    claims: int


class Stranded(Struct, frozen=True):
    """It is claimed, by an earlier run of ours, on a host for which no compute service speaks (any more)."""

    reason: str


Ending = Placed | NoValidHost | Stopped | Contended | Stranded | Away


class Asking(Struct, frozen=True, kw_only=True):
    """A request to place. `fresh`: this delivery put it on record, so no earlier run can have claimed for it."""

    request: BuildRequest
    spec: RequestSpec
    fresh: bool = True


class Work(Struct, kw_only=True):
    """One request on its way through the rounds. `tried`: hosts it may not use any more, and why.

    most_alternates: so many hosts may be named beside the selected one.
    """

    request: BuildRequest
    spec: RequestSpec
    fresh: bool
    tried: dict[str, str]
    most_alternates: int
    choice: Choice | None = None
    is_chosen: bool = False  # the choice is a new one, and assumed: claim it before choosing anything else
    again: Candidate | None = None  # ask for this host again: its shape had changed
    raced: int = 0
    claims: int = 0
    decided_at: float = 0.0
    lost: list[str] = []
    looked_twice: bool = False  # nothing fitted, and the newest changes were fetched before saying so
    partly: list[str] = []  # hosts of which only some children are known to be full
    chances: int = 0  # how often those were looked at again
    probe: ClaimOption | None = None  # asks whether an earlier run of ours holds a claim
    ending: Ending | None = None
