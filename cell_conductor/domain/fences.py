"""Fences of hosts, and the losses of a fenced host: machines that the record gave up without the host's answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct

from .instance import Instance
from .report import is_over, rescan_of

FENCED = "host.fenced"  # the code of what ended because its host was fenced


class Fence(Struct, frozen=True, kw_only=True):
    """An operator's statement that a host is off. version: of the decision. lifting: the host may be used again, once
    it has destroyed its losses. at: seconds since the epoch.
    """

    host_uuid: str
    host: str
    version: int
    lifting: bool = False
    reason: str = ""
    by: str = ""
    at: float = 0.0

    @property
    def rescan(self) -> str:
        """Of the rescan that shows what runs there since the decision."""
        return rescan_of("fence", self.host_uuid, self.version)


class Loss(Struct, frozen=True, kw_only=True):
    """A machine that a fenced host may still have of an instance: no attempt up to this one is wanted there.

    service: that manages the host, by the record. at: when the record gave it up, seconds since the epoch.
    """

    host_uuid: str
    instance_uuid: str
    attempt: int
    service: str
    at: float

    @property
    def place(self) -> tuple[str, str]:
        """(host, instance): there is at most one loss of these, the one with the highest attempt."""
        return self.host_uuid, self.instance_uuid

    @property
    def rescan(self) -> str:
        """Of the rescan that shows whether its machine is still there."""
        return rescan_of("loss", self.host_uuid, self.instance_uuid, self.attempt, self.at)


class RunningAfterFence(Struct, frozen=True):
    """The machines that a service found running on a fenced host by a scan from after the fence: it did not hold.

    version: of the decision that the scan is later than. attempts: {instance: attempt}.
    """

    version: int
    attempts: Mapping[str, int]


def losses_of(before: Instance, after: Instance, host_uuid: str, at: float) -> tuple[Loss, ...]:
    """The machines of an instance that this host may have by the previous record, and that the new record gave up."""
    move = before.move
    machines = []
    if before.selections and before.host_uuid == host_uuid:
        machines.append((before.attempt, before.here.service))
    if before.source_host_uuid == host_uuid and move is not None and move.source is not None:
        machines.append((move.source_attempt, move.source.service))
    return tuple(
        Loss(host_uuid=host_uuid, instance_uuid=before.uuid, attempt=attempt, service=service, at=at)
        for attempt, service in machines
        if attempt and is_over(after, attempt, host_uuid)
    )


def fenced_hosts(instance: Instance, fences: Mapping[str, Fence]) -> Iterable[str]:
    """The hosts of this instance that are fenced."""
    here, source = instance.host_uuid, instance.source_host_uuid
    return [host for host in dict.fromkeys((here, source)) if host is not None and host in fences]
