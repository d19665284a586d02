"""The owner of a bus: each role sets the identity of its database as its owner there, and a worker with another
database does not enter the bus.

Two deployments on one bus would take each other's messages. The first worker of a role that enters the bus sets a
durable owner, which only an operator takes away (`berth bus disown`). Two deployments may start at the same time on an
empty bus. So before a role enters a bus for the first time, it claims the bus for the database that the deployment's
roles share: one deployment gets the bus, and no role of the other one enters. A conductor with a database of its own
(`conductor.own_database`) claims only its role.
"""

from __future__ import annotations

from bus.port import BusForbidden, BusOwned, Transport

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
    """Set this role's database as its owner on a bus, unless it is. Raises BusOwnedByAnother.

    database_id: the identity of this process's database. place: the identity of the database that the roles of this
    deployment share ("": they share none), for which the bus is claimed before a role enters it for the first time.
    """
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
