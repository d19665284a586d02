"""The owner of a bus: the identity of each role's database, set durably by the first worker that enters. A worker with
another database does not enter, because two deployments would take each other's messages. Only an operator removes an
owner (`berth bus disown`).
"""

from __future__ import annotations

from bus.transport import BusForbidden, BusOwned, Transport

# The roles whose workers have a database of their own. Each sets an owner on every bus that it enters.
OWNERS = ("placement", "scheduler", "conductor", "ironic-sync")
# The name that roles of one database claim before their own.
SHARED_DATABASE = "shared_database"
OWN_DATABASE = "; where the conductors of one deployment have a database of their own, set conductor.own_database first"


class BusOwnedByAnother(BusForbidden):
    """A worker of this role of another deployment has entered the bus before. A wait does not help; an operator must
    decide.
    """

    code = "bus.owned_by_another"


async def enter(transport: Transport, bus: str, role: str, database_id: str, place: str = "") -> None:
    """Set this role's database (database_id) as its owner on a bus, unless it is. place: the database that the
    deployment's roles share ("": none), for which the bus is claimed first. Raises BusOwnedByAnother.
    """
    # Two deployments may start at the same time on an empty bus: one of them claims the place, and no role of the other
    # enters. A conductor with a database of its own (`conductor.own_database`) claims only its role.
    if place and not await transport.owner_of(role):
        await _set_owner(transport, bus, SHARED_DATABASE, place)
    await _set_owner(transport, bus, role, database_id)


async def _set_owner(transport: Transport, bus: str, role: str, database_id: str) -> None:
    try:
        await transport.set_owner(role, database_id)
    except BusOwned as error:
        hint = OWN_DATABASE if role == SHARED_DATABASE else ""
        raise BusOwnedByAnother(
            f"bus {bus!r} belongs to another deployment: the database of its {role} is {error}, and that of this "
            f"one is {database_id}; give this deployment another virtual host or prefix, restore its database, or, "
            f"once no worker of the other runs, take the bus over with `berth bus disown {bus}`{hint}"
        ) from error
