"""Settings of the reads of Nova's REST API."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta as Bound
from msgspec import Struct

from bus.contracts.base import Uuid, matching
from bus.openstack.login import KeystoneLogin
from bus.service.settings import Secret

Seconds = Annotated[float, Bound(gt=0, le=86_400)]


class NovaApiConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where Nova's hosts, services and aggregates are read, and how often."""

    url: Annotated[str, matching(r"^https?://", "an address that begins with http:// or https://")] = (
        "http://127.0.0.1:8774/v2.1"
    )
    """Nova's API, as its endpoint in Keystone has it."""
    keystone: KeystoneLogin = KeystoneLogin()
    """Credentials for Keystone, of a user that may list hypervisors, services, aggregates, and the servers of every
    project. The token is renewed when it expires.
    """
    token: Secret = ""
    """An X-Auth-Token that another program renews; of a Nova with `auth_strategy` = `noauth2`, USER:PROJECT."""
    verify_tls: bool = True
    """Whether Nova's and Keystone's certificates are verified."""
    ca_file: str = ""
    """Certificates (PEM) of the authorities that sign Nova's and Keystone's. Empty: those that the system trusts."""
    request_timeout_s: Seconds = 30.0
    """Seconds that one request may take."""
    page_size: Annotated[int, Bound(ge=1, le=1000)] = 500
    """Rows in one page. Nova gives at most `[api] max_limit` of them."""
    poll_interval_s: Seconds = 5.0
    """Seconds between two reads of services and aggregates."""
    states_max_age_s: Annotated[float, Bound(ge=0, le=86_400)] = 5.0
    """Seconds that the last of these reads may be ago when a call is decided: so long a nova-compute that an operator
    has forced down may count as up. If it is longer ago, the call waits for another read, which calls at the same time
    share. 0: each call is decided by a read that began after it came, as a stock nova-scheduler decides.
    """
    hosts_interval_s: Seconds = 60.0
    """Seconds between two reads of all compute nodes. A new one is read before a request fails for want of a host."""
    cells: dict[Uuid, tuple[str, ...]] = {}
    """The cells of Nova by uuid, each with its hosts: names, or patterns with `*`. A host is in the first that names
    it. `nova-manage cell_v2 list_cells` prints the uuids.
    """
    cells_database: Secret = ""
    """Instead of `cells`: the address of Nova's API database, as `[api_database] connection` has it, of a user that may
    read `cell_mappings` and `host_mappings`. Nothing else is read there, and nothing written.
    """
    cell_databases: dict[Uuid, Secret] = {}
    """The addresses of Nova's cell databases by uuid of the cell, each of a user that may read `compute_nodes`,
    `instances` and `migrations`, with an asynchronous driver: `mysql+aiomysql://USER:PASSWORD@HOST/nova_cell1`,
    `postgresql+asyncpg://...`. From there come the numbers and the hardware of hosts that Nova's API does not tell.
    Nothing else is read there, nothing written.
    """
    facts_interval_s: Annotated[float, Bound(ge=2, le=3_600)] = 5.0
    """Seconds between two reads of a cell's database. At least 2: the times of its rows have whole seconds."""
    facts_max_age_s: Seconds = 60.0
    """Seconds that the last complete read of a cell's database may be ago. While it is longer ago, nothing is placed on
    the cell's hosts by a filter that needs what is read there. If there is a fallback, what needs it is left to that.
    """
