"""A compute service lists everything that its hosts have, in pages."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta as Bound

from .base import Allocations, Label, Message, Uuid, Word
from .cell import AttemptOnHost, InstanceSpec

MAX_LISTED_HOSTS = 1_000  # of one page
MAX_LISTED_MACHINES = 1_000  # of one page
MAX_LISTED_BYTES = 512 * 1024  # of the machines of one page, as JSON; one machine has less


class ListMachines(Message, frozen=True, kw_only=True, tag="compute.listing.v1"):
    """Queries a compute service for everything on its hosts, whatever is on record, in pages.

    It waits in the service's queue behind the commands that were published before, so those count. database_id: whose
    tag is the cell's own. after_host, after_instance: only what comes behind that, in the order of hosts, and of
    instances on each ("": from the first on).
    """

    service: Word
    database_id: Uuid
    after_host: Uuid | Literal[""] = ""
    after_instance: Uuid | Literal[""] = ""


class ListedMachine(AttemptOnHost, frozen=True, kw_only=True, omit_defaults=True):
    """One machine. attempt: as in its tag (0: it is not known).

    complete: it is certainly built; one that is being built is not. failed: its build has failed, and may have left
    something. runs: it is not stopped. busy: a change or a
    destruction of it is under way, or has been given up for now. foreign: it has no tag of this database. project_id,
    spec, allocations: as its service was commanded them last; allocations rather as its host has them (None: the
    service does not know).
    """

    host: Label
    complete: bool = True
    failed: bool = False
    runs: bool = True
    busy: bool = False
    foreign: bool = False
    project_id: Word | None = None
    spec: InstanceSpec | None = None
    allocations: Allocations | None = None


class MachinesPage(Message, frozen=True, kw_only=True, tag="compute.listing.page.v1"):
    """Reply to ListMachines. hosts: that were read now, and whose machines are all in this page and those before.

    A host of the service that is in no page was not seen, which proves nothing. more: there are other pages, behind
    next_host and next_instance.
    """

    machines: Annotated[tuple[ListedMachine, ...], Bound(max_length=MAX_LISTED_MACHINES)] = ()
    hosts: Annotated[tuple[Uuid, ...], Bound(max_length=MAX_LISTED_HOSTS)] = ()
    more: bool = False
    next_host: Uuid | Literal[""] = ""
    next_instance: Uuid | Literal[""] = ""
