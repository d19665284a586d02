"""A compute service lists everything that its hosts have, in pages."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta as Bound

from bus.contracts.base import Allocations, Label, Message, Uuid, Word
from bus.contracts.cell import AttemptOnHost, InstanceSpec

MAX_LISTED_HOSTS = 1_000  # of one page
MAX_LISTED_MACHINES = 1_000  # of one page
MAX_LISTED_BYTES = 512 * 1024  # of the machines of one page, as JSON; one machine has less


class ListMachines(Message, frozen=True, kw_only=True, tag="compute.listing.v1"):
    """Queries a compute service for everything on its hosts, whatever is on record, in pages.

    It waits in the service's queue behind the commands that were published before, so those count.
    """

    service: Word
    database_id: Uuid  # whose tag is the cell's own
    # after_host, after_instance: only what follows these, by host, then by instance ("": from the first on)
    after_host: Uuid | Literal[""] = ""
    after_instance: Uuid | Literal[""] = ""


class ListedMachine(AttemptOnHost, frozen=True, kw_only=True, omit_defaults=True):
    """One machine that a host has."""

    host: Label
    complete: bool = True  # it is certainly built; one that is being built is not
    failed: bool = False  # its build has failed, and may have left something
    runs: bool = True  # it is not stopped
    busy: bool = False  # a change or a destruction of it is under way, or has been given up for now
    foreign: bool = False  # it has no tag of this database
    # project_id, spec, allocations: as its service was last commanded them; allocations rather as its host has them
    # (None: the service does not know)
    project_id: Word | None = None
    spec: InstanceSpec | None = None
    allocations: Allocations | None = None


class MachinesPage(Message, frozen=True, kw_only=True, tag="compute.listing.page.v1"):
    """Reply to ListMachines. A host of the service that is in no page was not seen, which proves nothing."""

    machines: Annotated[tuple[ListedMachine, ...], Bound(max_length=MAX_LISTED_MACHINES)] = ()
    # those that were read now, and whose machines are all in this page and those before
    hosts: Annotated[tuple[Uuid, ...], Bound(max_length=MAX_LISTED_HOSTS)] = ()
    more: bool = False  # there are further pages, after next_host and next_instance
    next_host: Uuid | Literal[""] = ""
    next_instance: Uuid | Literal[""] = ""
