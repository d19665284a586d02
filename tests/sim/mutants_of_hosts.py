"""Deliberate defects about hosts that come and go, bare metal, clocks, and the cells' bounds."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
from msgspec.structs import replace

import cell_conductor.app
import cell_conductor.host_handlers
import placement_worker.store.memory_rows as book_store
from bus.consuming.consumer import Consumer
from bus.consuming.outcome import Refuse
from cell_conductor.state.ownership_proof import rescan_id
from compute_agent.drivers.ironic.driver import IronicDriver
from compute_agent.hosts.pending_reports import PendingHostReports
from compute_sim.driver import SimulatedDriver
from ironic_sync.domain import position
from ironic_sync.domain import rules as ironic_rules
from placement_worker.domain.allocation_migration import _Migration
from scheduler_worker.hosts.service_directory import ServiceDirectory


def flip_ignored() -> AbstractContextManager[Any]:
    """Maintenance does not count: only a node's provision state and power do."""

    def unavailable(node: Any) -> bool:
        return node.power_state in ironic_rules.DEAD_POWER or node.provision_state not in ironic_rules.FREE_STATES

    return patch.object(ironic_rules, "is_unavailable", unavailable)


def stale_notice_applied() -> AbstractContextManager[Any]:
    """A notification that takes nothing away gives the node back at once, however old it is."""
    notified = position.on_notification

    def accepted(before: Any, *, taken: bool, deleted: bool = False, seq: int, now: float) -> Any:
        requested = notified(before, taken=taken, deleted=deleted, seq=seq, now=now)
        if taken or before.report is None:
            return requested
        free = {name: replace(one, reserved=0) for name, one in before.report.inventories.items()}
        return position._with_report(requested, replace(before.report, inventories=free), now)

    return patch.object(position, "on_notification", accepted)


def overtaken_read_applied() -> AbstractContextManager[Any]:
    """A read gives a node back, also when an event of it came since the read was sent."""
    apply_read = position.apply_read

    def applied(before: Any, node: Any, *, seq: int, now: float, config: Any) -> Any:
        return apply_read(replace(before, notified_seq=0), node, seq=seq, now=now, config=config)

    return patch.object(position, "apply_read", applied)


def gone_node_stays() -> AbstractContextManager[Any]:
    """A node that Ironic has no more is left in placement as it was."""

    def removed(before: Any, *, seq: int, now: float, config: Any) -> Any:
        return replace(before, due_at=None, read_seq=seq)

    return patch.object(position, "apply_removed", removed)


def node_never_undeployed() -> AbstractContextManager[Any]:
    """The service of bare metal reports `destroyed` and requests nothing of Ironic."""

    async def destroy(
        self: IronicDriver, host_uuid: str, instance_uuid: str, attempt: int, database_id: str | None
    ) -> None:
        return None

    return patch.object(IronicDriver, "destroy", destroy)


def reshape_loses_an_allocation() -> AbstractContextManager[Any]:
    """A host turns nested: what leaves the root arrives at no child."""

    def move(self: _Migration, consumer: str, classes: Sequence[str], takers: Sequence[str]) -> None:
        held = {provider: dict(amounts) for provider, amounts in self._allocations(consumer).items()}
        for name in classes:
            held.get(self._source, {}).pop(name, None)
        self.moved[consumer] = {provider: amounts for provider, amounts in held.items() if amounts}

    return patch.object(_Migration, "move", move)


def dead_service_still_chosen() -> AbstractContextManager[Any]:
    """Hosts whose service is down are chosen like any other."""

    def down(self: ServiceDirectory) -> Any:
        return np.zeros(len(self.states) + 1, dtype=np.bool_)

    return patch.object(ServiceDirectory, "down", down)


def change_not_reported() -> AbstractContextManager[Any]:
    """A host that changes is announced, and its new inventory is not reported."""

    def on_host_changed(self: PendingHostReports, hosts: Sequence[str]) -> None:
        self.announcements.add(hosts)

    return patch.object(PendingHostReports, "on_host_changed", on_host_changed)


def half_built_is_kept() -> AbstractContextManager[Any]:
    """A host destroys machines that were completed, and lets half-built ones lie."""
    destroyed = SimulatedDriver.destroy

    async def destroy(
        self: SimulatedDriver, host_uuid: str, instance_uuid: str, attempt: int, database_id: str | None
    ) -> None:
        machine = self._fleet.machine(host_uuid, instance_uuid)
        if machine is None or machine.complete:
            await destroyed(self, host_uuid, instance_uuid, attempt, database_id)

    return patch.object(SimulatedDriver, "destroy", destroy)


def capacity_unguarded() -> AbstractContextManager[Any]:
    """Three units more than there are may be claimed, and the store has no guard of its own."""
    claimed = book_store.claimed_provider

    def with_more(provider: Any) -> Any:
        found = claimed(provider)
        inventories = {
            name: inventory.__class__(
                inventory.capacity + 3, inventory.min_unit, inventory.max_unit, inventory.step_size, inventory.used
            )
            for name, inventory in found.inventories.items()
        }
        return replace(found, inventories=inventories)

    def unguarded(_self: Any, _decision: Any) -> None:
        pass

    @contextmanager
    def both() -> Any:
        with (
            patch.object(book_store, "claimed_provider", with_more),
            patch.object(book_store.MemoryPlacementTransaction, "_guard_capacity", unguarded),
        ):
            yield

    return both()


def usage_not_lowered() -> AbstractContextManager[Any]:
    """A release forgets what its consumer held, and leaves what is used as it was."""
    write = book_store.MemoryPlacementTransaction.write_claims

    async def forgetful(self: Any, decision: Any, *rest: Any) -> int:
        providers = self._table.providers
        used = {
            uuid: {name: max(amount, providers[uuid].used.get(name, 0)) for name, amount in amounts.items()}
            for uuid, amounts in decision.used.items()
        }
        return await write(self, replace(decision, used=used), *rest)

    return patch.object(book_store.MemoryPlacementTransaction, "write_claims", forgetful)


def cell_requests_above() -> AbstractContextManager[Any]:
    """A conductor connects to the API bus, too."""
    build = cell_conductor.app.build

    def with_a_way_up(env: Any, *arguments: Any, **named: Any) -> Any:
        env.bus()
        return build(env, *arguments, **named)

    return patch.object(cell_conductor.app, "build", with_a_way_up)


def outage_uses_up_messages() -> AbstractContextManager[Any]:
    """A message whose database is unavailable is given up, and not handled later."""
    call = Consumer._call

    async def given_up(self: Consumer, received: Any, *more: Any) -> Any:
        try:
            return await call(self, received, *more)
        except Exception as error:  # whatever it is: that is the defect
            return [Refuse("impatient", type(error).__name__) for _ in received]

    return patch.object(Consumer, "_call", given_up)


def patience_by_two_clocks() -> AbstractContextManager[Any]:
    """The end of a request's patience, by the asker's clock, is compared with the answering side's."""

    def until(self: Consumer, delivery: Any, meta: Any, since: float) -> float | None:
        clock = self._bus.clock
        if meta.timeout_s is None:
            return None
        return float(clock.monotonic() + meta.sent_at + meta.timeout_s - clock.time())

    return patch.object(Consumer, "_until", until)


def report_by_our_clock() -> AbstractContextManager[Any]:
    """A host's report is as old as it looks by the conductor's clock: when it came."""
    real = cell_conductor.host_handlers.differences

    def differences(report: Any, recorded: Any, *, now: float, **fields: Any) -> Any:
        rescans = tuple(rescan_id(one) for one in recorded if now > one.since)
        return real(replace(report, rescans=rescans), recorded, now=now, **fields)

    return patch.object(cell_conductor.host_handlers, "differences", differences)


MUTANTS_OF_HOSTS = (
    flip_ignored,
    stale_notice_applied,
    overtaken_read_applied,
    gone_node_stays,
    node_never_undeployed,
    reshape_loses_an_allocation,
    dead_service_still_chosen,
    change_not_reported,
    half_built_is_kept,
    capacity_unguarded,
    usage_not_lowered,
    cell_requests_above,
    outage_uses_up_messages,
    patience_by_two_clocks,
    report_by_our_clock,
)
# One seed of the first 160 finds it, the 59th: a clock set back, a conductor that is late, and a build, all in seconds.
