"""The driver port: the operations that a compute service needs for a kind of machine. Write one to manage hosts."""

# All methods run in the service's event loop and must not block it. The service calls `spawn` and `destroy` for one
# instance on one host one after the other, never at the same time; different instances run side by side.

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from msgspec import Struct

from bus.contracts.actions import ChangeKind
from bus.contracts.base import Resources
from bus.contracts.cell import InstanceSpec, Origin
from bus.contracts.host_metrics import HostReading
from bus.contracts.placement import ProviderReport
from bus.contracts.waiting_builds import WaitingBuild


class BuildFault(Exception):
    """A build that ended without a machine. `code` is stable and dotted; `reason` is for a person."""

    def __init__(self, code: str, reason: str = "") -> None:
        super().__init__(f"{code}: {reason}" if reason else code)
        self.code = code
        self.reason = reason


class Reschedule(BuildFault):
    """This host cannot build the instance, but another one may. The conductor tries the next alternate."""


class BuildAbort(BuildFault):
    """No host can build the instance (a broken image, a forbidden request). The conductor gives the build up."""


class ChangeFault(Exception):
    """A machine that was not changed. runs: whether it runs now (None: not known)."""

    def __init__(self, code: str, reason: str = "", *, runs: bool | None = None) -> None:
        super().__init__(f"{code}: {reason}" if reason else code)
        self.code = code
        self.reason = reason
        self.runs = runs


class HandOverRefused(Exception):
    """A machine that cannot be migrated live now; nothing was begun. runs: whether it runs. retry_other_host: it can
    perhaps be migrated to another host than the one that was named.
    """

    def __init__(self, code: str, reason: str = "", *, retry_other_host: bool = False, runs: bool = True) -> None:
        super().__init__(f"{code}: {reason}" if reason else code)
        self.code = code
        self.reason = reason
        self.retry_other_host = retry_other_host
        self.runs = runs


class NotOwned(Exception):
    """The host has a machine of this instance, and nothing proves that this database has it. The machine is left as
    it is.
    """

    code = "destroy.not_owned"


class DriverUnavailable(Exception):
    """The manager of the machines cannot be reached just now; the same call may work later."""

    code = "driver.unavailable"


class DriverFault(DriverUnavailable):
    """The driver raised what this port does not name, which is a bug of it. See `driver_guard`."""

    code = "driver.fault"


class DriverOutage(DriverUnavailable):
    """The manager of the machines is down as a whole (a restart): every other host of it is, too."""


class DriverBusy(DriverUnavailable):
    """The manager of the machines refuses this because of its load. retry_after_s: not before then (0: soon)."""

    def __init__(self, reason: str, *, retry_after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class MachineProtected(DriverUnavailable):
    """An operator has protected the machine where it is managed, so an immediate retry is of no use."""


class DriverHost(Struct, frozen=True, kw_only=True):
    """One host as its driver knows it."""

    uuid: str  # uuid of its root provider
    name: str
    enabled: bool = True
    disabled_reason: str = ""
    attributes: dict[str, str] = {}  # what ComputeCapabilities reads
    # This service reports it. Of hosts that another service reports now, builds are taken all the same: one that was on
    # its way when the host changed hands has the claim, and the host itself lets one build have it.
    reported: bool = True


class Build(Struct, frozen=True):
    """One attempt to build one instance on one host."""

    host_uuid: str
    spec: InstanceSpec
    attempt: int
    allocations: dict[str, Resources]
    database_id: str | None = None  # the identity that the machine is tagged with
    origin: Origin | None = None  # the machine on another host, or the image, that this attempt takes over


class ChangeOrder(Struct, frozen=True, kw_only=True):
    """One change of one machine."""

    kind: ChangeKind
    host_uuid: str
    spec: InstanceSpec
    attempt: int
    change_number: int  # rises with each change
    allocations: dict[str, Resources]
    database_id: str | None = None
    to_host: str | None = None  # the destination of a hand-over
    rescue_password: str = ""  # the password of a rescue


class ChangeResult(Struct, frozen=True):
    """A machine that was changed."""

    runs: bool
    image: str = ""  # the image of a snapshot


class Machine(Struct, frozen=True):
    """One instance that a host carries."""

    host_uuid: str
    instance_uuid: str
    attempt: int | None  # as in its tag (None: it has no tag of a berth database)
    database_id: str | None = None  # as in its tag
    built: bool = True  # whether it is certainly complete
    runs: bool = True  # whether it is not stopped
    # Only its tag still names it, what manages the host reports that it is gone, and `destroy` leaves it.
    tag_only: bool = False
    allocations: Mapping[str, Resources] | None = None  # its resources, by provider (None: the host does not know)


Tree = tuple[ProviderReport, ...]  # one root provider first, a parent before its children


class Driver(Protocol):
    """Hosts of one kind. Everything is idempotent: a restarted service repeats the calls that it was in."""

    async def open(self) -> None:
        """Get ready. May raise DriverUnavailable; it is then called again."""

    async def close(self) -> None:
        """Let go of connections. Machines stay as they are."""

    async def hosts(self) -> Sequence[DriverHost]:
        """All hosts, in a stable order. May raise DriverUnavailable."""

    async def inventory(self, hosts: Sequence[str] | None = None) -> Sequence[Tree]:
        """The provider trees of these hosts (None: of all). Empty when another source reports them."""

    async def spawn(self, build: Build) -> str | None:
        """Build and tag the machine; return when it runs, with a warning for the build's timeline (None: nothing
        special). Raises BuildAbort, Reschedule, or DriverUnavailable.
        """
        # The tag (database_id, instance, attempt) is put on the machine before or with the first change to its host.
        # Cancelled when the build is destroyed meanwhile: `destroy` follows and removes the remains.

    async def destroy(self, host_uuid: str, instance_uuid: str, attempt: int, database_id: str | None) -> None:
        """Return when nothing of this database's attempts up to this one is left on the host, leftovers included.
        Raises NotOwned, having changed nothing; MachineProtected; DriverUnavailable when it cannot be sure.
        """
        # Destroying a machine that does not exist succeeds. NotOwned: the machine's tag does not name this database.

    async def check(self, build: Build) -> None:
        """Return when this host could take that build, and reads the image of its origin. Changes nothing. Raises as
        `spawn` does.
        """

    async def change(self, change: ChangeOrder) -> ChangeResult:
        """Change a machine where it is; return when that is done. A change that is done already succeeds, and a
        reboot is done again. Raises ChangeFault when it is not done, NotOwned, DriverUnavailable.
        """
        # NotOwned: the machine's tag does not name this database. Cancelled when a later change or a destruction takes
        # its place: a hand-over that is cancelled leaves the machine where it is, running or stopped, and the later
        # change determines which it is to be.

    async def list(self, hosts: Sequence[str] | None = None) -> Mapping[str, Sequence[Machine]]:
        """Every machine that these hosts (None: all) carry now, whatever its state and origin, by host uuid."""
        # A host that was seen carrying nothing has an empty list. One that is left out was not seen: that proves
        # nothing.

    def on_change(self, callback: Callable[[Sequence[str]], None]) -> None:
        """Have `callback(host uuids)` called when hosts were enabled, disabled, resized, or came and went."""


@runtime_checkable
class SourceCheckingDriver(Protocol):
    """A driver that can also check, on the source's side, whether a machine can be migrated live."""

    # The destination has checked its side before (`Driver.check`), and was commanded nothing yet.

    async def check_source(self, change: ChangeOrder) -> None:
        """Return when this machine, which runs, could be migrated live to `to_host`. Changes nothing. Raises
        HandOverRefused, or as `change` does.
        """
        # A hand-over that is done already is not refused: the command may come twice.


@runtime_checkable
class MeasuringDriver(Protocol):
    """A driver that can also measure its hosts."""

    async def measure(self, now: float) -> Sequence[HostReading]:
        """The readings of its hosts' sensors now (`now`: seconds since the epoch). May raise DriverUnavailable."""


@runtime_checkable
class WaitingDriver(Protocol):
    """A driver whose builds may wait for what manages its hosts."""

    def waiting(self) -> Sequence[WaitingBuild]:
        """The builds that wait now, the longest first."""
