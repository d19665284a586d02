"""Fences of hosts, and the losses of a fenced host: machines that the record gave up without the host's answer. And the
hosts on which nothing is begun now: fenced ones, and those of a compute service that is down.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from bus.contracts.build import AttemptRecord
from bus.contracts.cell import Selection
from bus.contracts.operations import FenceState

from .desires import ANSWERED_FOR, WANTED, desire_of
from .instance import FENCED, NOT_TRIED, Instance
from .leases import Lease
from .report import is_over, rescan_of


class RunningAfterFence(Struct, frozen=True):
    """The machines that a service found running on a fenced host by a scan from after the fence: it did not hold.

    version: of the decision that the scan is later than. attempts: {instance: attempt}.
    """

    version: int
    attempts: dict[str, int]


class Fence(Struct, frozen=True, kw_only=True):
    """An operator's statement that a host is off. version: of the decision. at: when it was made, or the fence lifted;
    seconds since the epoch. A lifted one is no fence any more: its record refuses older decisions that are delivered
    late, and goes when none can be under way. running: by service, the machines that its last scan from after the fence
    has found to run there.
    """

    host_uuid: str
    host: str
    version: int
    state: FenceState = FenceState.FENCED
    reason: str = ""
    by: str = ""
    at: float = 0.0
    running: dict[str, RunningAfterFence] = {}

    @property
    def lifting(self) -> bool:
        """Whether the host may be used again, once it has destroyed its losses."""
        return self.state is FenceState.LIFTING

    def with_running(self, service: str, attempts: dict[str, int], passed: Collection[str]) -> Fence:
        """What a scan of this service from after this decision shows, instead of what it, or one of those that have
        given the host up, has found.
        """
        others = {name: found for name, found in self.running.items() if name not in {service, *passed}}
        found = {service: RunningAfterFence(self.version, attempts)} if attempts else {}
        return replace(self, running={**others, **found})

    @property
    def rescan(self) -> str:
        """Of the rescan that shows what runs there since the decision."""
        return rescan_of("fence", self.host_uuid, self.version)


class Loss(Struct, frozen=True, kw_only=True):
    """A machine that a fenced host may still have of an instance: no attempt up to this one is wanted there.

    service: that manages the host, by the record. at: when the record gave it up, seconds since the epoch.
    """

    host_uuid: str
    instance_uuid: str
    attempt: int
    service: str
    at: float

    @property
    def place(self) -> tuple[str, str]:
        """(host, instance): there is at most one loss of these, the one with the highest attempt."""
        return self.host_uuid, self.instance_uuid

    @property
    def rescan(self) -> str:
        """Of the rescan that shows whether its machine is still there."""
        return rescan_of("loss", self.host_uuid, self.instance_uuid, self.attempt, self.at)


def losses_of(
    before: Instance, after: Instance, host_uuid: str, at: float, *, unsure: bool = False
) -> tuple[Loss, ...]:
    """The machines of an instance that this host may have by the previous record, and that the new record gave up.

    Whatever their numbers: the fence answers for its host. unsure: it was given up because nobody knows its outcome: an
    operator decides about its machine. Nothing is lost twice: of what was over its host has answered by now.
    """
    proof = replace(after, doubted=unsure, reused_from=0)
    machines, desire, is_answered = [], desire_of(before), before.phase in ANSWERED_FOR
    if before.host_uuid == host_uuid and (not is_answered or desire.here in WANTED):
        machines.append((before.attempt, before.here.service))
    if before.source_host_uuid == host_uuid and (not is_answered or desire.source in WANTED):
        machines.append((before.source_attempt, before.source_service))
    return tuple(
        Loss(host_uuid=host_uuid, instance_uuid=before.uuid, attempt=attempt, service=service, at=at)
        for attempt, service in machines
        if is_over(proof, attempt, host_uuid)
    )


def fenced_hosts(instance: Instance, fences: Mapping[str, Fence]) -> Iterable[str]:
    """The hosts of this instance that are fenced."""
    return [host for host in filter(None, (instance.host_uuid, instance.source_host_uuid)) if host in fences]


class Closed(Struct, frozen=True):
    """Why a host is passed over: a stable code, and a sentence."""

    code: str
    reason: str


class ClosedHosts(Struct, frozen=True):
    """down: services that take no builds, by name. fences: of hosts, by uuid."""

    down: Mapping[str, Lease] = {}
    fences: Mapping[str, Fence] = {}

    def why(self, selection: Selection) -> Closed | None:
        """Why nothing is begun on this host now; None: it may be tried."""
        if (fence := self.fences.get(selection.host_uuid)) is not None:
            return Closed(FENCED, f"host {fence.host} is fenced")
        down = self.down.get(selection.service)
        return None if down is None else Closed(down.code, down.reason)

    def passed_over(self, selections: Sequence[Selection], attempt: int, at: float) -> tuple[AttemptRecord, ...]:
        """The closed ones among these, as records of the history."""
        return tuple(
            AttemptRecord(attempt=attempt, host=selection.host, outcome=NOT_TRIED, code=closed.code, at=at)
            for selection in selections
            if (closed := self.why(selection)) is not None
        )
