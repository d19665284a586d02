"""Settings of the Ironic driver: the bare-metal nodes of a compute service, and the Neutron of their ports."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta as Bound
from msgspec import Struct

from bus.contracts.base import Label, Uuid, Word, matching
from bus.contracts.deploy import ImageSource
from bus.openstack.login import KeystoneLogin
from bus.service.settings import Secret

SHARD_VERSION = 82  # Ironic's API has shards since 1.82
HEALTH_VERSION = 109  # and the health of a node since 1.109


class NeutronConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The Neutron in which ports of bare-metal nodes are made."""

    url: str = "http://127.0.0.1:9696"
    """Neutron's API, with or without /v2.0."""
    keystone: KeystoneLogin = KeystoneLogin()
    """As `ironic_sync.keystone`; the user may make ports in the projects of the requests, and read all networks,
    ports and RBAC policies (role admin).
    """
    username: str = ""
    """For HTTP basic, without Keystone."""
    password: Secret = ""
    """For HTTP basic, without Keystone."""
    verify_tls: bool = True
    """Whether Neutron's and Keystone's certificates are verified."""
    ca_file: str = ""
    """A file with the authorities of Neutron's certificate. Empty: the system's."""


class IronicConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The bare-metal nodes of this service. Services of one cell with the same settings share the free nodes by a hash
    ring; a process joins it by starting. A node with an instance of ours stays with the service that its tag names.
    """

    url: str = "http://127.0.0.1:6385"
    """Ironic's API, with or without /v1."""
    keystone: KeystoneLogin = KeystoneLogin()
    """As `ironic_sync.keystone`."""
    token: Secret = ""
    """As `ironic_sync.token`."""
    username: str = ""
    """As `ironic_sync.username`."""
    password: Secret = ""
    """As `ironic_sync.password`."""
    verify_tls: bool = True
    """Whether Ironic's and Keystone's certificates are verified."""
    ca_file: str = ""
    """As `ironic_sync.ca_file`."""
    microversion: Annotated[str, matching(r"^1\.[0-9]{1,3}$", "an API version such as 1.81")] = "1.81"
    """Of Ironic's API. 1.81: the newest that the driver reads; `shards` needs 1.82. From 1.109 on the health that
    Ironic knows of a node counts: Critical disables it, Warning puts it below others.
    """
    images: dict[Label, ImageSource] = {}
    """The meaning of a request's `image`, by name."""
    network: Literal["none", "static", "neutron"] = "none"
    """`static` attaches the ports that a request names to the node's; `neutron` also makes ports on the networks that
    it names, and removes them with the machine; `none` leaves the network alone.
    """
    ports: dict[Uuid, Word] = {}
    """For `network` = `static`: {port: the project whose machines it may be attached to}. Others are refused."""
    neutron: NeutronConfig = NeutronConfig()
    """For `network` = `neutron`."""
    volumes: Literal["none", "static"] = "none"
    """`static` makes the volumes that a request names volume targets of the node, whose storage interface has to be
    Ironic's `external` or `cinder`; `none` refuses them.
    """
    validate: bool = True
    """Whether Ironic validates that a node can be deployed before it is."""
    poll_interval_s: Annotated[float, Bound(gt=0, le=60)] = 0.5
    """Seconds between the first reads of a node that is being changed; the wait grows with the time taken."""
    max_poll_interval_s: Annotated[float, Bound(gt=0, le=600)] = 10.0
    """Longest such wait, and longest wait after Ironic has answered that it is busy (409, 429, 503), in seconds."""
    watch_interval_s: Annotated[float, Bound(gt=0, le=3_600)] = 2.0
    """Seconds between two scans for nodes that appeared or went into maintenance. Longer when a scan takes long."""
    deploy_timeout_s: Annotated[float, Bound(gt=0, le=86_400)] = 3_600.0
    """Seconds that a deployment may take. 1 h: large images on slow disks."""
    clean_timeout_s: Annotated[float, Bound(gt=0, le=86_400)] = 3_600.0
    """Seconds that cleaning may take after a tear-down."""
    release_timeout_s: Annotated[float, Bound(gt=0, le=86_400)] = 600.0
    """Seconds that an attempt waits until the node of the attempt before it has released the instance."""
    lock_timeout_s: Annotated[float, Bound(gt=0, le=3_600)] = 30.0
    """Seconds that a build waits for a node that is locked in Ironic, and for an Ironic that is too busy to answer."""
    outage_timeout_s: Annotated[float, Bound(gt=0, le=3_600)] = 120.0
    """Seconds that a build which has not taken its node waits while Ironic's API, its conductor for the node, or
    Keystone is unavailable. 120: a restart takes less, and the request's `build_timeout_s` (300) more.
    """
    request_timeout_s: Annotated[float, Bound(gt=0, le=600)] = 10.0
    """Seconds that one request to Ironic may take."""
    requests_in_flight: Annotated[int, Bound(ge=1, le=1_000)] = 32
    """Requests to Ironic under way at once; others wait for their turn. 32: a few API workers are kept busy."""
    ring: Annotated[str, matching(r"^[A-Za-z0-9_\-]{0,64}$", "at most 64 letters, digits, _ and -")] = ""
    """The name of the hash ring, for services that spell `url` differently. Empty: derived from the other settings."""
    conductor_group: str | None = None
    """Serve only nodes of this conductor group of Ironic. Not set: of every group."""
    shards: Annotated[tuple[Label, ...], Bound(max_length=1000)] = ()
    """Serve only nodes of these shards. Empty: of every shard."""
    restrict_to_owner: bool = True
    """Whether a node with an owner and no lessee takes builds of its owner alone. One with a lessee always takes the
    lessee's alone.
    """
    share: Annotated[int, Bound(ge=0)] = 0
    """Which part of the free nodes is this cell's, from 0; for several cells on one Ironic."""
    shares: Annotated[int, Bound(ge=1)] = 1
    """The number of such parts."""
    takes_over: Annotated[tuple[Word, ...], Bound(max_length=1000)] = ()
    """Names of services of this cell that do not run any more. Their nodes with instances are this service's."""
    canary_project: Word | None = None
    """Nodes that have failed take builds of this project only, until one of its builds has become active there
    (docs/operate/bare-metal.md). Not set: there is no such trial.
    """

    def __post_init__(self) -> None:
        if self.shards and self._minor < SHARD_VERSION:
            raise ValueError(f"shards need microversion 1.{SHARD_VERSION} or newer; it is {self.microversion}")

    @property
    def _minor(self) -> int:
        return int(self.microversion.partition(".")[2])

    @property
    def more_fields(self) -> dict[str, bool]:
        """Fields of a node that are not always requested, and whether they are now."""
        return {
            "shard": bool(self.shards),
            "health": self._minor >= HEALTH_VERSION,
            "extra,last_error": self.canary_project is not None,
        }


MAX_NAME = 64  # as Word bounds it
