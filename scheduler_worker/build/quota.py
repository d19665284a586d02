"""The room in a project's quota, to which the claims of its builds and of its moves are held."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TypeAlias

from bus.contracts.actions import Condition
from bus.contracts.placement import INSTANCES
from placement_worker.replica.request import total_resources
from scheduler_worker.selection.selector import Selector
from scheduler_worker.store.port import SchedulerStore

Rooms: TypeAlias = Mapping[str, Mapping[str, int]]  # {project: {class: amount}}


async def rooms_of(store: SchedulerStore, selector: Selector, projects: Collection[str]) -> Rooms:
    """Each project's quota, less its instances that hold nothing; placement counts the others. What is between two
    hosts keeps its amounts, because it may claim them without limits. Raises Transient.
    """
    quotas = {project: selector.config.settings.quota_of(project) for project in projects}
    limited = sorted(project for project, quota in quotas.items() if quota)
    for one in await store.without_host(limited) if limited else ():
        flavor = selector.config.flavors.get(one.flavor) if one.condition is Condition.MOVING else None
        kept = {INSTANCES: 1, **({} if flavor is None else total_resources(flavor.query))}
        quota = quotas[one.project_id]
        quotas[one.project_id] = {name: max(0, most - one.count * kept.get(name, 0)) for name, most in quota.items()}
    return quotas
