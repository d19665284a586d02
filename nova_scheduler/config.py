"""Settings of the frontend of a real Nova, under Nova's names where Nova has them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Literal
from urllib.parse import urlencode

from msgspec import Meta as Bound
from msgspec import Struct

from bus.contracts.base import Zone, matching
from bus.openstack.login import KeystoneLogin
from bus.rabbitmq.address import BadBusUrl
from bus.service.settings import Secret
from nova_scheduler.cloud.api_config import NovaApiConfig, Seconds
from nova_scheduler.wire.queues import RabbitOptions
from scheduler_worker.config import HOST_FACT_FILTERS

# Those that Nova enables of itself.
NOVA_FILTERS = (
    "ComputeFilter",
    "ComputeCapabilitiesFilter",
    "ImagePropertiesFilter",
    "ServerGroupAntiAffinityFilter",
    "ServerGroupAffinityFilter",
)
NUMA_FILTER, PCI_FILTER = "NUMATopologyFilter", "PciPassthroughFilter"
# Nova's filters that berth does not have, and the hint that each reads.
NOT_OWNED: Mapping[str, str] = {"JsonFilter": "query", "SimpleCIDRAffinityFilter": "build_near_host_ip"}
# Those that berth runs where it reads the cells' databases; elsewhere the requests that they read are not decided.
DEVICE_FILTERS = (NUMA_FILTER, PCI_FILTER)
PASSES_ALL = "AllHostsFilter"
_FACT_FILTERS = frozenset(path.rpartition(".")[2] for path in HOST_FACT_FILTERS)
PORT = 5672  # of a host that names none: oslo.messaging's, with TLS too
# The parameters of an `amqps://` address, by the options that name the files.
TLS_FILES = {"cacertfile": "ssl_ca_file", "certfile": "ssl_cert_file", "keyfile": "ssl_key_file"}
_HAS_PORT = re.compile(r":\d+$")


# What AMQP lets a name of a queue or an exchange have.
CHARACTERS = "a-zA-Z0-9_.:@#,/+ -"
Topic = Annotated[str, matching(rf"\A[{CHARACTERS}]{{1,200}}\Z", "1 to 200 letters, digits, spaces and _.:@#,/+-")]


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


class NotificationSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[notifications]` of nova.conf, under Nova's names. Published to the broker of `transport_url`."""

    notification_format: Literal["none", "versioned"] = "none"
    """`versioned`: `scheduler.select_destinations.start` and `.end` are published as Nova 34 does. The unversioned form
    is not there.
    """
    versioned_notifications_topics: Annotated[tuple[Topic, ...], Bound(max_length=8)] = ("versioned_notifications",)
    """Topics that they are published to."""

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that notifications of the priority INFO have, and their queues; none: there are none."""
        topics = self.versioned_notifications_topics if self.notification_format == "versioned" else ()
        return tuple(f"{topic}.info" for topic in topics)


class TrialSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of `berth nova trial`, which reads the OpenStack Placement of a Nova and changes nothing."""

    placement_url: Annotated[str, matching(r"^https?://", "an address that begins with http:// or https://")] = (
        "http://127.0.0.1:8778"
    )
    """Placement's API, as its endpoint in Keystone has it."""
    placement_database: Secret = ""
    """The address of Placement's database, instead of its API: of a user that may read its tables, with an asynchronous
    driver: `mysql+aiomysql://USER:PASSWORD@HOST/placement`, `postgresql+asyncpg://...`. Nothing is written there.
    """
    database_interval_s: Seconds = 5.0
    """Seconds between two reads of the database, each of which is of one moment."""
    keystone: KeystoneLogin = KeystoneLogin()
    """Credentials for Keystone, of a user that may read resource providers and their allocations. The token is renewed
    when it expires.
    """
    token: Secret = ""
    """An X-Auth-Token that another program renews."""
    verify_tls: bool = True
    """Whether Placement's and Keystone's certificates are verified."""
    ca_file: str = ""
    """Certificates (PEM) of the authorities that sign them. Empty: those that the system trusts."""
    request_timeout_s: Seconds = 30.0
    """Seconds that one request may take."""
    interval_s: Seconds = 1.0
    """Seconds between two reads of the providers' generations, and of what has moved."""
    whole_s: Seconds = 60.0
    """Seconds within which the allocations of every provider are read: what a server held that was deleted counts for
    as long, as `DELETE /allocations` moves no generation.
    """
    answer_s: Seconds = 60.0
    """Seconds that the allocations of a call's servers are waited for: the stock scheduler's choice is read there."""


class NovaConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of each process that answers the topic `scheduler` of a Nova. How hosts are weighed is in `[scheduler]`."""

    transport_url: Secret = ""
    """The virtual host of Nova's services, as `bus.url`; the same that `transport_url` of nova.conf names."""
    host: Annotated[
        str, matching(rf"\A[{CHARACTERS}]{{0,245}}\Z", "at most 245 letters, digits, spaces and _.:@#,/+-")
    ] = ""
    """The name of this server (`scheduler.HOST`), as `host` of nova.conf. Empty: the machine's."""
    control_exchange: Annotated[
        str, matching(rf"\A[{CHARACTERS}]{{1,127}}\Z", "1 to 127 letters, digits, spaces and _.:@#,/+-")
    ] = "nova"
    """As in nova.conf."""
    rabbit: RabbitOptions = RabbitOptions()
    """`[oslo_messaging_rabbit]` of nova.conf."""
    fallback_url: Secret = ""
    """The virtual host on which a stock nova-scheduler takes what berth does not decide. Empty: that fails."""
    shadow: bool = False
    """The fallback's nova-scheduler decides; berth decides beside it without a claim, and reports the difference."""
    enabled_filters: tuple[str, ...] = NOVA_FILTERS
    """`[filter_scheduler] enabled_filters` of nova.conf, instead of `scheduler.enabled_filters`, in the order in which
    they run. What only a filter reads that is not among them is ignored, as in Nova; what JsonFilter and
    SimpleCIDRAffinityFilter read, which berth does not have, is left to the fallback, and without
    `nova.api.cell_databases` so is what NUMATopologyFilter and PciPassthroughFilter read. With another one that is
    neither berth's nor in `scheduler.available_filters` (an operator's own), or one of the number of instances without
    `nova.api.cell_databases`, every call is; without a fallback the process does not start."""
    packing_host_numa_cells_allocation_strategy: bool = False
    """`[compute]`: instances get the NUMA nodes of a host that are used most, instead of least."""
    image_properties_default_architecture: Annotated[str, Bound(max_length=32)] = ""
    """`[filter_scheduler]`: the architecture of images that name none. Empty: they run on each."""
    default_availability_zone: Zone = "nova"
    """As in nova.conf: the zone of hosts that are in no aggregate with a zone."""
    release: Literal[29, 30, 31, 32, 33, 34] = 34
    """The release of Nova's conductor and API, with whose newest microversion it is compared. What a release does not
    have is not applied: before 34 the trait OWNER_NOVA is not required, even where every host has it.
    """
    prefilters: PrefilterSettings = PrefilterSettings()
    """The settings of nova.conf that shape a query."""
    notifications: NotificationSettings = NotificationSettings()
    """What is published about each call."""
    api: NovaApiConfig = NovaApiConfig()
    """Where hosts, services and aggregates are read."""
    trial: TrialSettings = TrialSettings()
    """The trial beside a Nova that has an OpenStack Placement."""

    @property
    def is_one_of_two(self) -> bool:
        """Whether another scheduler decides what berth does not."""
        return bool(self.fallback_url) or self.shadow

    @property
    def own_filters(self) -> tuple[str, ...]:
        """Those of the enabled filters that berth runs."""
        others = {*NOT_OWNED, PASSES_ALL, *(() if self.api.cell_databases else DEVICE_FILTERS)}
        return tuple(one for one in self.enabled_filters if one not in others)

    @property
    def device_filters(self) -> tuple[str, ...]:
        """Those of them that read NUMA nodes and PCI devices."""
        return tuple(one for one in self.enabled_filters if one in DEVICE_FILTERS)

    @property
    def undecided_filters(self) -> tuple[str, ...]:
        """Those of the enabled filters whose requests are not decided here."""
        return tuple(one for one in self.enabled_filters if one != PASSES_ALL and one not in self.own_filters)

    @property
    def fact_filters(self) -> tuple[str, ...]:
        """Those of the enabled filters that read what the cells' databases tell of hosts."""
        return tuple(one for one in self.enabled_filters if one.rpartition(".")[2] in _FACT_FILTERS)


def as_amqp(url: str, options: RabbitOptions | None = None) -> str:
    """A URL as nova.conf has it (`rabbit://USER:PASSWORD@HOST,USER:PASSWORD@HOST/VHOST`) in berth's form, with the user
    before the first host alone; any other stays as it is. options: with `ssl` it is `amqps://`, with their files.
    Raises BadBusUrl: the users differ.
    """
    scheme, _, rest = url.partition("://")
    if scheme != "rabbit":
        return url
    authority, slash, path = rest.partition("/")
    users, hosts = zip(*(one.rpartition("@")[::2] for one in authority.split(",")), strict=True)
    if len(named := {user for user in users if user}) > 1:
        raise BadBusUrl("all its hosts are asked as one user, and it names several")
    login = "".join(f"{user}@" for user in named)
    if options is None or not options.ssl:
        return f"amqp://{login}{','.join(hosts)}{slash}{path}"
    at = ",".join(host if _HAS_PORT.search(host) else f"{host}:{PORT}" for host in hosts)
    files = {parameter: value for parameter, name in TLS_FILES.items() if (value := getattr(options, name))}
    query = f"{'&' if '?' in path else '?'}{urlencode(files)}" if files else ""
    return f"amqps://{login}{at}{slash or '/'}{path}{query}"
