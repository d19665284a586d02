"""Fences of hosts, the stale machines of a fenced host, and the hosts on which nothing is started now: fenced ones, and
those of a compute service that is down. A stale machine is one that the host lists and that its record proves over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from msgspec import Struct, convert
from msgspec.structs import replace

from bus.contracts.build import AttemptRecord
from bus.contracts.cell import UNKNOWN_ATTEMPT, Running, Selection
from bus.contracts.operations import CellFence, FenceState
from cell_conductor.state.desired_state import DESIRED, DESTROY_ANSWERED, MachineTarget, desired_state_of
from cell_conductor.state.instance import FENCED, NOT_COMMANDED, Instance, InstanceSummary
from cell_conductor.state.lease import Lease
from cell_conductor.state.ownership_proof import is_provably_ended, rescan_of


class RunningAfterFence(Struct, frozen=True):
    """The machines that a service found running on a fenced host by a scan from after the fence: it did not hold."""

    version: int  # of the decision that is older than the scan
    attempts: dict[str, int]  # attempt by instance


class StaleCount(Struct, frozen=True):
    """The stale machines of a service on a fenced host: records have ended them without its answer."""

    count: int  # machines since the service last showed that it has none of them
    at: float  # when one was last counted; seconds since the epoch


class Fence(Struct, frozen=True, kw_only=True):
    """An operator's statement that a host is off."""

    # An ended one is no fence any more: its record refuses older decisions that are delivered late, and goes when none
    # can be under way.

    host_uuid: str
    host: str
    version: int  # number of the decision
    state: FenceState = FenceState.FENCED
    reason: str = ""
    by: str = ""
    at: float = 0.0  # when it was made, or the fence ended; seconds since the epoch
    # What the last scan of each service from after the fence has found to run there.
    running: dict[str, RunningAfterFence] = {}
    since: float = 0.0  # when this cell had the first of its decisions without an end in between
    stale: dict[str, StaleCount] = {}  # by the service that managed the host by the records

    @property
    def stale_machines(self) -> int:
        """The machines that it may still have, at most."""
        return sum(one.count for one in self.stale.values())

    @property
    def unfencing(self) -> bool:
        """Whether the host may be used again, once it has destroyed its stale machines."""
        return self.state is FenceState.UNFENCING

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

    def rescan_for(self, service: str) -> str:
        """Of the rescan that shows whether the host still has this service's stale machines."""
        one = self.stale[service]
        return rescan_of("stale", self.host_uuid, service, one.count, one.at)

    def with_stale(self, services: Iterable[str], at: float) -> Fence:
        """A machine more of each of these."""
        counts = {name: one.count for name, one in self.stale.items()}
        more = {name: StaleCount(counts.get(name, 0) + n, at) for name, n in Counter(services).items()}
        return replace(self, stale={**self.stale, **more})


def fence_of(decision: CellFence, now: float) -> Fence:
    """By a decision. An end has a time in any case, by which its record goes; a fence without one proves less."""
    state = FenceState.UNFENCING if decision.unfence else FenceState.FENCED
    at = decision.at or (now if decision.unfence else 0.0)
    fence: Fence = convert(decision, Fence, from_attributes=True)
    return replace(fence, state=state, at=at, since=now)


def services_of_stale(before: Instance, after: Instance, host_uuid: str) -> tuple[str, ...]:
    """The services of an instance's machines that this host may have, and that the new record makes stale."""
    # Whatever their numbers: the fence answers for its host. Nothing becomes stale twice: of what was over before, its
    # host has answered by now.
    proof = replace(after, proves_from=0)
    machines, desired, is_answered = [], desired_state_of(before), before.phase in DESTROY_ANSWERED
    if before.host_uuid == host_uuid and (not is_answered or desired.current in DESIRED):
        machines.append((before.attempt, before.current.service))
    if before.source_host_uuid == host_uuid and (not is_answered or desired.source in DESIRED):
        machines.append((before.source_attempt, before.source_service))
    return tuple(service for attempt, service in machines if is_provably_ended(proof, attempt, host_uuid))


def prevents_unfencing(record: InstanceSummary | None, one: Running, host_uuid: str) -> bool:
    """Whether the fence stays for it: it may be a stale one, also where an operator decides about it,
    because its number may have been given out twice, or is not known, or its record cannot be read.
    """
    if record is None or host_uuid in record.protected_hosts:
        return False
    known = replace(record, proves_from=0)
    return (
        one.attempt == UNKNOWN_ATTEMPT
        or desired_state_of(record).current is MachineTarget.UNKNOWN
        or is_provably_ended(known, one.attempt, host_uuid)
    )


def fenced_hosts(instance: Instance, fences: Mapping[str, Fence]) -> Iterable[str]:
    """The hosts of this instance that are fenced."""
    return [host for host in filter(None, (instance.host_uuid, instance.source_host_uuid)) if host in fences]


class Closure(Struct, frozen=True):
    """Why a host is passed over."""

    code: str  # stable code
    reason: str  # one sentence


class ClosedHosts(Struct, frozen=True):
    """The hosts that take no builds."""

    down: Mapping[str, Lease] = {}  # services that take no builds, by name
    fences: Mapping[str, Fence] = {}  # fences of hosts, by uuid

    def closure_of(self, selection: Selection) -> Closure | None:
        """Why nothing is started on this host now; None: it may be tried."""
        if (fence := self.fences.get(selection.host_uuid)) is not None:
            return Closure(FENCED, f"host {fence.host} is fenced")
        down = self.down.get(selection.service)
        return None if down is None else Closure(down.code, down.reason)

    def skipped(self, selections: Sequence[Selection], attempt: int, at: float) -> tuple[AttemptRecord, ...]:
        """The closed ones among these, as records of the history."""
        return tuple(
            AttemptRecord(attempt=attempt, host=selection.host, outcome=NOT_COMMANDED, code=closed.code, at=at)
            for selection in selections
            if (closed := self.closure_of(selection)) is not None
        )
