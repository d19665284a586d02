"""A cloud of Nova before the real placer and a real replica in memory; what Nova says of its hosts is made by hand."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any
from uuid import NAMESPACE_OID, uuid5

from msgspec.structs import replace

from bus.clock import SystemClock, new_uuid
from bus.contracts.cell import HostReport, HostStates
from bus.contracts.placement import Inventory, InventoryUpdate, ProviderReport
from nova_scheduler.app import device_filters
from nova_scheduler.cloud.host_facts import CellRead, HostFacts, HostHardware, KnownRow
from nova_scheduler.cloud.in_flight import InstancesInFlight
from nova_scheduler.cloud.state import ComputeNode, NovaState, host_table, supported_instances
from nova_scheduler.config import NOVA_FILTERS, NovaConfig
from nova_scheduler.decide.placer_requests import PlacerRequests
from nova_scheduler.decide.select_destinations import Destinations
from nova_scheduler.wire.envelope import Call
from nova_scheduler.wire.versioned import Primitive, versioned
from placement_worker.domain.allocations import Replace
from placement_worker.domain.claim_ledger import ConsumerWrite
from placement_worker.replica.replica import Replica
from scheduler_worker import plugins
from scheduler_worker.build.claim_ownership import ClaimOwnership
from scheduler_worker.build.placer import Placer
from scheduler_worker.config import HOST_FACT_FILTERS, SchedulerConfig
from scheduler_worker.filters.image import SUPPORTED
from scheduler_worker.hosts.host_table import HostTable
from scheduler_worker.selection.host_view import VERSION
from scheduler_worker.selection.selector import Selector
from scheduler_worker.selection.selector_config import SelectorConfig
from tests.kit.claims import PlacementClaims

# Nova's own, and those of hints.
HINTED = NovaConfig(enabled_filters=(*NOVA_FILTERS, "DifferentHostFilter", "SameHostFilter"))
CELLS = ("ce110000-0000-4000-8000-000000000001", "ce110000-0000-4000-8000-000000000002")
PLENTY = {"VCPU": 16, "MEMORY_MB": 65536, "DISK_GB": 1000}
FLAVOR = {"name": "m1.small", "flavorid": "1", "vcpus": 1, "memory_mb": 512, "root_gb": 1}


class KnownFacts(NovaState):
    """The nodes of the world: their host is `h0`, `h1` ..., their node name `h0.local` ..."""

    def __init__(self, table: HostTable) -> None:
        super().__init__(table)
        self.nodes: dict[str, ComputeNode] = {}
        self.cells: dict[str, str] = {}

    def node(self, uuid: str) -> ComputeNode | None:
        return self.nodes.get(uuid)

    def cell_of(self, uuid: str) -> str | None:
        return self.cells.get(uuid)

    def has_cell(self, uuid: str) -> bool:
        return uuid in self.cells.values()

    def nodes_named(self, host: str | None, nodename: str | None = None) -> tuple[str, ...]:
        return tuple(
            one.uuid for one in self.nodes.values() if host in (None, one.host) and nodename in (None, one.nodename)
        )

    def unknown(self, roots: Iterable[str]) -> tuple[str, ...]:
        return tuple(uuid for uuid in roots if uuid not in self.nodes)


class Cloud:
    """Hosts by what each has; `late` ones are in placement and not known to Nova's facts until they are asked for."""

    def __init__(
        self,
        amounts: Sequence[Mapping[str, int]],
        *,
        cells: Sequence[str] = (),
        late: Collection[int] = (),
        children: Sequence[Mapping[str, int]] = (),
        nova: NovaConfig = HINTED,
        told: Sequence[ComputeNode] = (),
        settings: Mapping[str, Any] = {},  # of the scheduler
        rows: Sequence[HostHardware] = (),  # of the hosts, as their cell's database has them
    ) -> None:
        self.nova, self.told = nova, told
        self.children = children  # of each host
        self.rng = random.Random(7)
        self.clock = SystemClock()
        self.uuids = [new_uuid(self.rng) for _ in amounts]
        self._amounts, self._cells = amounts, cells or [CELLS[0]] * len(amounts)
        self.late = set(late)
        self.claims = PlacementClaims()
        self.asked: list[tuple[str, ...]] = []
        self.casts: list[str] = []
        self.notified: list[bool] = []  # of each call that is decided, whether it has hosts
        self.replica, self.table = Replica(), host_table()
        self.facts = KnownFacts(self.table)
        self.config = SchedulerConfig(
            retry_jitter_s=0.002, available_filters=HOST_FACT_FILTERS, enabled_filters=nova.own_filters, **settings
        )
        self.lacking: tuple[str, ...] = ()  # enabled filters that berth does not have
        self.outdated: tuple[str, ...] = ()  # cells whose databases were read too long ago
        self.host_facts = HostFacts(CELLS, max_age_s=1e9)
        self.in_flight = InstancesInFlight(self.host_facts, self.clock, claims=not nova.shadow)
        self.rows = list(rows)
        self.deaf = False  # Nova does not answer
        self.waiting: set[str] | None = None  # instances that wait for a host; None: all
        self.selector = Selector(
            self.replica,
            self.table,
            SelectorConfig(
                self.config,
                flavors={},
                filters=plugins.filters(self.config, device_filters(nova, self.in_flight)),
                weighings=plugins.weighings(self.config),
            ),
        )
        self.selector.in_flight = self.in_flight if rows else None
        self.read()
        self.destinations = self.front()

    def read(self) -> None:
        """The cell's database is read."""
        rows = {at: KnownRow(uuid=self.uuids[at], hardware=one) for at, one in enumerate(self.rows)}
        read = CellRead(present=rows.keys(), changed=rows)
        self.host_facts.put(CELLS[0], self.host_facts.begin(CELLS[0]), read, self.clock.monotonic())

    def front(self) -> Destinations:
        """Another front on the same replica."""
        held = ClaimOwnership(self.claims, self.table.last_cell_of, self.no_runs)
        placer = Placer(
            self.claims,
            held,
            self.selector,
            self,
            clock=self.clock,
            rng=random.Random(5),
            config=self.config,
        )
        return Destinations(
            placer,
            self.selector,
            self.facts,
            self,
            self,
            requests=PlacerRequests(
                self.selector,
                self.facts,
                self.nova,
                lacking=self.lacking,
                outdated=lambda: self.outdated,
                row_of=self.in_flight.row_of if self.rows and self.nova.device_filters else None,
            ),
            configure=lambda: None,
            notifier=self,
            clock=self.clock,
            in_shadow=self.nova.shadow,
        )

    async def open(self) -> Cloud:
        await self.claims.placement.open()
        for at in range(len(self.uuids)):
            await self._report(at)
        self.know(at for at in range(len(self.uuids)) if at not in self.late)
        await self.refresh(timeout_s=1.0)
        return self

    async def _report(self, at: int) -> None:
        uuid = self.uuids[at]
        inventories = {name: Inventory(total=total) for name, total in self._amounts[at].items()}
        report = ProviderReport(uuid=uuid, name=f"h{at}.local", inventories=inventories)
        providers = (report, *self._children_of(at))
        await self.claims.placement.apply_reports(
            [InventoryUpdate(reporter="s", version=1, root_uuid=uuid, providers=providers)]
        )

    async def arrive(self, amounts: Mapping[str, int]) -> None:
        """A host comes to placement. The replica does not have it yet, and Nova tells of it when it is asked."""
        self.late.add(len(self.uuids))
        self.uuids.append(new_uuid(self.rng))
        self._amounts, self._cells = [*self._amounts, amounts], [*self._cells, CELLS[0]]
        await self._report(len(self.uuids) - 1)

    def child(self, host: int, number: int) -> str:
        """The uuid of a child provider."""
        return str(uuid5(NAMESPACE_OID, f"{host} {number}"))

    def _children_of(self, at: int) -> list[ProviderReport]:
        return [
            ProviderReport(
                uuid=self.child(at, number),
                name=f"h{at} {number}",
                parent_uuid=self.uuids[at],
                inventories={name: Inventory(total=total) for name, total in amounts.items()},
            )
            for number, amounts in enumerate(self.children)
        ]

    def know(self, hosts: Iterable[int]) -> None:
        """Nova names these hosts."""
        for at in hosts:
            uuid = self.uuids[at]
            node = self.told[at] if self.told else ComputeNode(uuid="", host="", nodename="")
            node = self.facts.nodes[uuid] = replace(node, uuid=uuid, host=f"h{at}", nodename=f"h{at}.local")
            attributes = {SUPPORTED: supported_instances(node), VERSION: str(node.hypervisor_version)}
            self.facts.cells[uuid] = self._cells[at]
            self.table.apply(
                HostStates(
                    service=f"h{at}",
                    cell=self._cells[at],
                    epoch=1,
                    sequence=1,
                    hosts=(HostReport(uuid=uuid, name=f"h{at}.local", attributes=attributes),),
                    complete=True,
                ),
                0.0,
            )

    # --- the ports

    def notify(self, call: Call, begun_at: float, *, placed: bool) -> None:
        self.notified.append(placed)

    async def no_runs(self, instances: Sequence[str]) -> dict[str, str]:
        return {}

    async def refresh(self, *, timeout_s: float) -> bool:
        page = await self.claims.placement.snapshot(None, 1000)
        self.replica.load(list(page.providers), page.sequence)
        return True

    async def prepare(self, new: Any = ()) -> None:
        if new:
            await self.ask(new)

    async def ask(self, questions: Any = ()) -> Any:
        """Of Nova, about root providers."""
        self.asked.append(tuple(questions))
        if self.deaf:
            return False
        self.know(sorted(self.late))
        found, self.late = bool(self.late), set()
        return found

    async def waits_for_host(self, instances: Sequence[str]) -> bool:
        return self.waiting is None or not self.waiting.isdisjoint(instances)

    def apply_cast(self, method: str, arguments: Mapping[str, object]) -> bool:
        self.casts.append(method)
        return True

    # --- what Nova does

    async def select(
        self,
        *instances: str,
        run: str = "call1",
        front: Destinations | None = None,
        redelivered: bool = False,
        requested_at: object = None,
        **spec: Any,
    ) -> Any:
        """What a conductor gets: the result of its call."""
        call = Call(
            method="select_destinations",
            arguments={
                "spec_obj": request_spec(**spec),
                "instance_uuids": list(instances),
                "return_objects": True,
                "return_alternates": True,
            },
            version="4.5",
            unique_id=run,
            message_id="1",
            reply_queue="reply",
            redelivered=redelivered,
            timeout_s=60,
            context={"request_id": "req-1", "user_id": "u", "timestamp": requested_at},
        )
        return await (front or self.destinations).call(call)

    async def hold(self, instance: str, host: int, vcpus: int = 1) -> None:
        """As a client of Placement's API claims."""
        write = ConsumerWrite(instance, {self.uuids[host]: {"VCPU": vcpus}}, "p", "u", "INSTANCE", None)
        assert await self.claims.placement.write_allocations([Replace((write,))]) == [None]
        await self.refresh(timeout_s=1.0)

    async def held(self, instance: str) -> list[int]:
        """The hosts on which an instance holds something."""
        found = await self.claims.placement.reads.allocations([instance])
        return sorted(self.uuids.index(uuid) for one in found for uuid in one.allocations if uuid in self.uuids)


def request_spec(**fields: Any) -> Primitive:
    """RequestSpec 1.16 as the conductor serialises it."""
    data: dict[str, Any] = {"project_id": "p", "user_id": "u", "flavor": versioned("Flavor", "1.2", FLAVOR), **fields}
    return versioned("RequestSpec", "1.16", data)


def group(policy: str, members: Sequence[str], **rules: str) -> Primitive:
    """InstanceGroup 1.11; one for each policy."""
    uuid = str(uuid5(NAMESPACE_OID, policy))
    data = {"uuid": uuid, "policy": policy, "members": list(members), "_rules": rules}
    return versioned("InstanceGroup", "1.11", data)


def destination(**fields: Any) -> Primitive:
    """Destination 1.4."""
    return versioned("Destination", "1.4", fields)


def hosts_of(answer: Sequence[Sequence[Primitive]]) -> list[list[str]]:
    """The names of the hosts for each instance."""
    return [[one["nova_object.data"]["service_host"] for one in selections] for selections in answer]
