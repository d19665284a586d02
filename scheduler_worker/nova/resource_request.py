"""A RequestSpec as a candidate query: what Nova's ResourceRequest and its pre-filters make of one, by the same rules.

`resource_request` gives the query that berth searches by; `querystring` writes it as Nova asks it of Placement's
`GET /allocation_candidates`, which is how the translation is tested against Nova's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from placement_worker.replica.request import Query
from scheduler_worker.config import Aggregate
from scheduler_worker.domain.view import Unsatisfiable
from scheduler_worker.nova.request_spec import NotDecided, NovaRequest


class PrefilterSettings(Struct, frozen=True, kw_only=True):
    """The settings of nova.conf that shape a query, under Nova's names and with its defaults. The conductor and the API
    of the same Nova have them too: they must agree.
    """

    max_placement_results: int = 1000
    """`[scheduler]`: the limit of a query. It changes the query string alone: berth looks at every host."""
    enable_isolated_aggregate_filtering: bool = False
    """`[scheduler]`: aggregates with `trait:X` = required are only for requests that require X."""
    limit_tenants_to_placement_aggregate: bool = False
    """`[scheduler]`: a project with aggregates (`filter_tenant_id*`) gets hosts of these."""
    placement_aggregate_required_for_tenants: bool = False
    """`[scheduler]`: a project without such an aggregate gets no host."""
    query_placement_for_image_type_support: bool = False
    """`[scheduler]`: hosts that support the image's disk format."""
    image_metadata_prefilter: bool = False
    """`[scheduler]`: hosts that support the buses and models that the image's properties name."""
    query_placement_for_routed_network_aggregates: bool = False
    """`[scheduler]`: hosts of the segments of the request's networks. Only Neutron knows them: it is not decided."""
    pci_in_placement: bool = False
    """`[filter_scheduler]`: PCI requests of flavors are request groups."""
    disable_fallback_pcpu_query: bool = False
    """`[workarounds]`: pinned CPUs are asked for as PCPU alone."""


class QueryFacts(Protocol):
    """What Nova reads of its own database to shape a query; `facts.NovaFacts` is one."""

    def aggregates(self) -> Sequence[Aggregate]:
        """All host aggregates with their metadata."""

    def nodes_named(self, host: str | None, nodename: str | None = None) -> Sequence[str]:
        """The uuids of the compute nodes of this host, and of this node name; None: any."""

    def cell_of(self, uuid: str) -> str | None:
        """The uuid of the cell that a compute node is in."""


class ResourceRequest(Struct, frozen=True, kw_only=True):
    """The query of one request.

    limit: the most candidates that Nova would ask for; None: all. cpu_pinning_requested: Nova asks a second time with
    `pinning=False`, as VCPU, and takes the candidates of both.
    """

    query: Query
    limit: int | None
    cpu_pinning_requested: bool = False


def undecided(request: NovaRequest, settings: PrefilterSettings) -> NotDecided | None:
    """Why berth does not decide this request, if so."""
    if request.numa_topology is not None:
        return NotDecided("numa_topology", "the request has a NUMA topology")
    return None


def resource_request(
    request: NovaRequest,
    settings: PrefilterSettings,
    facts: QueryFacts,
    *,
    requires_owner: bool,
    pinning: bool = True,
) -> ResourceRequest | Unsatisfiable:
    """The query of a request, pre-filters applied; Unsatisfiable where Nova finds no host without asking for one.

    requires_owner: every compute node's provider has the trait OWNER_NOVA, so that it can be required (Nova compares
    versions of compute services, which its API does not tell). pinning: translate the CPU policy to PCPU (Nova's
    enable_pinning_translate). Raises NotDecided.
    """
    raise NotDecided("not_built", "the translation is being written")
