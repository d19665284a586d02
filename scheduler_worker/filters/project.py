"""Does the host take builds of the request's project: by its own report, or by its aggregates?"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from scheduler_worker.config import Aggregate
from scheduler_worker.selection.flavor_query import TENANT_KEY, tenants
from scheduler_worker.selection.host_view import HostsView
from scheduler_worker.selection.plugin import NONE_REJECTED, FilterResult, filter_result_of, filter_result_of_members
from scheduler_worker.selection.request_spec import RequestSpec


class ProjectHostFilter:
    """A host whose service names a project for it takes builds of that project only; as an Ironic node its lessee's."""

    name: ClassVar[str] = "ProjectHostFilter"

    def filter(self, view: HostsView, spec: RequestSpec) -> FilterResult:
        """One comparison of columns; nothing at all while no host belongs to a project."""
        if not view.table.projects:
            return FilterResult(np.ones(len(view), dtype=np.bool_), NONE_REJECTED)
        return filter_result_of(view.open_to(spec.project_id), "host.of_another_project")


class AggregateMultiTenancyIsolation:
    """A host in an aggregate with `filter_tenant_id*` metadata is for those projects only; others are open to all.

    As in Nova: the values of all such keys of all the host's aggregates make one list of allowed projects.
    """

    name: ClassVar[str] = "AggregateMultiTenancyIsolation"

    def filter(self, view: HostsView, spec: RequestSpec) -> FilterResult:
        """Restricted hosts pass when any of their aggregates names the project."""

        def names(aggregate: Aggregate) -> bool:
            return spec.project_id in tenants(aggregate.metadata)

        return filter_result_of_members(view, view.membership.with_prefix(TENANT_KEY), names, "tenant.not_allowed")
