"""What each package publishes, and under which keys: its permissions and what it tries at its start."""

from __future__ import annotations

from bus.contracts import feed, nova_calls, placement, placement_queries, workers
from bus.contracts.catalogue import DOOR_KEY, MESSAGES, OPERATORS, OPERATORS_KEY, PLACEHOLDER, MessageRow
from bus.contracts.queues import CLIENT, FRONTEND, GATEWAY, OPERATOR, Where

# The kind of bus on which each worker publishes its messages of both kinds.
HOMES = dict.fromkeys(("cell_conductor", "compute_agent"), Where.CELL)


# What a frontend of Nova publishes: of a scheduler's messages those that neither build nor command.
_OF_FRONTENDS = (
    placement_queries.AllocationsQuery,
    placement_queries.ProjectUsageQuery,
    feed.ChangesRequest,
    feed.SnapshotRequest,
    nova_calls.NovaCall,
    placement.Claim,
    placement.ClaimAll,
    placement.LocateRequest,
    workers.WorkerHeartbeat,
)


def published_by(package: str, where: Where) -> list[MessageRow]:
    """The messages that a worker publishes on a bus of this kind."""
    home = HOMES.get(package, Where.API)
    kinds = (where, Where.BOTH) if where is home else (where,)
    rows = [row for row in MESSAGES if row.where in kinds]
    if package == CLIENT:  # what a gateway sends on for clients, publishers that the operator trusts send themselves
        return [row for row in rows if row.public and GATEWAY in row.publishers]
    return [row for row in rows if (row.message in _OF_FRONTENDS if package == FRONTEND else package in row.publishers)]


def message_keys(package: str, where: Where) -> list[tuple[str, str]]:
    """(exchange, routing key) of each of these, with a word for each placeholder."""
    return [(row.exchange, sample_of(key)) for row in published_by(package, where) for key in keys_of(row, package)]


def keys_of(row: MessageRow, package: str) -> list[str]:
    """The templates of the keys under which a package publishes a message."""
    door = DOOR_KEY if CLIENT in row.publishers and package in (GATEWAY, OPERATOR) else ""
    if door and package == GATEWAY:
        return [door]
    operators = OPERATORS_KEY if package == OPERATOR and row.message in OPERATORS else ""
    return [key for key in (row.key, row.cell_key, operators, door) if key]


def sample_of(template: str) -> str:
    """A template of a key or a name with a word for each placeholder."""
    return PLACEHOLDER.sub("x", template)
