"""The owner of a bus: the database of each role leaves its identity there, and a worker of another database does not
enter.

Two deployments on one bus would take each other's messages. A mark is left by the first worker of a role that
enters the bus, for good; an operator takes it away (`berth bus release`).

Two deployments may start at once on an empty bus. So a role that enters a bus for the first time claims the bus first,
for the database that its roles share: one deployment has it, and no role of the other enters. A conductor with a
database of its own (`conductor.own_database`) claims its role alone.
"""

from __future__ import annotations

from bus.port import BusForbidden, BusMarked, Transport

# The roles whose workers have a database of their own. Each leaves a mark on every bus that it enters.
OWNERS = ("placement", "scheduler", "conductor", "ironic-sync")
# The mark that roles of one database claim before their own.
DEPLOYMENT = "deployment"
OWN_DATABASE = "; where the conductors of one deployment have a database of their own, set conductor.own_database first"


class BusOwnedByAnother(BusForbidden):
    """Another deployment's worker of this role has entered the bus before. Permanent, until an operator decides."""

    code = "bus.owned_by_another"


async def enter(transport: Transport, bus: str, role: str, deployment: str, place: str = "") -> None:
    """Leave the mark of this role's database on a bus, or find it there. Raises BusOwnedByAnother.

    deployment: the identity of the database of this process. place: of the database that the roles of this deployment
    share ("": they share none), which claims the bus before a role enters it for the first time.
    """
    if place and not await transport.owner_of(role):
        await _mark(transport, bus, DEPLOYMENT, place)
    await _mark(transport, bus, role, deployment)


async def _mark(transport: Transport, bus: str, role: str, deployment: str) -> None:
    try:
        await transport.mark(role, deployment)
    except BusMarked as error:
        hint = OWN_DATABASE if role == DEPLOYMENT else ""
        raise BusOwnedByAnother(
            f"bus {bus!r} belongs to another deployment: the database of its {role} is {error.owner}, and that of this "
            f"one is {deployment}; give this deployment another virtual host or prefix, restore its database, or, once "
            f"no worker of the other runs, take the bus over with `berth bus release {bus}`{hint}"
        ) from error
