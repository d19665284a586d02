"""Does the host belong to another project?"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from scheduler_worker.domain.plugins import NONE_REJECTED, Verdict, verdict_of
from scheduler_worker.domain.request_spec import RequestSpec
from scheduler_worker.domain.view import HostsView


class ProjectHostFilter:
    """A host whose service names a project for it takes builds of that project only; as an Ironic node its lessee's."""

    name: ClassVar[str] = "ProjectHostFilter"

    def filter(self, view: HostsView, spec: RequestSpec) -> Verdict:
        """One comparison of columns; nothing at all while no host belongs to a project."""
        if not view.table.projects:
            return Verdict(np.ones(len(view), dtype=np.bool_), NONE_REJECTED)
        return verdict_of(view.open_to(spec.project_id), "host.of_another_project")
