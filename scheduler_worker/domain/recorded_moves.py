"""The records of requests about instances: the requests, and the changes of the instances since."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from msgspec import Struct

from bus.contracts.build import AttemptRecord, BuildRequest, FunnelStep
from bus.contracts.moves import CellMove, Condition, MoveKind, MoveRecord, MoveRequest, MoveState
from scheduler_worker.domain.builds import RecordedBuild
from scheduler_worker.domain.delivery import RequestDelivery


class RecordedMove(Struct, frozen=True, kw_only=True):
    """The record of one request. digest: of its whole content. sequence: of its newest event.

    cell: where it was dispatched to. created_at: seconds since the epoch. command: of one that ends in another cell
    than it begins in, what its cell is to do now; None: of every other one, and once it has ended.
    """

    request_id: str
    instance_uuid: str
    project_id: str
    kind: MoveKind
    digest: bytes
    state: MoveState
    sequence: int
    terminal: bool = False
    cell: str | None = None
    host: str | None = None
    host_uuid: str | None = None
    code: str = ""
    reason: str = ""
    funnel: tuple[FunnelStep, ...] = ()
    history: tuple[AttemptRecord, ...] = ()
    created_at: float = 0.0
    command: CellMove | None = None


def record_of(move: RecordedMove, updated_at: float) -> MoveRecord:
    """A request as it is answered to queries."""
    return MoveRecord(
        request_id=move.request_id,
        instance_uuid=move.instance_uuid,
        project_id=move.project_id,
        kind=move.kind,
        state=move.state,
        terminal=move.terminal,
        cell=move.cell,
        host=move.host,
        code=move.code,
        reason=move.reason,
        funnel=move.funnel,
        history=move.history,
        created_at=move.created_at,
        updated_at=updated_at,
    )


class InstanceRecord(Struct, frozen=True, kw_only=True):
    """The changes of an instance since its build. Without this record the instance is as it was built.

    flavor, image: its present ones; "": as it was built. image_properties: {image: its properties}, of the image that a
    rebuild gave it, and of the one that the rebuild under way names. under_way: the request that has no terminal event
    yet. sequence: of the newest event of its cell that changed this.
    """

    instance_uuid: str
    condition: Condition = Condition.ACTIVE
    flavor: str = ""
    image: str = ""
    image_properties: Mapping[str, Mapping[str, str]] = {}
    under_way: str | None = None
    sequence: int = 0


class PendingMove(Struct, frozen=True, kw_only=True):
    """A request that has no outcome yet. position: in its batch."""

    position: int
    request: MoveRequest
    digest: bytes
    taken_at: float
    delivery: RequestDelivery = RequestDelivery()


class MoveContext(Struct, frozen=True, kw_only=True):
    """The records that a request concerns. build_request: as it was built.

    names_instance: the request_id is the uuid of an instance.
    """

    move: RecordedMove | None = None
    build: RecordedBuild | None = None
    build_request: BuildRequest | None = None
    instance: InstanceRecord | None = None
    names_instance: bool = False

    @property
    def now(self) -> InstanceRecord:
        """The instance's present state."""
        assert self.build is not None
        return self.instance or InstanceRecord(instance_uuid=self.build.instance_uuid)


def known_of(
    requests: Mapping[str, str],
    *,
    moves: Mapping[str, RecordedMove],
    builds: Mapping[str, RecordedBuild],
    requested: Mapping[str, BuildRequest],
    instances: Mapping[str, InstanceRecord],
    named: Collection[str],
) -> dict[str, MoveContext]:
    """The records of requests ({request_id: instance}), from the rows by id and by instance.

    named: the request_ids that are uuids of instances.
    """
    return {
        request_id: MoveContext(
            move=moves.get(request_id),
            build=builds.get(uuid),
            build_request=requested.get(uuid),
            instance=instances.get(uuid),
            names_instance=request_id in named,
        )
        for request_id, uuid in requests.items()
    }


def flavor_of(known: MoveContext) -> str:
    """The flavor that the instance has now."""
    assert known.build_request is not None
    return known.now.flavor or known.build_request.flavor


def image_of(known: MoveContext) -> str:
    """The image that the instance has now."""
    assert known.build_request is not None
    return known.now.image or known.build_request.image


def image_properties_of(known: MoveContext) -> Mapping[str, str]:
    """The properties of the image that the instance has now."""
    assert known.build_request is not None
    return known.now.image_properties.get(image_of(known), known.build_request.image_properties)
