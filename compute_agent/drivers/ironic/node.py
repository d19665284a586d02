"""A node as Ironic's REST API has it, its provision states, and the tag that names the owner of the machine on it."""

from __future__ import annotations

import contextlib
import uuid
from datetime import UTC, datetime
from typing import Annotated

import msgspec
import structlog
from msgspec import Meta as Bound
from msgspec import Struct

from bus.contracts.base import GivenAttempt, Uuid, Word, reason_of
from compute_agent.driver import Machine
from compute_agent.drivers.ironic.config import IronicConfig

log = structlog.get_logger(__name__)

# The fields that a list requests of each node; a page of a thousand is then some 300 kB.
FIELDS = (
    "uuid,name,provision_state,power_state,maintenance,instance_uuid,instance_info"
    ",conductor_group,owner,lessee,retired,retired_reason,fault"
)
# Where our tag is on a node. Ironic keeps `instance_info` through rescue and service and empties it together with
# `instance_uuid` when it undeploys a node. An operator who clears `instance_uuid` alone leaves the tag behind: while
# the node is deployed it still names the owner of the machine on it.
OWNER_TAG = "/instance_info/berth"

# The entry of a node that has failed and not been tried since. Ironic keeps `extra` whatever becomes of the node.
UNPROVEN_ENTRY = "berth_unproven"
UNPROVEN = f"/extra/{UNPROVEN_ENTRY}"

DEPLOYING = frozenset({"deploying", "wait call-back", "deploy hold"})
# From these, Ironic takes the target `deleted`; in any other state the node is on its way already.
DELETABLE = frozenset(
    {
        "active",
        "deploy failed",
        "deploy hold",
        "deploying",
        "error",
        "rescue",
        "rescue failed",
        "rescue wait",
        "service failed",
        "service hold",
        "service wait",
        "unrescue failed",
        "wait call-back",
    }
)
# In these states a node has certainly been deployed. In any other one it may still be, or be deployed anew.
BUILT = frozenset(
    {
        "active",
        "rescue",
        "rescue failed",
        "rescue wait",
        "rescuing",
        "service failed",
        "service hold",
        "service wait",
        "servicing",
        "unrescue failed",
        "unrescuing",
    }
)
# In these a machine may be on a node that carries no instance by Ironic's record.
DEPLOYED = BUILT | DELETABLE


class OwnerTag(Struct, frozen=True, omit_defaults=True):
    """The proof that a node's instance is this database's, written in the same PATCH as its `instance_uuid`."""

    database_id: Uuid
    cell: Word
    service: Word
    instance: Uuid
    attempt: GivenAttempt
    change_number: Annotated[int, Bound(ge=0)] = 0  # of the last rebuild of this machine


class Unproven(Struct, frozen=True):
    """A failure that no build has disproved."""

    since: float  # when it failed; seconds since the epoch
    reason: Annotated[str, Bound(max_length=500)] = ""  # in Ironic's words


class NodeExtra(Struct, frozen=True):
    """The entry of berth in a node's `extra`."""

    berth_unproven: Unproven | None = None


class InstanceInfo(Struct, frozen=True):
    """The entry of berth in a node's `instance_info`; the others are not read."""

    berth: OwnerTag | None = None


class IronicNode(Struct, frozen=True):
    """The fields of an Ironic node that are needed here. Anything else in the answer is ignored."""

    uuid: Uuid
    name: str | None = None
    provision_state: str | None = None
    power_state: str | None = None
    target_power_state: str | None = None
    maintenance: bool = False
    instance_uuid: str | None = None
    instance_info: msgspec.Raw = msgspec.Raw(b"{}")
    last_error: str | None = None
    reservation: str | None = None  # the conductor that holds its lock
    protected: bool | None = None
    protected_reason: str | None = None
    retired: bool | None = None
    retired_reason: str | None = None
    conductor_group: str = ""
    shard: str | None = None
    owner: str | None = None
    lessee: str | None = None
    fault: str | None = None
    storage_interface: str | None = None
    health: str | None = None
    conductor: str | msgspec.UnsetType | None = msgspec.UNSET
    extra: msgspec.Raw = msgspec.Raw(b"{}")

    @property
    def is_orphaned(self) -> bool:
        """Whether no conductor of Ironic serves it now (a restart): Ironic answers 400 to every change of it."""
        return self.conductor is None

    @property
    def unproven(self) -> Unproven | None:
        """The failure that it has to prove repaired; an entry that is not understood is no failure."""
        if UNPROVEN_ENTRY.encode() not in bytes(self.extra):
            return None
        try:
            return msgspec.json.decode(self.extra, type=NodeExtra).berth_unproven
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None

    def serves(self, config: IronicConfig) -> str:
        """The only project that it serves now; "": it serves all. An unproven node serves the canary's."""
        if config.canary_project is not None and self.unproven is not None:
            return config.canary_project
        return self.lessee or (self.owner if config.restrict_to_owner else None) or ""

    @property
    def disabled_reason(self) -> str:
        """Why it takes no build though nothing is on it, "" when it does; what placement shows is not repeated."""
        if self.maintenance:
            return "maintenance"
        if self.health == "Critical":
            return "health is Critical"
        return f"retired: {self.retired_reason}" if self.retired_reason else "retired" if self.retired else ""

    @property
    def runs(self) -> bool:
        """Whether it is not certainly off."""
        return self.power_state != "power off"

    @property
    def is_partly_torn_down(self) -> bool:
        """Whether Ironic has failed to undeploy it, or is trying again: it carries no instance then, and may run."""
        return self.machine is None and self.provision_state in {"error", "deleting"}

    @property
    def info_entries(self) -> tuple[str, ...]:
        """The names in its `instance_info`; none when that is not understood."""
        try:
            return tuple(msgspec.json.decode(self.instance_info, type=dict[str, msgspec.Raw]))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return ()

    @property
    def instance(self) -> str | None:
        """The uuid of the instance that it carries, spelled as everywhere here (Ironic takes other spellings)."""
        if self.instance_uuid is None:
            return None
        with contextlib.suppress(ValueError):
            return str(uuid.UUID(self.instance_uuid))
        return self.instance_uuid

    @property
    def owner_tag(self) -> OwnerTag | None:
        """Our tag for the machine that is on it. An instance of another form is another's, and no fault."""
        # Of a node that carries an instance it counts for that one; of one that carries none, while it is deployed: an
        # operator has cleared `instance_uuid` alone, and that does not prove the machine gone.
        if self.instance_uuid is None and self.provision_state not in DEPLOYED:
            return None
        try:
            tag = msgspec.json.decode(self.instance_info, type=InstanceInfo).berth
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        return tag if tag is not None and self.instance in (None, tag.instance) else None

    @property
    def machine(self) -> str | None:
        """The uuid of the instance whose machine is on it: by Ironic's record, else by its owner tag."""
        tag = self.owner_tag
        return self.instance if self.instance is not None or tag is None else tag.instance

    @property
    def condition(self) -> str:
        """Its state and Ironic's own words about the last thing that failed, for a reason."""
        text = " ".join((self.last_error or "").split())
        return f"in {self.provision_state}{': ' if text else ''}{text}"


class Page(Struct, frozen=True):
    """One page of nodes, each read for itself, so one that cannot be read hides no other."""

    nodes: list[msgspec.Raw] = []
    next: str | None = None  # link to the next page (None: there is none)

    def readable(self) -> list[IronicNode]:
        """The nodes that can be read; the others are logged, and count as not seen."""
        found: list[IronicNode] = []
        for raw in self.nodes:
            try:
                found.append(msgspec.json.decode(raw, type=IronicNode))
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                log.error("ironic.unreadable", reason=reason_of(error))
        return found


class HistoryEvent(Struct, frozen=True):
    """An entry of a node's history."""

    created_at: str | None = None  # UTC, without a zone
    severity: str | None = None
    event_type: str | None = None
    event: str = ""

    @property
    def since_epoch(self) -> float:
        """When, in seconds since the epoch; 0: not known."""
        try:
            at = datetime.fromisoformat(self.created_at or "")
            return (at if at.tzinfo is not None else at.replace(tzinfo=UTC)).timestamp()
        except (ValueError, OverflowError):
            return 0.0


class History(Struct, frozen=True):
    """Ironic's record of a node."""

    history: list[HistoryEvent] = []


def machines_of(node: IronicNode) -> tuple[Machine, ...]:
    """The machine on the node; a text that is no uuid names no instance that a report could name."""
    machine, tag = node.machine, node.owner_tag
    if machine is None or not _is_uuid(machine):
        return ()
    built = node.provision_state in BUILT
    if tag is None:
        return (Machine(node.uuid, machine, None, None, built, runs=node.runs),)
    left = node.instance is None  # an operator has cleared `instance_uuid` alone: nothing is done to such a node
    return (Machine(node.uuid, machine, tag.attempt, tag.database_id, built, runs=node.runs, tag_only=left),)


def _is_uuid(text: str) -> bool:
    try:
        return str(uuid.UUID(text)) == text
    except ValueError:
        return False
