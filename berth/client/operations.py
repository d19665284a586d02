"""The operations of `/api/v1`, each under the name that its OpenAPI document has for it. A method is the description of
a call; `Client` and `AsyncClient` send it. What may be asked by whom is in docs/use/web.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from berth.client.call import ApiCall, Feed, feed, operation
from berth.client.event_feed import Reconnected
from berth.client.login import LoginOffer
from berth.client.object_operations import ObjectOperations
from berth.client.repair_types import (
    BreakersAfterReset,
    BreakersReset,
    BreakerView,
    DeadLetterCount,
    DeadLettersPurged,
    DeadLettersReplayed,
    DeadLetterView,
    LossesAccepted,
    QuarantineDecided,
    QuarantineDecision,
    QuarantinePage,
    Recovery,
    ReplayBody,
    WithoutService,
)
from berth.client.status import SystemStatus
from berth.client.types import (
    Accepted,
    ActionResponse,
    AdminStateRequest,
    Builds,
    CallerView,
    CellView,
    DrainBody,
    DrainCommandBody,
    DrainKind,
    FleetPoint,
    HostClaims,
    HostDetail,
    MetricsBody,
    MetricsPublished,
    NodeMaintenance,
    NodeRecord,
    NodesView,
    RemovalBody,
    TargetBody,
    TokenBody,
    TokenCreated,
    TokenRevoked,
    TokenView,
    Why,
)
from bus.contracts.actions import ActionRecord, ActionRequest
from bus.contracts.base import Label, Reason, Uuid, Word
from bus.contracts.build import TERMINAL_STATES, BuildEvent, BuildRecord, BuildRequest, BuildState, HostRecord
from bus.contracts.drains import DrainPlan, DrainProgress, DrainTarget
from bus.contracts.host_metrics import HostMetricsRecord
from bus.contracts.operations import HostAdminState, HostDeleted, ServiceDeleted, ServiceRecord
from bus.contracts.workers import WorkerRecord

WITHOUT_MACHINE = TERMINAL_STATES - {BuildState.ACTIVE}


class InstanceOperations:
    """Builds, and what is done with instances afterwards."""

    @operation
    def create_build(self, body: BuildRequest | Mapping[str, Any]) -> ApiCall[Accepted]:
        """Ask for a machine, or several that start together. With an `instance_uuid` of the caller's own it may be sent
        again; a mapping may leave it out, and `project_id`, which is then that of the token, else `default`.
        """
        return ApiCall("POST", "/builds", Accepted, body=body)

    @operation
    def list_builds(
        self,
        *,
        project: Word | None = None,
        state: BuildState | None = None,
        name: Label | None = None,
        cell: Word | None = None,
        host: Label | None = None,
        flavor: Label | None = None,
        code: Label | None = None,
        gang: Uuid | None = None,
        after: float | None = None,
        before: float | None = None,
        before_instance: Uuid | None = None,
        limit: int | None = None,
    ) -> ApiCall[Builds]:
        """Builds, newest first. name: or the first letters of a UUID. after, before: seconds since the epoch. The last
        of a page gives `before` (its `created_at`) and `before_instance` for the next one, as `next` of the answer
        has them.
        """
        search = {"name": name, "cell": cell, "host": host, "flavor": flavor, "code": code, "gang": gang}
        place = {"after": after, "before": before, "before_instance": before_instance, "limit": limit}
        return ApiCall("GET", "/builds", Builds, query={"project": project, "state": state, **search, **place})

    @operation
    def show_build(self, uuid: Uuid) -> ApiCall[BuildRecord]:
        """One build with its timeline."""
        return ApiCall("GET", "/builds/{uuid}", BuildRecord, at={"uuid": uuid})

    @operation
    def explain_build(self, uuid: Uuid, *, request: Uuid | None = None) -> ApiCall[Why]:
        """Why an instance is as it is: what happened, the hosts that were tried, what it waits for, and the next
        commands. request: the one about it that is to be explained.
        """
        return ApiCall("GET", "/builds/{uuid}/why", Why, at={"uuid": uuid}, query={"request": request})

    @operation
    def delete_build(self, uuid: Uuid) -> ApiCall[Accepted]:
        """Delete the machine, or stop its build. Idempotent."""
        return ApiCall("DELETE", "/builds/{uuid}", Accepted, at={"uuid": uuid})

    @feed
    def follow_build(
        self, uuid: Uuid, *, until: Literal["end", "deleted"] | None = None
    ) -> Feed[BuildRecord | BuildEvent]:
        """The record of a build, then its events until it ends. After a cut it begins again with the record, which has
        what happened meanwhile. until: `deleted` goes on beyond active.
        """
        ends = frozenset(WITHOUT_MACHINE if until == "deleted" else TERMINAL_STATES)
        query = {"until": until}
        return Feed("GET", "/builds/{uuid}/events", str, at={"uuid": uuid}, query=query, ends=ends, one_build=True)

    @feed
    def follow_all(self) -> Feed[BuildEvent | Reconnected]:
        """The events of all builds that the caller sees, without end; Reconnected where some may be missing."""
        return Feed("GET", "/events", str)

    @operation
    def create_action(self, uuid: Uuid, body: ActionRequest | Mapping[str, Any]) -> ApiCall[ActionResponse]:
        """Ask for one thing with one instance. Idempotent by `request_id`, which a mapping may leave out."""
        return ApiCall("POST", "/builds/{uuid}/actions", ActionResponse, at={"uuid": uuid}, body=body)

    @operation
    def list_actions(
        self,
        *,
        instance: Uuid | None = None,
        project: Word | None = None,
        under_way: bool | None = None,
        limit: int | None = None,
    ) -> ApiCall[tuple[ActionRecord, ...]]:
        """Requests about instances, newest first."""
        query = {"instance": instance, "project": project, "under_way": under_way, "limit": limit}
        return ApiCall("GET", "/actions", tuple[ActionRecord, ...], query=query)

    @operation
    def show_action(self, uuid: Uuid) -> ApiCall[ActionRecord]:
        """One request about an instance, and how it has ended."""
        return ApiCall("GET", "/actions/{uuid}", ActionRecord, at={"uuid": uuid})


class CallerOperations:
    """Who calls, what waits for a person, and the tokens on record."""

    @operation
    def show_login(self) -> ApiCall[LoginOffer]:
        """How one logs in; answered without a token."""
        return ApiCall("GET", "/login", LoginOffer)

    @operation
    def show_caller(self) -> ApiCall[CallerView]:
        """Whom the client's token is of."""
        return ApiCall("GET", "/caller", CallerView)

    @operation
    def show_status(self) -> ApiCall[SystemStatus]:
        """All that waits for a person, the worst first. Not for role project."""
        return ApiCall("GET", "/status", SystemStatus)

    @operation
    def create_token(self, body: TokenBody) -> ApiCall[TokenCreated]:
        """Make a token; this answer alone has it."""
        return ApiCall("POST", "/tokens", TokenCreated, body=body)

    @operation
    def list_tokens(self) -> ApiCall[tuple[TokenView, ...]]:
        """The tokens on record by name, those that have expired as well."""
        return ApiCall("GET", "/tokens", tuple[TokenView, ...])

    @operation
    def revoke_token(self, token: Word) -> ApiCall[TokenRevoked]:
        """Delete a token by its name."""
        return ApiCall("DELETE", "/tokens/{token}", TokenRevoked, at={"token": token})


class HostOperations:
    """Hosts, services, workers and cells, and the drains of hosts."""

    @operation
    def list_hosts(
        self, *, cell: Word | None = None, up: bool | None = None, limit: int | None = None
    ) -> ApiCall[tuple[HostRecord, ...]]:
        """Hosts with what is used of each class."""
        return ApiCall("GET", "/hosts", tuple[HostRecord, ...], query={"cell": cell, "up": up, "limit": limit})

    @operation
    def show_host(self, host: Label) -> ApiCall[HostDetail]:
        """One host by uuid or name, with its tree, inventories and allocations."""
        return ApiCall("GET", "/hosts/{host}", HostDetail, at={"host": host})

    @operation
    def list_claims(self, host: Label, *, after: Uuid | None = None) -> ApiCall[HostClaims]:
        """What placement has allocated on a host, and to whom. after: `next` of the page before."""
        return ApiCall("GET", "/hosts/{host}/claims", HostClaims, at={"host": host}, query={"after": after})

    @operation
    def show_metrics(self, host: Label) -> ApiCall[tuple[HostMetricsRecord, ...]]:
        """The numbers that are known of a host, or of each host of that name."""
        return ApiCall("GET", "/hosts/{host}/metrics", tuple[HostMetricsRecord, ...], at={"host": host})

    @operation
    def publish_metrics(self, host: Label, body: MetricsBody) -> ApiCall[MetricsPublished]:
        """Publish numbers about one host, as of now."""
        return ApiCall("POST", "/hosts/{host}/metrics", MetricsPublished, at={"host": host}, body=body)

    @operation
    def decide_about_host(self, host: Label, body: AdminStateRequest) -> ApiCall[HostAdminState]:
        """Disable a host, put it under maintenance, fence it, or enable it."""
        return ApiCall("PUT", "/hosts/{host}/admin-state", HostAdminState, at={"host": host}, body=body)

    @operation
    def delete_host(self, host: Label, body: RemovalBody) -> ApiCall[HostDeleted]:
        """Delete a decommissioned host."""
        return ApiCall("POST", "/hosts/{host}/delete", HostDeleted, at={"host": host}, body=body)

    @operation
    def list_history(self, *, hours: int | None = None) -> ApiCall[tuple[FleetPoint, ...]]:
        """The fleet over the last hours (at most 168), in at most 336 points; none where no database is."""
        return ApiCall("GET", "/history", tuple[FleetPoint, ...], query={"hours": hours})

    @operation
    def list_services(
        self, *, cell: Word | None = None, up: bool | None = None, limit: int | None = None
    ) -> ApiCall[tuple[ServiceRecord, ...]]:
        """Compute services."""
        return ApiCall("GET", "/services", tuple[ServiceRecord, ...], query={"cell": cell, "up": up, "limit": limit})

    @operation
    def delete_service(self, service: Word, body: RemovalBody) -> ApiCall[ServiceDeleted]:
        """Delete a decommissioned compute service."""
        return ApiCall("POST", "/services/{service}/delete", ServiceDeleted, at={"service": service}, body=body)

    @operation
    def list_workers(self, *, role: Word | None = None, limit: int | None = None) -> ApiCall[tuple[WorkerRecord, ...]]:
        """Workers by their heartbeats."""
        return ApiCall("GET", "/workers", tuple[WorkerRecord, ...], query={"role": role, "limit": limit})

    @operation
    def list_cells(self) -> ApiCall[tuple[CellView, ...]]:
        """Cells with their services and hosts."""
        return ApiCall("GET", "/cells", tuple[CellView, ...])

    @operation
    def show_nodes(self) -> ApiCall[NodesView]:
        """Ironic's nodes by provision state, with what is wrong with each."""
        return ApiCall("GET", "/metal", NodesView)

    @operation
    def set_node_maintenance(self, node: Label, body: NodeMaintenance) -> ApiCall[NodeRecord]:
        """Put a node into maintenance in Ironic: no build goes there. Instances on it continue to run."""
        return ApiCall("PUT", "/metal/{node}/maintenance", NodeRecord, at={"node": node}, body=body)

    @operation
    def end_node_maintenance(self, node: Label) -> ApiCall[NodeRecord]:
        """Take a node out of the maintenance that berth has set; another's is left alone."""
        return ApiCall("DELETE", "/metal/{node}/maintenance", NodeRecord, at={"node": node})

    @operation
    def plan_drain(self, host: Label, *, kind: DrainKind | None = None, cell: Word | None = None) -> ApiCall[DrainPlan]:
        """Where each instance of a host would go now; nothing is begun."""
        return ApiCall(
            "GET", "/hosts/{host}/drain-plan", DrainPlan, at={"host": host}, query={"kind": kind, "cell": cell}
        )

    @operation
    def start_drain(self, host: Label, body: DrainBody) -> ApiCall[DrainProgress]:
        """Put a host under maintenance and move its instances away."""
        return ApiCall("POST", "/hosts/{host}/drain", DrainProgress, at={"host": host}, body=body)

    @operation
    def plan_target(
        self,
        *,
        name: Label,
        target: DrainTarget | None = None,
        kind: DrainKind | None = None,
        cell: Word | None = None,
    ) -> ApiCall[DrainPlan]:
        """The plan of every host of a compute service, a cell or an aggregate."""
        query = {"name": name, "target": target, "kind": kind, "cell": cell}
        return ApiCall("GET", "/drain-plan", DrainPlan, query=query)

    @operation
    def drain_target(self, body: TargetBody) -> ApiCall[DrainProgress]:
        """Drain every host of a compute service, a cell or an aggregate."""
        return ApiCall("POST", "/drains", DrainProgress, body=body)

    @operation
    def list_drains(self, *, limit: int | None = None) -> ApiCall[tuple[DrainProgress, ...]]:
        """The drains there are, newest first."""
        return ApiCall("GET", "/drains", tuple[DrainProgress, ...], query={"limit": limit})

    @operation
    def show_drain(self, uuid: Uuid) -> ApiCall[DrainProgress]:
        """The progress of a drain, and the state of each instance."""
        return ApiCall("GET", "/drains/{uuid}", DrainProgress, at={"uuid": uuid})

    @operation
    def stop_drain(self, uuid: Uuid, *, reason: Reason | None = None) -> ApiCall[DrainProgress]:
        """Begin nothing more of a drain; what is under way ends by itself."""
        return ApiCall("DELETE", "/drains/{uuid}", DrainProgress, at={"uuid": uuid}, query={"reason": reason})

    @operation
    def pause_drain(self, uuid: Uuid, body: DrainCommandBody) -> ApiCall[DrainProgress]:
        """Begin no further move until it is resumed."""
        return ApiCall("POST", "/drains/{uuid}/pause", DrainProgress, at={"uuid": uuid}, body=body)

    @operation
    def resume_drain(self, uuid: Uuid, body: DrainCommandBody) -> ApiCall[DrainProgress]:
        """Go on, also with one that has ended: what has failed is tried again."""
        return ApiCall("POST", "/drains/{uuid}/resume", DrainProgress, at={"uuid": uuid}, body=body)


class RepairOperations:
    """Dead letters, quarantine, breakers and recoveries."""

    @operation
    def count_dead_letters(self) -> ApiCall[tuple[DeadLetterCount, ...]]:
        """How many dead letters there are, by bus and queue."""
        return ApiCall("GET", "/dead-letters", tuple[DeadLetterCount, ...])

    @operation
    def list_dead_letters(
        self, bus: Word, queue: Label, *, limit: int | None = None
    ) -> ApiCall[tuple[DeadLetterView, ...]]:
        """The oldest dead letters of a queue, without their bodies."""
        at = {"bus": bus, "queue": queue}
        return ApiCall("GET", "/dead-letters/{bus}/{queue}", tuple[DeadLetterView, ...], at=at, query={"limit": limit})

    @operation
    def show_dead_letter(self, bus: Word, queue: Label, dead_letter: Label) -> ApiCall[DeadLetterView]:
        """One dead letter with its body."""
        at = {"bus": bus, "queue": queue, "dead_letter": dead_letter}
        return ApiCall("GET", "/dead-letters/{bus}/{queue}/letters/{dead_letter}", DeadLetterView, at=at)

    @operation
    def replay_dead_letters(self, bus: Word, queue: Label, body: ReplayBody) -> ApiCall[DeadLettersReplayed]:
        """Send dead letters back to their queue."""
        at = {"bus": bus, "queue": queue}
        return ApiCall("POST", "/dead-letters/{bus}/{queue}/replay", DeadLettersReplayed, at=at, body=body)

    @operation
    def purge_dead_letters(self, bus: Word, queue: Label, *, until: Label | None = None) -> ApiCall[DeadLettersPurged]:
        """Throw the dead letters of a queue away, for good. until: those up to this one; without it all."""
        at = {"bus": bus, "queue": queue}
        return ApiCall("DELETE", "/dead-letters/{bus}/{queue}", DeadLettersPurged, at=at, query={"until": until})

    @operation
    def list_quarantine(
        self,
        *,
        cell: Word | None = None,
        service: Word | None = None,
        instance: Uuid | None = None,
        decided: bool | None = None,
        foreign: bool | None = None,
        after: str | None = None,
        limit: int | None = None,
    ) -> ApiCall[QuarantinePage]:
        """Machines in quarantine. foreign: also those of other databases. after: `next` of the page before."""
        of = {"cell": cell, "service": service, "instance": instance, "decided": decided, "foreign": foreign}
        return ApiCall("GET", "/quarantine", QuarantinePage, query={**of, "after": after, "limit": limit})

    @operation
    def decide_quarantine(self, body: QuarantineDecision) -> ApiCall[QuarantineDecided]:
        """Decide about many machines in quarantine at once: destroy, protect, or adopt."""
        return ApiCall("POST", "/quarantine/decide", QuarantineDecided, body=body)

    @operation
    def list_breakers(self, *, cell: Word | None = None, open: bool | None = None) -> ApiCall[tuple[BreakerView, ...]]:  # noqa: A002  (the parameter's name)
        """The breakers that ever tripped."""
        return ApiCall("GET", "/breakers", tuple[BreakerView, ...], query={"cell": cell, "open": open})

    @operation
    def show_breaker(self, cell: Word, service: Word) -> ApiCall[BreakerView]:
        """One breaker, with the machines that tripped it."""
        return ApiCall("GET", "/breakers/{cell}/{service}", BreakerView, at={"cell": cell, "service": service})

    @operation
    def reset_breakers(self, body: BreakersReset) -> ApiCall[BreakersAfterReset]:
        """Allow what tripped these breakers: it may be destroyed or counted as lost."""
        return ApiCall("POST", "/breakers/reset", BreakersAfterReset, body=body)

    @operation
    def list_recoveries(self) -> ApiCall[tuple[Recovery, ...]]:
        """The recoveries of cells whose database was restored, and what each would lose."""
        return ApiCall("GET", "/recoveries", tuple[Recovery, ...])

    @operation
    def go_on_without(self, cell: Word, body: WithoutService) -> ApiCall[Recovery]:
        """State that a decommissioned compute service has no machine: what waits for its hosts goes on."""
        return ApiCall("POST", "/recoveries/{cell}/without", Recovery, at={"cell": cell}, body=body)

    @operation
    def accept_losses(self, cell: Word, body: LossesAccepted) -> ApiCall[Recovery]:
        """Have a cell recover though it loses these instances, as they were seen."""
        return ApiCall("POST", "/recoveries/{cell}/accept", Recovery, at={"cell": cell}, body=body)


class Operations(CallerOperations, InstanceOperations, HostOperations, ObjectOperations, RepairOperations):
    """Every operation of `/api/v1`."""
