"""Nothing that is not ours is touched, and nothing of ours is destroyed without a reason on record.

Judged from what clients requested, from every record that a conductor ever committed, and from what really happens to
machines and nodes; not from what the workers take for theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Mapping
from typing import Any

from msgspec import Struct

from cell_conductor.state.instance import Instance, State
from cell_conductor.state.ownership_proof import ENDED_BY_COMMAND
from compute_sim.fleet import SimulatedMachine
from lab.simulation.plan import MAX_FAULT_S
from lab.simulation.watch import Breach
from placement_worker.domain.values import Provider
from placement_worker.store.memory_table import ConsumerRow

# Between a look at a node and what is done on it others may get in: Ironic has no condition "only if it is still
# so" for all fields at once. A look that is older than this is no excuse.
RACE_S = 5.0
# A report that a conductor cannot take yet (its database is away, it is paused) acts so long after its scan at most.
LATE_REPORT_S = MAX_FAULT_S + 5.0
# The codes of attempts that ended although their machines had been built: nothing of them is wanted any more.
LOST = frozenset({"instance.lost", "host.fenced"})
# A move that had arrived goes back: its destination is given up for its source.
GOES_BACK = frozenset({(State.DESTROYING, State.REVERTING), (State.REVERTING, None)})
# While a record stands so, its attempt is wanted.
WANTED = frozenset({(State.BUILDING, None), (State.CLAIMING, State.ACTIVE), (State.ACTIVE, None)})
FAILS_OVER = (State.CLAIMING, State.BUILDING)


class Seen(Struct, frozen=True):
    """A node as a process last read it, and when Ironic answered."""

    at: float
    instance: str | None
    state: str | None


class HarmWatch:
    """The machines that may be destroyed, and those that were never ours."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.requested: dict[str, None] = {}  # builds that a client ever requested: what could be ours
        self._to_delete: dict[str, None] = {}
        self._given_up: dict[str, int] = {}  # the newest attempt of each instance that a record gave up
        # {instance: attempts that a record had as lost}: reported, and seen to be so (`lost_was_lost`). A build that a
        # restored record does not have as active any more goes on elsewhere: only its history has the loss then.
        self._lost: dict[str, set[int]] = {}
        self._was_active: dict[tuple[str, str], int] = {}  # (host, instance): the attempt that a record had as active
        self._records: dict[str, Instance] = {}
        # (process, node): by the job that looked, those of the last RACE_S and the newest
        self._seen: dict[tuple[str, str], dict[str, Seen]] = {}
        self._changed_hands: dict[str, float] = {}
        # {node or host: {instance that it was taken from: when it was there again; None: not yet}}
        self._returned: dict[str, dict[str, float | None]] = {}
        self.given_up: Collection[tuple[str, str, int]] = ()  # machines that a move gave up (`MoveWatch`)
        # {instance: attempts after which its build went on}: each was commanded to be destroyed, and a command
        # outlives the record of it.
        self._left: dict[str, set[int]] = {}
        # {compute service: since when no process of it runs}, of those that have none.
        self.down_since: dict[str, float] = {}
        self.machines: Callable[[str, str], bool] = lambda _host, _instance: False  # whether a machine is on a host
        self.taken_back: Container[str] = ()  # instances of which a restored database has an old record
        self.holdings: dict[str, Mapping[str, Mapping[str, int]]] = {}  # of consumers that are not ours
        self.may_let_go: set[str] = set()  # of these, those whose owner has requested it
        self.restores = 0  # how often placement was set back
        self.providers: dict[str, None] = {}  # of another source

    def own(self, instance: str) -> bool:
        """Whether its build was ever requested of berth."""
        return instance in self.requested

    # --- reasons

    def delete(self, instance: str) -> None:
        """A client requests its end."""
        self._to_delete[instance] = None

    def is_deleted(self, instance: str) -> bool:
        """Whether a client has requested its end."""
        return instance in self._to_delete

    def record(self, instances: Mapping[str, Instance]) -> None:
        """After a commit of a conductor. Raises Breach."""
        for uuid, instance in instances.items():
            if self._records.get(uuid) is instance or instance.blocked_reason:
                continue
            self._has_a_way_back(self._records.get(uuid), instance)
            self._records[uuid] = instance
            # Of one that is out of time its host was commanded to end what is not complete.
            over = instance.attempt - (instance.phase in WANTED and not instance.queried)
            self._given_up[uuid] = max(over, self._given_up.get(uuid, 0))
            if instance.action is None and instance.phase in (*WANTED, FAILS_OVER):
                left = instance.attempt - (instance.phase in WANTED)
                tried = {one.attempt for one in instance.history if one.attempt <= left}
                self._left.setdefault(uuid, set()).update(tried)
            elif instance.state is State.FAILED and instance.action is None:
                gone = {one.attempt for one in instance.history if one.outcome in ENDED_BY_COMMAND}
                self._left.setdefault(uuid, set()).update(gone)
            lost = self._lost.setdefault(uuid, set())
            lost.update(one.attempt for one in instance.history if one.code in LOST)
            if instance.code in LOST:
                lost.add(instance.attempt)
            if instance.state is State.ACTIVE and instance.host_uuid is not None:
                self._was_active[instance.host_uuid, uuid] = instance.attempt

    def _has_a_way_back(self, before: Instance | None, after: Instance) -> None:
        """A machine that has arrived is given up for its source only if that may have been seen. Raises Breach.

        The answer of a service that has died since may be this old: its conductor waited for its database.
        """
        goes_back = before is not None and before.state is State.RESIZED and after.phase in GOES_BACK
        source = after.action.source if goes_back and after.action is not None else None
        if before is None or source is None or after.uuid in self.taken_back or self.is_deleted(after.uuid):
            return
        down_s = self._now() - self.down_since.get(source.service, self._now())
        if down_s > LATE_REPORT_S and self.machines(before.current.host_uuid, after.uuid):
            words = f"{after.uuid} on {before.current.host} is given up for {source.host}, whose service has been down"
            raise Breach("destroyed_with_reason", f"{words} for {down_s:.0f} s")

    def destroyed(self, host: str, machine: SimulatedMachine) -> None:
        """A driver takes a machine away. Raises Breach."""
        uuid, attempt = machine.instance_uuid, machine.attempt
        if not self.own(uuid):
            raise Breach("foreign_unchanged", f"the machine {uuid} on {host} is not ours, and is destroyed")
        if machine.complete and (words := self._unfounded(host, uuid, attempt)):
            raise Breach("destroyed_with_reason", words)

    def _unfounded(self, host: str, uuid: str, attempt: int | None, *, incomplete: bool = False) -> str:
        """Why there is no reason on record to destroy this attempt (None: any); "" when there is one. incomplete: its
        host has nothing of it that runs, which is a reason without a record.
        """
        if uuid in self._to_delete:
            return ""
        if attempt is not None and (host, uuid, attempt) in self.given_up:
            return ""
        if uuid in self.taken_back and attempt in self._left.get(uuid, ()):
            return ""  # seeds 1795410025, 1795410630, 1795415582
        active = self._was_active.get((host, uuid))
        if active is not None and attempt in (active, None) and active not in self._lost.get(uuid, ()):
            return f"{uuid} on {host} was active as attempt {active}; its end was not requested"
        if attempt is not None and attempt > self._given_up.get(uuid, 0) and not incomplete:
            return f"{uuid} attempt {attempt} on {host} is destroyed; no record ever gave it up"
        return ""

    # --- nodes

    def looked(self, process: str, node: Mapping[str, Any], at: float, job: str = "") -> None:
        """A process is answered what a node is like. job: which build or destruction looked."""
        seen = self._seen.setdefault((process, node["uuid"]), {})
        seen.pop(job, None)
        seen[job] = Seen(at, node.get("instance_uuid"), node.get("provision_state"))
        for old in [one for one, look in seen.items() if one != job and at - look.at > RACE_S]:
            del seen[old]

    def _looks(self, process: str, node: str, job: str) -> list[Seen]:
        """The state that the process acts upon: its newest look, and the newest of the very job that acts."""
        seen = self._seen.get((process, node), {})
        newest = list(seen.values())[-1:]
        return newest if job not in seen else [*newest, seen[job]]

    def changed_hands(self, node: str, before: str | None, after: str | None) -> None:
        """A node has another instance now, or none."""
        self._changed_hands[node] = self._now()
        former = self._returned.setdefault(node, {})
        for instance in former:  # our tag still names it where the taker leaves the node with none
            former[instance] = self._now() if after in (instance, None) else None
        if before is not None:
            former.setdefault(before, None)

    def brought_back(self, host: str, instance: str) -> None:
        """A host's disks were set back to when they had this machine, which had gone."""
        self._returned.setdefault(host, {})[instance] = self._now()

    def was_elsewhere(self, host: str, instance: str) -> bool:
        """Whether a host or node that has an instance now did not have it lately: a scan that saw that may be judged
        now.
        """
        returned = self._returned.get(host, {}).get(instance)
        return returned is not None and self._now() - returned <= LATE_REPORT_S

    def acted(
        self, process: str, method: str, node: Mapping[str, Any], attempt: int | None, body: bytes, *, job: str = ""
    ) -> None:
        """Ironic accepts what a process of ours requests of a node that is as given. Raises Breach."""
        uuid, owner = node["uuid"], node["instance_uuid"]
        what = f"{process}: {method} {body[:80].decode(errors='replace')} on {uuid}, {node['provision_state']}"
        looks = self._looks(process, uuid, job)
        raced = any(
            seen.instance != owner
            and self._changed_hands.get(uuid, -1.0) >= seen.at
            and self._now() - seen.at <= RACE_S
            for seen in looks
        )
        if raced:
            return
        if owner is None:
            was_free = any(self._was_just_free(seen) for seen in looks)
            if method == "PATCH" and (node["provision_state"] == "available" or was_free):
                return  # taken, or marked before that
            raise Breach("foreign_unchanged", f"{what}, of no owner")
        if not self.own(owner):
            raise Breach("foreign_unchanged", f"{what}, of {owner}")
        ends = b"deleted" in body or (method == "PATCH" and b'"remove"' in body and b"instance_uuid" in body)
        incomplete = node["provision_state"] in ("deploy failed", "available")
        if ends and (words := self._unfounded(uuid, owner, attempt, incomplete=incomplete)):
            raise Breach("destroyed_with_reason", f"{what}: {words}")

    def _was_just_free(self, seen: Seen) -> bool:
        """Whether a node was free when it was last looked at, a moment ago. If it is taken then, it has to be freed.

        Ironic refuses no PATCH because of the provision state. Remains on the node are found at rest.
        """
        return seen.instance is None and seen.state == "available" and self._now() - seen.at <= RACE_S

    # --- placement

    def begin_anew(self, consumers: Mapping[str, ConsumerRow]) -> None:
        """Placement is what it was at an earlier moment: what others held then they hold again."""
        self.restores += 1
        for uuid in self.holdings:
            kept = consumers.get(uuid)
            self.holdings[uuid] = kept.consumer.allocations if kept is not None else {}

    def placement(self, consumers: Mapping[str, ConsumerRow], providers: Mapping[str, Provider]) -> None:
        """After a commit of placement: what others hold they keep holding. Raises Breach."""
        for uuid, held in self.holdings.items():
            kept = consumers.get(uuid)
            now: Mapping[str, Mapping[str, int]] = kept.consumer.allocations if kept is not None else {}
            if not held and now:
                self.holdings[uuid] = now
            elif held and now != held and uuid not in self.may_let_go:
                raise Breach("foreign_unchanged", f"{uuid} of another client held {held}, and holds {now}")
