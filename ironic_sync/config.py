"""Settings of one ironic_sync process."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta as Bound
from msgspec import Struct

from bus.contracts.base import matching
from bus.openstack.login import KeystoneLogin
from bus.service.settings import Secret

Seconds = Annotated[float, Bound(gt=0, le=86_400)]


class NotificationBroker(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The broker to which Ironic publishes its notifications, when that is not the API bus."""

    url: str = ""
    """As `bus.url`; empty: the API bus. The user needs permission to read the exchange `ironic_sync.exchange`, and
    to declare, write to and read the queue `ironic_sync.queue`.
    """


class IronicSyncConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one ironic_sync process."""

    name: Annotated[str, matching(r"^[a-z0-9_]{0,32}\Z", "at most 32 of a to z, 0 to 9 and _")] = ""
    """Which Ironic this is, where several are followed side by side (docs/operate/bare-metal.md): each has
    `ironic-sync` processes of its own under a name of its own. Empty: the only one.
    """
    url: str = "http://127.0.0.1:6385"
    """Ironic's API, with or without /v1."""
    microversion: Annotated[str, matching(r"^1\.[0-9]{1,3}$", "an API version such as 1.81")] = "1.83"
    """Of Ironic's API, at most: an Ironic that is older is asked with its newest, down to 1.52. 1.83: the newest field
    that is read is `parent_node`.
    """
    keystone: KeystoneLogin = KeystoneLogin()
    """Credentials for Keystone. The token is renewed when it expires."""
    token: Secret = ""
    """An X-Auth-Token that another program renews."""
    username: str = ""
    """With `password`: HTTP basic (Ironic's `auth_strategy` = `http_basic`). None of the four: `noauth`."""
    password: Secret = ""
    """For `username`."""
    verify_tls: bool = True
    """Whether Ironic's and Keystone's certificates are verified."""
    ca_file: str = ""
    """Certificates (PEM) of the authorities that sign Ironic's and Keystone's. Empty: those that the system trusts."""
    cell: Annotated[str, matching(r"^[A-Za-z0-9_\-]{0,64}\Z", "at most 64 letters, digits, _ and -")] = ""
    """The cell whose compute services serve these nodes; no other may claim them. Empty: any cell may, because
    several share them.
    """
    broker: NotificationBroker = NotificationBroker()
    """The broker of Ironic's notifications."""
    exchange: str = "ironic"
    """The exchange that Ironic publishes its notifications to: oslo.messaging's `control_exchange`."""
    topics: tuple[str, ...] = ("ironic_versioned_notifications", "notifications")
    """Topics of the notifications; each is bound with every priority (`TOPIC.info`, ...). `notifications` is that of
    sensor data ([sensor_data] in ironic.conf).
    """
    queue: str = "ironic_sync.notifications"
    """The queue that is bound to them, followed by a dot and `name` where there is one. Only this deployment may
    consume from it.
    """
    prefetch: Annotated[int, Bound(ge=1, le=10_000)] = 512
    """Unacknowledged notifications that the broker delivers ahead."""
    bind_retry_s: Seconds = 2.0
    """Seconds between two tries to bind the queue while Ironic's exchange does not exist."""
    resync_interval_s: Seconds = 60.0
    """Seconds between two reads of all nodes, in case a notification was lost."""
    republish_interval_s: Seconds = 3600.0
    """Seconds between two publications of every node's inventory, in case placement lost one."""
    request_timeout_s: Seconds = 10.0
    """Seconds that the read of one node may take."""
    list_timeout_s: Seconds = 60.0
    """Seconds that one page of all nodes may take."""
    page_size: Annotated[int, Bound(ge=1, le=1000)] = 500
    """Nodes in one page."""
    max_nodes: Annotated[int, Bound(ge=1, le=1_000_000)] = 100_000
    """The most nodes that are followed; further ones are logged (`ironic.too_many_nodes`) and left out. As many again
    that are gone stay on record.
    """
    reads_in_flight: Annotated[int, Bound(ge=1, le=256)] = 16
    """Reads of single nodes under way."""
    transient_retry_s: Seconds = 1.0
    """Seconds until a node in a transient state is read again; the wait doubles."""
    transient_retry_max_s: Seconds = 60.0
    """Longest such wait, in seconds."""
    probe_interval_s: Seconds = 1.0
    """Seconds between two small requests to an unavailable Ironic. After its first answer all nodes are read."""
    failed_retry_s: Seconds = 0.5
    """Seconds until a failed read is repeated; the wait doubles."""
    failed_retry_max_s: Seconds = 30.0
    """Longest such wait, in seconds."""
    announced_retry_s: Seconds = 0.5
    """Seconds after a notification that announces a change before the node is read without a further one."""
    allocation_retry_s: Seconds = 0.1
    """Seconds until an Ironic allocation without a node is read again; the wait doubles."""
    allocation_tries: Annotated[int, Bound(ge=1, le=100)] = 12
    """Reads of one such allocation before it is left to the next read of all nodes."""
    leader_poll_interval_s: Annotated[float, Bound(gt=0, le=2)] = 1.0
    """Seconds between two tries to become the leader, and between two renewals of its lease of 5 seconds."""
    absent_retention_s: Annotated[float, Bound(ge=0, le=366 * 86_400)] = 7 * 86_400.0
    """Seconds that a node of which Ironic answers that there is none stays in placement, held back and named as
    `node.absent`, before it is removed with what operators gave it. One whose deletion Ironic announced is removed at
    once.
    """
    removed_retention_s: Annotated[float, Bound(gt=0)] = 7 * 86_400.0
    """Seconds that a removed node stays on record and its removal is repeated."""

    @property
    def own_queue(self) -> str:
        """The queue of this Ironic's notifications."""
        return f"{self.queue}.{self.name}" if self.name else self.queue
