"""The same of what waits for an operator's decision: dead letters, quarantine, breakers, recoveries."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta as Bound
from msgspec import Struct

from bus.contracts.base import Count, Label, Reason, Uuid, Version, Word
from bus.contracts.operations import Losses

# Of one request: their JSON is within the bound of a body.
MAX_DECIDED = 1_000
MAX_BREAKERS = 1_000


class DeadLetterCount(Struct, frozen=True):
    """How many dead letters a queue of a bus has."""

    bus: str
    queue: str
    dead: int


class DeadLetterView(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A dead letter. died_at, sent_at: seconds since the epoch. body: for operators; may hold secrets.
    truncated_from_bytes: the size of the message's body, where the dead letter has only the first bytes. blocks_replay:
    the code for which it is never sent back.
    """

    bus: str
    queue: str
    id: str
    code: str
    reason: str
    type: str
    routing_key: str
    cause: str
    died_at: float | None = None
    sent_at: float | None = None
    body: str = ""
    truncated_from_bytes: int = 0
    blocks_replay: str = ""


class ReplayBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which dead letters go back to their queue. ids: null: all. old: also those whose delete may be forgotten by
    now.
    """

    ids: Annotated[tuple[Label, ...], Bound(min_length=1, max_length=1000)] | None = None
    old: bool = False


class DeadLettersReplayed(Struct, frozen=True):
    """The ids that were sent back, those that are too old and stayed, and those that are never sent back, each with the
    code for it. fault: why those behind the last one that was sent were not looked at; "": they were.
    """

    replayed: tuple[str, ...]
    too_old: tuple[str, ...]
    blocked: dict[str, str]
    fault: str = ""


class DeadLettersPurged(Struct, frozen=True):
    """How many letters were thrown away."""

    purged: int


class QuarantinedMachine(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A machine with this database's tag (kind `quarantined`), or another's (`foreign`: it is never touched), that its
    cell's record does not have. reason: in what they differ.

    first_seen, last_seen, decided_at: seconds since the epoch. decision: an operator's, "" until there is one.
    """

    cell: str
    host_uuid: str
    instance_uuid: str
    attempt: int
    service: str
    kind: str
    reason: str
    first_seen: float
    last_seen: float
    decision: str = ""
    decided_by: str = ""
    decided_at: float = 0.0


class QuarantinePage(Struct, frozen=True):
    """Machines in quarantine, by cell, host and instance. count: how many match. next: the `after` of the next page;
    null: there is none. never_started: cells without a record on this database.
    """

    machines: tuple[QuarantinedMachine, ...]
    count: int
    next: str | None = None
    never_started: tuple[str, ...] = ()


class BreakerView(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The breaker of one compute service: the reason of its trip, and whether an operator has reset it since.

    lost, quarantined, over: how many machines were. machines: "INSTANCE@HOST", at most 10,000; of one that is
    shown alone.
    """

    cell: str
    service: str
    open: bool
    tripped_at: float
    lost: int
    quarantined: int
    over: int
    reset_at: float = 0.0
    reset_by: str = ""
    machines: tuple[str, ...] = ()


class SeenMachine(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A machine as it was seen: a decision is for this attempt on this host alone."""

    cell: Word
    host_uuid: Uuid
    instance_uuid: Uuid
    attempt: Count

    @property
    def place(self) -> tuple[str, str]:
        """Where it is."""
        return self.host_uuid, self.instance_uuid


class SeenBreaker(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A breaker as it was seen: one that has tripped again since names other machines."""

    cell: Word
    service: Word
    tripped_at: float

    @property
    def tripped(self) -> tuple[str, str, float]:
        """Which it is."""
        return self.cell, self.service, self.tripped_at


class QuarantineDecision(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What becomes of machines in quarantine: `destroy` by their hosts, `protect` as they are, `adopt` by their
    instances (then with a reason, which the log of changes has).
    """

    decision: Literal["destroy", "protect", "adopt"]
    machines: Annotated[tuple[SeenMachine, ...], Bound(min_length=1, max_length=MAX_DECIDED)]
    reason: Reason = ""


class Undecided(Struct, frozen=True):
    """A machine about which nothing was decided, and the reason."""

    host_uuid: str
    instance_uuid: str
    code: str
    reason: str


class QuarantineDecided(Struct, frozen=True):
    """The instances whose machines were decided about, and what was left as it is."""

    decided: tuple[str, ...]
    undecided: tuple[Undecided, ...]


class BreakersReset(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Breakers to reset."""

    breakers: Annotated[tuple[SeenBreaker, ...], Bound(min_length=1, max_length=MAX_BREAKERS)]


class BreakersAfterReset(Struct, frozen=True):
    """The breakers that were reset, those that are not open, or have tripped at another time, and those whose cell has
    not answered.
    """

    reset: tuple[SeenBreaker, ...]
    not_open: tuple[SeenBreaker, ...]
    no_answer: tuple[SeenBreaker, ...] = ()


class Recovery(Struct, frozen=True):
    """Of one cell. state: open, recovering or accepted. losses: that it waits for, or that were accepted. absent: the
    compute services that have not listed what they have; whether an operator has stated that they have nothing.
    """

    cell: str
    state: str
    database_incarnation: int
    losses: Losses
    absent: dict[str, bool] = {}

    @property
    def is_waiting(self) -> bool:
        """Whether it goes no further without an operator."""
        return self.state == "recovering" and self.losses.count > 0


class WithoutService(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A decommissioned compute service that has no machine: what waits for its hosts goes on without them."""

    service: Word
    reason: Reason = ""


class LossesAccepted(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The recovery of a cell as it was seen: what it would lose is accepted if it is still this."""

    database_incarnation: Version
    losses: Annotated[int, Bound(ge=1)]
    reason: Reason = ""
