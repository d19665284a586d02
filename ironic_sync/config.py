"""Settings of one ironic_sync process."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta as Bound
from msgspec import Struct

from bus.openstack.keystone import KeystoneLogin
from bus.service.settings import Secret

Seconds = Annotated[float, Bound(gt=0, le=86_400)]


class NotificationBroker(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where Ironic publishes its notifications, when that is not the API bus.

    url: `amqp://user:password@host:port/vhost`, as bus.url; empty: the API bus. Its user needs there: to read the
    exchange `ironic_sync.exchange`, and to make, write to and read the queue `ironic_sync.queue`.
    """

    url: str = ""


class IronicSyncConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one ironic_sync process; BERTH_IRONIC_SYNC__... or [ironic_sync] in the settings file.

    url: Ironic's API, with or without /v1. microversion: the newest field we read is allocation_uuid (1.52).
    keystone: sign in there, and again when the token runs out; token: an X-Auth-Token that another program renews;
    username and password: HTTP basic (Ironic's auth_strategy http_basic); none of them: noauth.
    probe_interval_s: between two small questions to an Ironic that is away; after its first answer all nodes are read.
    ca_file: certificates (PEM) that Ironic's and Keystone's are signed with; empty: those that the system trusts.
    cell: the cell whose compute services serve these nodes: no other may claim them. Empty: any cell may, because
    several share them.
    """

    url: str = "http://127.0.0.1:6385"
    microversion: Annotated[str, Bound(pattern=r"^1\.[0-9]{1,3}$")] = "1.52"
    keystone: KeystoneLogin = KeystoneLogin()
    token: Secret = ""
    username: str = ""
    password: Secret = ""
    verify_tls: bool = True
    ca_file: str = ""
    cell: Annotated[str, Bound(pattern=r"^[A-Za-z0-9_\-]{0,64}\Z")] = ""
    broker: NotificationBroker = NotificationBroker()
    exchange: str = "ironic"
    topics: tuple[str, ...] = ("ironic_versioned_notifications",)
    queue: str = "ironic_sync.notifications"
    prefetch: Annotated[int, Bound(ge=1, le=10_000)] = 512
    bind_retry_s: Seconds = 2.0
    resync_interval_s: Seconds = 60.0
    republish_interval_s: Seconds = 3600.0
    request_timeout_s: Seconds = 10.0
    list_timeout_s: Seconds = 60.0
    page_size: Annotated[int, Bound(ge=1, le=1000)] = 500
    max_nodes: Annotated[int, Bound(ge=1, le=1_000_000)] = 100_000
    reads_in_flight: Annotated[int, Bound(ge=1, le=256)] = 16
    transient_retry_s: Seconds = 1.0
    transient_retry_max_s: Seconds = 60.0
    probe_interval_s: Seconds = 1.0
    failed_retry_s: Seconds = 0.5
    failed_retry_max_s: Seconds = 30.0
    announced_retry_s: Seconds = 0.5
    allocation_retry_s: Seconds = 0.1
    allocation_attempts: Annotated[int, Bound(ge=1, le=100)] = 12
    leader_poll_interval_s: Annotated[float, Bound(gt=0, le=2)] = 1.0  # well below the silence that ends a term
    removed_retention_s: Annotated[float, Bound(gt=0)] = 7 * 86_400.0
