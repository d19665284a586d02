"""The owner of a bus: each role leaves the identity of its database there, and a worker with another database does not
enter the bus.

Two deployments on one bus would take each other's messages. The first worker of a role that enters the bus leaves a
durable mark, which only an operator removes (`berth bus release`). Two deployments may start at the same time on an
empty bus. So before a role enters a bus for the first time, it claims the bus for the database that the deployment's
roles share: one deployment gets the bus, and no role of the other one enters. A conductor with a database of its own
(`conductor.own_database`) claims only its role.
"""

from __future__ import annotations

from bus.port import BusForbidden, BusMarked, Transport

# The roles whose workers have a database of their own. Each leaves a mark on every bus that it enters.
OWNERS = ("placement", "scheduler", "conductor", "ironic-sync")
# The mark that roles of one database claim before their own.
DEPLOYMENT = "deployment"
OWN_DATABASE = "; where the conductors of one deployment have a database of their own, set conductor.own_database first"


class BusOwnedByAnother(BusForbidden):
    """A worker of this role of another deployment has entered the bus before. A wait does not help; an operator must
    decide.
    """

    code = "bus.owned_by_another"


async def enter(transport: Transport, bus: str, role: str, deployment: str, place: str = "") -> None:
    """Leave the mark of this role's database on a bus, unless it is there. Raises BusOwnedByAnother.

    deployment: the identity of this process's database. place: the identity of the database that the roles of this
    deployment share ("": they share none), for which the bus is claimed before a role enters it for the first time.
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
            f"bus {bus!r} belongs to another deployment: the database of its {role} is {error}, and that of this "
            f"one is {deployment}; give this deployment another virtual host or prefix, restore its database, or, once "
            f"no worker of the other runs, take the bus over with `berth bus release {bus}`{hint}"
        ) from error
