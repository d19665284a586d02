"""What is wrong when a run has come to rest: broken invariants, and requests, drains and messages without an end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from zlib import crc32

import msgspec

from berth.audit.invariants import Facts, InstanceFact, InventoryFact, ReporterFact, RunningFact, check_invariants
from bus.contracts.actions import Condition
from bus.contracts.build import TERMINAL_STATES, BuildState
from bus.contracts.drains import DrainState
from bus.contracts.objects import HostDecision, ObjectKind
from bus.contracts.operations import AdminState
from bus.contracts.placement import ProviderReport
from cell_conductor.state.desired_state import desired_state_of
from cell_conductor.state.instance import Instance, State
from cell_conductor.state.unknown_machine import UnknownMachineKind
from cell_conductor.store.memory import MemoryInstanceTable
from compute_agent.hosts.quarantine import with_reserved
from compute_sim.host_plan import tree
from lab.simulation.draw import PROJECTS
from lab.simulation.ironic_sync_watch import disagreements, is_reported
from lab.simulation.load import Client
from lab.simulation.orders import NONE_ALLOWED
from lab.simulation.peer_watch import OVER_QUOTA, resources_of_flavor
from lab.simulation.plan import Action
from lab.simulation.standing import forgotten_have_ends, is_unlocatable, standing
from lab.simulation.world import World, tagged_instance
from placement_worker.domain.values import Provider
from placement_worker.replica.replica import Replica
from placement_worker.store.memory_table import MemoryPlacementTable
from scheduler_worker.records.object_records import drains_of, fence_of

STUCK_S = 3.0  # a confirmed row is deleted within 1 s

# The processes of a cell, by the first word of their name.
FROM_CELLS = ("conductor", "compute")


def unsettled(world: World, client: Client) -> list[str]:
    """One line each, empty when the world is at rest as it should be: the first word names the invariant."""
    lost = unclearable(world)
    found = list(_requests(world, client, lost))
    for schema, table in world.databases.tables.items():
        if stuck := _stuck(world, schema, table.outbox):
            found.append(f"liveness: {stuck} rows in the outbox of {schema}")
        if table.deadlocks:
            found.append(f"no_deadlock: {table.deadlocks} in {schema}")
    found += _breaches(facts_of(world, _requested(world, client), lost))
    found += [
        f"liveness: the breaker of {service} is open"
        for table in world.cells.values()
        for service, breaker in table.breakers.items()
        if breaker.is_open
    ]
    found += list(_leftovers(world))
    found += list(_holdings(world, client))
    found += list(_inventories(world))
    found += list(_schedulers_know_hosts(world))
    found += list(_others(world))
    found += list(_quarantined(world))
    found += list(world.peer_watch.unsettled())
    found += list(world.gang_watch.unsettled(world.builds.records))
    found += list(world.move_watch.unsettled(lost))
    # Of instances whose host has burnt down: they wait for a fence, which some kinds do not have, and which a host that
    # burns down a second time does not get.
    burnt = set(lost) - set(world.taken_back) if world.plan.actions_across_cells else _unfenced(world)
    found += list(_requests_have_ends(world, burnt))
    found += list(_former_cells_rest(world, burnt | set(lost)))
    found += list(forgotten_have_ends(world, _unlocatable(world) | _left_to_the_audit(world)))
    found += list(_drains_have_ended(world, burnt))
    found += list(_fences_are_on_record(world))
    if world.ironic is not None:
        found += disagreements(world.ironic, world.placement.providers, world.positions.positions)
    found += [f"no_upcall: {words}" for words in world.listener.upward]
    found += [f"no_dead_letters: {words}" for words in world.listener.dead[:1]]
    found += [f"steps_are_made: {count} failed" for count in [world.machines.failed_steps()] if count]
    for name, replica in world.replicas.items():
        if words := _replica_differs(world.placement, replica):
            found.append(f"replica_agrees: {name}: {words}")
    return found


def _stuck(world: World, schema: str, outbox: Collection[int]) -> int:
    """How many rows have been in an outbox for longer than a row is. While an instance waits for a fence, its move is
    queried every 20 to 30 s, so there always comes another row.
    """
    now = world.clock.monotonic()
    before = world.outbox_since.get(schema, {})
    world.outbox_since[schema] = {row: before.get(row, now) for row in outbox}
    return sum(now - since >= STUCK_S for since in world.outbox_since[schema].values())


def _requests_have_ends(world: World, burnt: Collection[str]) -> Iterator[str]:
    """No request about an instance is under way for ever by the schedulers' record, whatever its cell has forgotten."""
    for move in world.builds.actions.values():
        if not move[0].terminal and move[0].instance_uuid not in burnt:
            yield f"one_terminal_event: {move[0].kind} {move[0].request_id} is {move[0].state} at the top"
    for uuid, build in world.builds.recorded.items():
        if build.current.under_way is not None and uuid not in burnt:
            yield f"one_terminal_event: {build.current.under_way} of {uuid} is still under way"
        elif build.state is BuildState.ACTIVE and build.current.condition is Condition.MOVING and uuid not in burnt:
            yield f"one_terminal_event: {uuid} is moving at the top, and nothing is under way"


def _former_cells_rest(world: World, lost: Collection[str]) -> Iterator[str]:
    """A cell waits for no answer about an instance that the map has in another one, whatever it has forgotten; and it
    has been told that it may forget what it has given up.
    """
    for name, table in world.cells.items():
        for uuid, instance in table.instances.items():
            build = world.builds.recorded.get(uuid)
            is_active = build is not None and build.state is BuildState.ACTIVE
            if is_active and uuid not in lost and instance.phase == (State.TRANSFERRED, None):
                yield f"former_cells_rest: {uuid} has left {name}, which still tells of it"
            if build is None or build.cell in (None, name) or instance.action is None:
                continue
            if desired_state_of(instance).placement_call is not None:
                yield f"former_cells_rest: {uuid} is {instance.phase} in {name}, and the map has it in {build.cell}"


def _drains_have_ended(world: World, burnt: Collection[str]) -> Iterator[str]:
    """No drain is under way for ever, and none ends before the moves that it has begun (seed 1795407114)."""
    moves = [move for move, _ in world.builds.actions.values() if move.drain is not None and not move.terminal]
    waiting = {move.drain for move in moves if move.instance_uuid in burnt}
    states = {name: drain.state for name, drain in drains_of(world.builds.objects.present.objects).items()}
    for drain, state in states.items():
        if state is not DrainState.ENDED and drain not in waiting:
            yield f"drains_end: {drain} is {state}"
    for move in moves:
        if states.get(move.drain or "") is DrainState.ENDED:
            yield f"drains_end: {move.drain} has ended, and {move.request_id} of {move.instance_uuid} is {move.state}"


def _fences_are_on_record(world: World) -> Iterator[str]:
    """A fence that its cell has acknowledged is on that cell's record.

    Not judged where a database was set back: the schedulers publish all fences again only every five minutes.
    """
    if any(order.action is Action.RESTORE for order in world.plan.orders):
        return
    for (kind, host), stored in world.builds.objects.present.objects.items():
        if kind is not ObjectKind.FENCE:
            continue
        fence = fence_of(stored)
        table = None if fence.unfencing or not fence.is_acknowledged else world.cells.get(fence.cell or "")
        if table is not None and host not in table.fenced:
            yield f"fences_are_on_record: {fence.cell} has acknowledged that of {host}, and does not have it"


def _others(world: World) -> Iterator[str]:
    """Others' objects are as they left them."""
    machines = {machine.instance_uuid for fleet in world.fleets.values() for _, machine in fleet.machines()}
    there = {host.plan.uuid for fleet in world.fleets.values() for host in fleet.hosts}
    for uuid, host in world.foreign.items():
        if host in there and uuid not in machines:
            yield f"foreign_unchanged: the machine {uuid} of others is gone from {host}"
    for service, fleet in world.fleets.items():
        table = world.cells[world.cell_of(service).name]
        listed = {(record.machine.host_uuid, record.machine.uuid) for record in table.unknown_machines.values()}
        for host, machine in fleet.machines() if service not in world.dead | world.duplicates.keys() else ():
            known = machine.instance_uuid in table.instances or not machine.complete
            if not known and (host, machine.instance_uuid) not in listed:
                yield f"unexplained_is_listed: {machine.instance_uuid} runs on {host}, and no record or list has it"
    for name, broker in world.brokers.items():
        if words := broker.theirs_differ():
            yield f"foreign_unchanged: on the bus {name} {words}"


def _quarantined(world: World) -> Iterator[str]:
    """The resources of a machine in quarantine are kept out of its host's inventory, and no others are."""
    for service, fleet in world.fleets.items():
        if service in world.dead | world.duplicates.keys():
            continue
        records = world.cells[world.cell_of(service).name].unknown_machines.values()
        kept = {one.location for one in records if one.machine.kind is UnknownMachineKind.QUARANTINED}
        for host in fleet.hosts:
            uuid, machines = host.plan.uuid, host.machines or {}
            wanted = {
                instance for instance, machine in machines.items() if machine.complete and (uuid, instance) in kept
            }
            reserved = {one.instance_uuid for one in fleet.records.reserved(uuid)}
            if wanted != reserved:
                yield f"quarantined_is_reserved: {host.plan.name} keeps room for {reserved}, in quarantine are {wanted}"


def given_back(world: World) -> list[str]:
    """Allocations that are still held though all has been deleted; not of those that burnt down."""
    lost = unclearable(world)
    held = {
        uuid
        for uuid, kept in world.placement.consumers.items()
        if kept.consumer.allocations and uuid not in lost and world.harm.own(uuid)
    }
    if held:
        return [f"{uuid} holds something" for uuid in sorted(held)]
    projects = {
        world.placement.consumers[uuid].consumer.project_id for uuid in lost if uuid in world.placement.consumers
    }
    counted = {project: world.placement.usage_of(project) for project in PROJECTS if project not in projects}
    return [f"{project} is counted as holding {used}" for project, used in counted.items() if any(used.values())]


def check_quota_refusals(world: World) -> str:
    """The error in the answer to projects that may hold nothing at all; "" when it names their quota."""
    closed = _closed(world)
    up = [host for service, fleet in world.fleets.items() if service not in world.dead for host in fleet.hosts]
    hosts = [host for host in up if host.enabled and host.plan.uuid not in closed]
    for uuid, build in world.builds.recorded.items():
        if build.project_id == NONE_ALLOWED:
            # Machines that a restored database does not know keep their resources: there may be none left.
            full = bool(world.taken_back) or not any(_has_vcpu(world, host.plan.uuid) for host in hosts)
            rightly = build.code == OVER_QUOTA or full
            return "" if rightly and build.state is BuildState.FAILED else f"{uuid}: {build.code}"
    return f"no project of {NONE_ALLOWED} is on record"


def _closed(world: World) -> set[str]:
    """Hosts that their operators have closed to builds, or that a drain has (seed 4880925: all of them)."""
    return {
        host
        for (kind, host), stored in world.builds.objects.present.objects.items()
        if kind is ObjectKind.HOST and msgspec.convert(stored.body, HostDecision).state is not AdminState.ENABLED
    }


def _has_vcpu(world: World, root: str) -> bool:
    """Whether a host has a free VCPU by placement, in any part of its tree (seed 1795410495: none had)."""
    return any(
        part.inventories["VCPU"].capacity > part.used.get("VCPU", 0)
        for part in world.placement.providers.values()
        if part.root == root and "VCPU" in part.inventories
    )


def unclearable(world: World) -> set[str]:
    """Instances that can never be cleared away: the unlocatable ones, and those of which a restored database knows an
    old
    truth: what becomes of their machines is judged as it happens.
    """
    return set(world.taken_back) | _unlocatable(world) | _left_to_the_audit(world)


def _unlocatable(world: World) -> set[str]:
    """Instances that are to be destroyed on a host that burnt down, or are blocked by one that has left, or by a node
    that is another cell's now, and changes of such on a node that its operator has removed from Ironic: only the host
    shows what it carried out.
    """
    return {
        uuid
        for cell, table in world.cells.items()
        for uuid, instance in table.instances.items()
        if (
            instance.phase == (State.DESTROYING, State.DELETED)
            or instance.blocked_reason
            or instance.action is not None
        )
        and (
            "dead" in (world.left.get(instance.host_uuid or ""), world.left.get(instance.source_host_uuid or ""))
            or ((instance.action or instance.blocked_reason) and _is_removed(world, instance.host_uuid or ""))
            or (instance.blocked_reason and not world.left.keys().isdisjoint(_places(world, instance)))
            or (instance.blocked_reason and _is_of_another_cell(world, cell, instance.host_uuid or ""))
        )
    }


def _places(world: World, instance: Instance) -> Iterator[str]:
    """The hosts that may have it, of which an operator states what they have: the record may be older than a move."""
    yield instance.host_uuid or ""
    moves = (move[0] for move in world.builds.actions.values())
    for consumer in (instance.uuid, *(move.request_id for move in moves if move.instance_uuid == instance.uuid)):
        kept = world.placement.consumers.get(consumer)
        for provider in kept.consumer.allocations if kept is not None else ():
            if (known := world.placement.providers.get(provider)) is not None:
                yield known.root


def _left_to_the_audit(world: World) -> set[str]:
    """Builds that end, or have ended, because no cell is known of what they hold, on nodes that their operators have
    removed from Ironic: nothing will ever announce these, and `berth placement audit --repair` gives that back.
    """
    return {
        uuid
        for uuid, build in world.builds.recorded.items()
        if is_unlocatable(build) and (kept := world.placement.consumers.get(uuid)) is not None
        if all(_is_removed(world, provider) for provider in kept.consumer.allocations)
    }


def _unfenced(world: World) -> set[str]:
    """Instances that move from or to a host which has burnt down, or are blocked by one, and of which their cell has no
    fence on record.
    """
    return {
        uuid
        for table in world.cells.values()
        for uuid, instance in table.instances.items()
        for host in (instance.host_uuid, instance.source_host_uuid)
        if instance.action is not None or instance.blocked_reason
        if world.left.get(host or "") == "dead" and host not in table.fenced
    }


def _leftovers(world: World) -> Iterator[str]:
    """Half-built machines of a failed build are removed from their host too.

    Not those that were removed and came back with an older disk, or that another process of the service's name
    answered for: no driver lists what is half-built.
    """
    brought_back = world.move_watch.brought_back
    for service, fleet in world.fleets.items():
        for host, machine in fleet.machines() if service not in world.dead else ():
            key = (host, machine.instance_uuid, machine.attempt)
            if key in brought_back or world.machines.is_untold(*key):
                continue
            if not machine.complete and machine.instance_uuid not in world.taken_back:
                yield f"no_leftovers: {machine.instance_uuid} attempt {machine.attempt} is half-built on {host}"


def _requested(world: World, client: Client) -> list[str]:
    """The builds that have to end: a client that has given up does not know whether its request was put on record."""
    return [*client.confirmed, *(uuid for uuid in client.unanswered if uuid in world.builds.recorded)]


def _requests(world: World, client: Client, lost: Collection[str]) -> Iterator[str]:
    for uuid in _requested(world, client):
        standing = world.builds.recorded.get(uuid)
        if uuid in world.taken_back:
            continue
        if standing is None:
            yield f"liveness: {uuid} was accepted by the broker and is not on record"
        elif uuid in lost:
            continue
        elif standing.state not in TERMINAL_STATES:
            yield f"liveness: {uuid} is still {standing.state.value}"
        elif uuid in client.deleted and standing.state is not BuildState.DELETED:
            yield f"liveness: {uuid} was to be deleted and is {standing.state.value}"


def _holdings(world: World, client: Client) -> Iterator[str]:
    """An active instance holds the amounts that its flavor requests, wherever its host's providers moved to. Of one
    that is blocked for good, its cell knows nothing; nor, once its database was set back, of one on a dead host whether
    it was resized.
    """
    lost = unclearable(world)
    for table in world.cells.values():
        for uuid, instance in table.instances.items():
            kept = world.placement.consumers.get(uuid)
            if instance.state is not State.ACTIVE or kept is None or uuid not in client.flavors or uuid in lost:
                continue
            if world.plan.sets_cells_back and world.left.get(instance.host_uuid or "") == "dead":
                continue
            held: Counter[str] = Counter()
            for amounts in kept.consumer.allocations.values():
                held.update(amounts)
            flavor = client.flavors[uuid]
            # A recovery takes up a resized machine as it is listed: no record that it moved was seen.
            if (uuid in world.move_watch.moved or world.plan.sets_cells_back) and instance.spec is not None:
                flavor = instance.spec.flavor
            if held != resources_of_flavor(flavor):
                yield f"holds_what_it_asked_for: {uuid} of {flavor} holds {dict(held)}"


def _inventories(world: World) -> Iterator[str]:
    """Every host is in placement as it is; what has left for good is not."""
    for uuid, how in world.left.items():
        # A shell stays for as long as its tree is used, or has what others gave it.
        shell = world.placement.providers.get(uuid) if how == "drained" else None
        if shell is None:
            continue
        tree_here = [one for one in world.placement.providers.values() if one.root == uuid]
        if is_reported(shell) or not any(any(one.used.values()) or one.is_changed_by_clients for one in tree_here):
            yield f"left_for_good: placement still has {uuid}"
    for service, fleet in world.fleets.items():
        for host in fleet.hosts if service not in world.dead else ():
            whole = tree(host.plan, host.size, enabled=host.enabled, nested=service not in world.flat)
            reports = with_reserved(whole, fleet.records.reserved(host.plan.uuid))
            for report in reports:
                if words := _reported_differs(report, world.placement.providers.get(report.uuid)):
                    yield f"book_has_the_hosts: {report.name}: {words}"


def _schedulers_know_hosts(world: World) -> Iterator[str]:
    """Every scheduler knows every host as it is: whose it is, and whether it may be chosen."""
    for name, life in world.lives.items():
        table = life.hosts
        for service, fleet in world.fleets.items() if table is not None else ():
            assert table is not None
            for host in fleet.hosts if service not in world.dead else ():
                index = table.index_of(host.plan.uuid)
                holder = -1 if index is None else int(table.service[index])
                if index is None or holder < 0 or table.services.states[holder].name != service:
                    yield f"schedulers_know_the_hosts: {name} does not know {host.plan.name} of {service}"
                elif bool(table.enabled[index]) is not host.enabled:
                    yield f"schedulers_know_the_hosts: {name} takes {host.plan.name} for what it was"
        for known in table.services.states if table is not None else ():
            if known.name in world.dead and known.down is None:
                yield f"schedulers_know_the_hosts: {name} takes the dead service {known.name} for alive"


def _reported_differs(report: ProviderReport, provider: Provider | None) -> str:
    if provider is None:
        return "not in placement"
    reported = {name: (i.total, i.reserved, i.allocation_ratio) for name, i in report.inventories.items()}
    kept = {
        name: (inventory.total, inventory.reserved, inventory.allocation_ratio)
        for name, inventory in provider.inventories.items()
        if not inventory.orphaned
    }
    if reported != kept:
        return f"reported {reported}, placement has {kept}"
    return "" if set(report.traits) == set(provider.traits) else f"placement has the traits {provider.traits}"


def facts_of(world: World, accepted: Sequence[str], lost: Collection[str]) -> Facts:
    """Everything `berth.audit.invariants.check_invariants` wants to know, from stores and machines; not of the lost."""
    placement, builds = world.placement, world.builds
    return Facts(
        inventories=[
            InventoryFact(p.uuid, name, s.total, s.reserved, s.allocation_ratio, float(s.capacity), p.used.get(name, 0))
            for p in placement.providers.values()
            for name, s in p.inventories.items()
        ],
        allocations={
            uuid: {provider: dict(held) for provider, held in kept.consumer.allocations.items()}
            for uuid, kept in placement.consumers.items()
            if kept.consumer.allocations and uuid not in lost and world.harm.own(uuid)
        },
        roots={p.uuid: p.root for p in placement.providers.values()},
        requests={uuid: standing(world, one) for uuid, one in builds.recorded.items() if uuid not in lost},
        cells={uuid: one.cell for uuid, one in builds.recorded.items() if one.cell is not None},
        instances=[
            InstanceFact(i.uuid, cell, i.state.value, i.host_uuid, i.attempt, source=_reporter_of(i))
            for cell, table in world.cells.items()
            for i in table.instances.values()
            if i.uuid not in lost and i.state is not State.TRANSFERRED
        ],
        running=[
            one
            for one in _running(world)
            if one.instance_uuid not in lost
            and world.harm.own(one.instance_uuid)
            and not _is_old_copy(world, one)
            and not _is_from_before(world, one)
            and not _is_untold_and_listed(world, one)
        ],
        feed=(placement.changes[0].sequence if placement.changes else 0, placement.head, len(placement.changes)),
        audit=list(_audit(placement)),
        accepted=[uuid for uuid in accepted if uuid not in lost and uuid not in world.listener.exempt],
        events=[event for event in world.listener.events.values() if event.instance_uuid not in world.listener.exempt],
        changes=placement.changes,
        connections=[(name, bus, name.startswith(FROM_CELLS)) for name, bus in world.connections],
    )


def _reporter_of(instance: Instance) -> ReporterFact | None:
    """The second machine of an instance whose move awaits its confirm."""
    move = instance.action
    if instance.state is not State.RESIZED or move is None or move.source is None:
        return None
    return ReporterFact(move.request_id, move.source.host_uuid, move.source_attempt)


def _running(world: World) -> Iterator[RunningFact]:
    """The machines that really run; on hosts that burnt down whatever its owner still takes for alive.

    Of those no report comes any more, not even that a machine was lost just before: that each was once built there by
    its attempt is seen at every commit (`watch`, breach `active_was_built`).
    """
    burnt: dict[tuple[str, str], int] = {}
    for service, fleet in world.fleets.items():
        for host, machine in fleet.machines():
            if service in world.dead:
                burnt[machine.instance_uuid, host] = machine.attempt
            elif machine.complete:
                yield RunningFact(machine.instance_uuid, machine.attempt, host, is_stopped=not machine.runs)
    # The builds of a second service of a name, made while it had the name, are on machines that are not seen any more
    # when it has gone; but none of it may run here, too, unless the process that built it first died unheard. Of a
    # service that died for good nobody answers for either's machines, and its builds go on elsewhere (seed 212712).
    elsewhere = {
        machine.instance_uuid
        for service, fleet in world.fleets.items()
        for _, machine in fleet.machines()
        if machine.complete and service not in world.dead
    }
    for service, duplicate in world.duplicates.items():
        for host, machine in duplicate.machines() if service not in world.dead else ():
            # A source that the second service stopped and handed over is destroyed by neither once that has gone.
            counts = machine.complete and machine.runs and machine.instance_uuid in elsewhere
            if counts and not world.machines.is_untold(host, machine.instance_uuid, machine.attempt):
                yield RunningFact(machine.instance_uuid, machine.attempt, host)
    for table in world.cells.values():
        for uuid, instance in table.instances.items():
            host = instance.host_uuid or ""
            if instance.state is State.ACTIVE and (world.left.get(host) == "dead" or _is_removed(world, host)):
                yield RunningFact(uuid, burnt.get((uuid, host), instance.attempt), host)
    yield from _on_nodes(world)


def _is_old_copy(world: World, one: RunningFact) -> bool:
    """Whether a restored host runs an attempt whose record was purged since, or is from before its cell
    has recovered: it is kept in quarantine, and listed.
    """
    if (one.host_uuid, one.instance_uuid, one.attempt) not in world.move_watch.brought_back:
        return False
    found = [(table, table.instances.get(one.instance_uuid)) for table in world.cells.values()]
    return any(
        _is_quarantined(table, one) and (record is None or one.attempt < record.proves_from) for table, record in found
    )


def _is_from_before(world: World, one: RunningFact) -> bool:
    """Whether it is from before its cell has recovered, and its record does not name it: it is kept in quarantine."""
    found = [(table, table.instances.get(one.instance_uuid)) for table in world.cells.values()]
    return any(
        _is_quarantined(table, one) and (record.blocked_reason or one.attempt < record.proves_from)
        for table, record in found
        if record is not None
    )


def _is_untold_and_listed(world: World, one: RunningFact) -> bool:
    """Whether this machine is in quarantine, and it, or another one of its instance (seed 4800485), was built after
    another process of the name had answered for it.
    """
    is_untold = world.machines.has_untold(one.instance_uuid)
    return is_untold and any(_is_quarantined(table, one) for table in world.cells.values())


def _is_quarantined(table: MemoryInstanceTable, one: RunningFact) -> bool:
    kept = table.unknown_machines.get((one.host_uuid, one.instance_uuid))
    return kept is not None and kept.machine.kind is UnknownMachineKind.QUARANTINED


def _is_removed(world: World, host: str) -> bool:
    """Whether an operator has removed the node from Ironic: what Ironic does not list proves nothing to berth."""
    known = any(fleet.host(host) is not None for fleet in world.fleets.values())
    return world.ironic is not None and not known and host not in world.ironic.pool.nodes


def _is_of_another_cell(world: World, cell: str, host: str) -> bool:
    """Whether a host is a node that no service of the cell has any more: the nodes were divided anew."""
    if world.ironic is None or host not in world.ironic.pool.nodes:
        return False
    parts = [world.wiring.share_of(service) for its_cell, service in world.plan.metal_services if its_cell == cell]
    return all(crc32(host.encode()) % parts != part for part, parts in parts)


def _on_nodes(world: World) -> Iterator[RunningFact]:
    for node in world.ironic.pool.nodes.values() if world.ironic else ():
        uuid = node["instance_uuid"]
        if uuid is None and (left := tagged_instance(node)) is not None and _is_active_on(world, left, node["uuid"]):
            # Its operator cleared `instance_uuid` alone: a machine that was not deleted, nor left for an alternate,
            # still runs.
            uuid = left
        if uuid is not None:
            yield RunningFact(uuid, world.attempt_on(node["uuid"], uuid), node["uuid"])


def _is_active_on(world: World, uuid: str, host: str) -> bool:
    found = [table.instances[uuid] for table in world.cells.values() if uuid in table.instances]
    return any(instance.state is State.ACTIVE and instance.host_uuid == host for instance in found)


def _audit(placement: MemoryPlacementTable) -> Iterator[str]:
    """Where what placement keeps as used is not the sum of its allocations."""
    sums: dict[tuple[str, str], int] = {}
    for kept in placement.consumers.values():
        for provider, held in kept.consumer.allocations.items():
            for name, amount in held.items():
                sums[provider, name] = sums.get((provider, name), 0) + amount
    used = {(p.uuid, name): amount for p in placement.providers.values() for name, amount in p.used.items()}
    for key in sorted(sums.keys() | used.keys()):
        if sums.get(key, 0) != used.get(key, 0):
            yield f"{key[0]} {key[1]}: used {used.get(key, 0)}, allocated {sums.get(key, 0)}"


def _replica_differs(placement: MemoryPlacementTable, replica: Replica) -> str:
    """The differences of a scheduler's replica from placement; "" when they agree."""
    if replica.sequence != placement.head:
        return f"the replica is at {replica.sequence}, placement at {placement.head}"
    if len(replica) != len(placement.providers):
        return f"the replica has {len(replica)} providers, placement {len(placement.providers)}"
    assumed = sorted(replica.assumptions.keys())
    if assumed:
        return f"still assumed: {assumed[:3]}"
    for uuid, provider in placement.providers.items():
        row = replica.row_of(uuid)
        if row is None:
            return f"the replica has no {provider.name}"
        mine = {name: int(used) for name, (_, used, _) in replica.inventory_of(row).items() if used}
        theirs = {name: used for name, used in provider.used.items() if used and name in provider.inventories}
        here, there = (int(replica.generation[row]), mine), (provider.generation, theirs)
        if here != there:
            return f"{provider.name}: (generation, used) is {here} in the replica, {there} in placement"
    return ""


def _breaches(facts: Facts) -> list[str]:
    """Breaches of the invariants of `berth check`, one line each.

    Not of capacity: inventories shrink here, and `PlacementWatch` has seen that no usage rose past its capacity.
    """
    results = [result for result in check_invariants(facts) if not result.holds and result.name != "capacity"]
    return [f"{result.name}: {example}" for result in results for example in result.examples]
