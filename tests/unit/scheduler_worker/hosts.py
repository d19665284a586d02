"""A replica and a host table to decide on, made by hand."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bus.clock import new_uuid
from bus.contracts.build import BuildRequest
from bus.contracts.cell import HostReport, HostStates
from bus.contracts.placement import ProviderState
from placement_worker.replica.replica import Replica
from scheduler_worker import plugins
from scheduler_worker.config import Aggregate, SchedulerConfig
from scheduler_worker.hosts.host_table import HostTable
from scheduler_worker.selection.flavor import parse
from scheduler_worker.selection.host_view import HostsView
from scheduler_worker.selection.plugin import Filter, Weighing
from scheduler_worker.selection.request_spec import RequestSpec
from scheduler_worker.selection.selector import Selector
from scheduler_worker.selection.selector_config import SelectorConfig

PLENTY = {"VCPU": 16, "MEMORY_MB": 65536, "DISK_GB": 1000}


class Hosts:
    """Hosts h0, h1, ... by what each has; cells and services as given."""

    def __init__(
        self,
        amounts: Sequence[Mapping[str, int]],
        *,
        config: SchedulerConfig | None = None,
        cells: Sequence[str] = (),
        members: Mapping[str, Sequence[int]] | None = None,
        reports: Mapping[int, Mapping[str, Any]] | None = None,
        filters: Sequence[Filter] | None = None,
        weighings: Sequence[Weighing] | None = None,
        seed: int = 3,
    ) -> None:
        self.rng = random.Random(seed)
        self.config = config or SchedulerConfig()
        self.uuids = [new_uuid(self.rng) for _ in amounts]
        self.replica, self.table = Replica(), HostTable()
        self.states = [
            self._state(at, dict(mine), [a for a, rows in (members or {}).items() if at in rows])
            for at, mine in enumerate(amounts)
        ]
        self.replica.load(self.states, 0)
        self.announce(cells or ["c1"] * len(amounts), reports or {})
        self.selector = Selector(
            self.replica,
            self.table,
            SelectorConfig(
                self.config,
                flavors={name: parse(name, flavor) for name, flavor in self.config.flavors.items()},
                filters=plugins.filters(self.config) if filters is None else filters,
                weighings=plugins.weighings(self.config) if weighings is None else weighings,
            ),
        )

    def _state(self, at: int, amounts: dict[str, int], aggregates: list[str]) -> ProviderState:
        return ProviderState(
            uuid=self.uuids[at],
            name=f"h{at}",
            root_uuid=self.uuids[at],
            generation=1,
            spec_generation=1,
            inventories={name: (total, 1, total, 1, total, 0, 1.0) for name, total in amounts.items()},
            aggregates=tuple(aggregates),
        )

    def announce(self, cells: Sequence[str], reports: Mapping[int, Mapping[str, Any]], *, sequence: int = 1) -> None:
        for cell in dict.fromkeys(cells):
            hosts = tuple(
                HostReport(uuid=uuid, name=f"h{at}", **reports.get(at, {}))
                for at, uuid in enumerate(self.uuids)
                if cells[at] == cell
            )
            self.table.apply(
                HostStates(
                    service=f"compute-{cell}", cell=cell, epoch=1, sequence=sequence, hosts=hosts, complete=True
                ),
                0.0,
            )

    def give_up(self, cell: str = "c1", *, sequence: int = 2) -> None:
        """The service that has reported this cell's hosts has none any more: others may report them."""
        self.table.apply(
            HostStates(service=f"compute-{cell}", cell=cell, epoch=1, sequence=sequence, complete=True), 0.0
        )

    def request(self, flavor: str = "m1.small", **more: Any) -> BuildRequest:
        more.setdefault("project_id", "demo")
        return BuildRequest(instance_uuid=new_uuid(self.rng), flavor=flavor, **more)

    def spec(self, flavor: str = "m1.small", **more: Any) -> RequestSpec:
        spec = self.selector.request_spec(self.request(flavor, **more))
        assert isinstance(spec, RequestSpec), spec
        return spec

    def view(self) -> HostsView:
        rows = np.array([self.replica.row_of(uuid) for uuid in self.uuids], dtype=np.intp)
        index = np.array([self.table.index_of(uuid) for uuid in self.uuids], dtype=np.intp)
        down = self.table.services.down()
        membership, metrics = self.selector.config.membership, self.selector.metrics
        return HostsView(self.replica, self.table, membership, rows=rows, index=index, down=down, metrics=metrics)

    def name(self, row: int) -> str:
        return self.replica.name_of(row)


def aggregate(name: str, **metadata: str) -> Aggregate:
    """An aggregate with a uuid made of its name."""
    return Aggregate(uuid=new_uuid(random.Random(name)), name=name, metadata=metadata)
