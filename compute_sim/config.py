"""Settings of a compute service, parsed once and passed down."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from msgspec import Meta as Bound
from msgspec import Struct

from bus.contracts.base import Amount, ClassName, Label, TraitName, Uuid, Word
from bus.contracts.deploy import ImageSource
from bus.openstack.keystone import KeystoneLogin
from bus.service.settings import Secret
from compute_sim.domain.faults import Faults, Rate, Seconds


class Device(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A device of a host: a child provider of its own. under: another device listed before it, or a cell (`numa0`)."""

    name: Word
    inventories: dict[ClassName, Amount] = {}
    traits: tuple[TraitName, ...] = ()
    under: str = ""


class HostSize(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One simulated hypervisor. Ratios are Nova's initial ones.

    disk_gb 0: no disk of its own. numa: so many NUMA cells, whatever `numa_share` says. devices:
    docs/howto/nested-hosts.md.
    aggregates: the host says itself which it is in; empty: that is left to others.
    """

    vcpus: Annotated[int, Bound(ge=1, le=2**20)] = 64
    memory_mb: Annotated[int, Bound(ge=1, le=2**30)] = 262_144
    disk_gb: Annotated[int, Bound(ge=0, le=2**30)] = 4_000
    reserved_memory_mb: Annotated[int, Bound(ge=0)] = 512
    cpu_ratio: Annotated[float, Bound(gt=0, le=1000)] = 4.0
    memory_ratio: Annotated[float, Bound(gt=0, le=1000)] = 1.0
    disk_ratio: Annotated[float, Bound(gt=0, le=1000)] = 1.0
    numa: Annotated[int, Bound(ge=0, le=16)] = 0
    devices: Annotated[tuple[Device, ...], Bound(max_length=64)] = ()
    aggregates: Annotated[tuple[Uuid, ...], Bound(max_length=16)] = ()

    def __post_init__(self) -> None:
        above = {"", *(f"numa{cell}" for cell in range(16))}
        for device in self.devices:
            if device.name in above or device.under not in above:
                raise ValueError(
                    f"device {device.name!r} under {device.under!r}: names are unique, the upper one first"
                )
            above.add(device.name)


SHARD_VERSION = 82  # Ironic's API has shards since 1.82


class IronicConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the bare-metal nodes are.

    Services of one cell with the same settings share the free nodes by a hash ring: one more is one more process.
    ring: the name of the ring, for services that spell the url differently (empty: derived from the others).
    conductor_group: only nodes of this group of Ironic's; shards: only of one of these shards (microversion 1.82).
    share of shares: for several cells on one Ironic; which free nodes are this cell's, by a hash of uuids.
    url: with or without /v1. keystone, token, username and password, verify_tls, ca_file: as for ironic_sync.
    images: what a request's `image` means, by name. network: `static` attaches the ports that a request names.
    validate: ask Ironic whether the node can be deployed before it is.
    A node with an instance of ours stays with the service that its mark names. takes_over: names of services of this
    cell that run no more, whose marked nodes are this service's now.
    watch_interval_s: between two scans for nodes that came, or went into maintenance; longer when a scan takes long.
    poll_interval_s, max_poll_interval_s: between two reads of a node on its way; it grows with the time taken.
    release_timeout_s: so long an attempt waits until the node of the one before has let go of the instance;
    lock_timeout_s: until a node that is locked is not.
    """

    url: str = "http://127.0.0.1:6385"
    keystone: KeystoneLogin = KeystoneLogin()
    token: Secret = ""
    username: str = ""
    password: Secret = ""
    verify_tls: bool = True
    ca_file: str = ""
    microversion: Annotated[str, Bound(pattern=r"^1\.[0-9]{1,3}$")] = "1.81"
    images: dict[Label, ImageSource] = {}
    network: Literal["none", "static"] = "none"
    validate: bool = True
    poll_interval_s: Annotated[float, Bound(gt=0, le=60)] = 0.5
    max_poll_interval_s: Annotated[float, Bound(gt=0, le=600)] = 10.0
    watch_interval_s: Annotated[float, Bound(gt=0, le=3_600)] = 2.0
    deploy_timeout_s: Annotated[float, Bound(gt=0, le=86_400)] = 3_600.0
    clean_timeout_s: Annotated[float, Bound(gt=0, le=86_400)] = 3_600.0
    release_timeout_s: Annotated[float, Bound(gt=0, le=86_400)] = 600.0
    lock_timeout_s: Annotated[float, Bound(gt=0, le=3_600)] = 30.0
    request_timeout_s: Annotated[float, Bound(gt=0, le=600)] = 10.0
    ring: Annotated[str, Bound(pattern=r"^[A-Za-z0-9_\-]{0,64}$")] = ""
    conductor_group: str | None = None
    shards: Annotated[tuple[Label, ...], Bound(max_length=1000)] = ()
    share: Annotated[int, Bound(ge=0)] = 0
    shares: Annotated[int, Bound(ge=1)] = 1
    takes_over: Annotated[tuple[Word, ...], Bound(max_length=1000)] = ()

    def __post_init__(self) -> None:
        if self.shards and int(self.microversion.partition(".")[2]) < SHARD_VERSION:
            raise ValueError(f"shards need microversion 1.{SHARD_VERSION} or newer; it is {self.microversion}")


MAX_NAME = 64  # as Word bounds it


def default_service(cell: str, host: str) -> str:
    """A compute service's name when none is given: its cell and the machine's host name, so that no two are alike."""
    short = host.split(".", maxsplit=1)[0] or "localhost"
    return re.sub(r"[^A-Za-z0-9_-]", "-", f"{cell}-{short}")[:MAX_NAME]


class ComputeConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One compute service.

    driver: what manages the machines. hosts, sizes (dealt out in turn), gpu_share, numa_share, seed, faults: the
    simulated fleet. counts: so many hosts of each of `sizes` in a round, mixed evenly; empty: one of each.
    nested False: hosts are reported as before there were trees, everything at the root; the first
    report with True moves what is allocated. state_dir: where it remembers across processes; None = in memory only.
    max_builds_per_host: as Nova's max_concurrent_builds. max_builds: builds under way in the service.
    max_accepted: builds accepted and not ended; beyond it a build is sent elsewhere.
    max_build_s: the service gives a build up after this, whatever its conductor thinks.
    name_wait_s: a service whose name another process holds waits so long, then ends.
    """

    driver: Literal["hypervisor", "ironic"] = "hypervisor"
    hosts: Annotated[int, Bound(ge=0, le=1_000_000)] = 25
    sizes: Annotated[tuple[HostSize, ...], Bound(min_length=1, max_length=64)] = (HostSize(),)
    counts: Annotated[tuple[Annotated[int, Bound(ge=1, le=1_000_000)], ...], Bound(max_length=64)] = ()
    gpu_share: Rate = 0.1
    gpus_per_host: Annotated[int, Bound(ge=1, le=16)] = 2
    vgpus_per_gpu: Annotated[int, Bound(ge=1, le=64)] = 8
    numa_share: Rate = 0.0
    nested: bool = True
    seed: int = 1
    faults: Faults = Faults()
    ironic: IronicConfig = IronicConfig()
    state_dir: str | None = None
    heartbeat_interval_s: Annotated[float, Bound(gt=0, le=3600)] = 1.0
    report_interval_s: Annotated[float, Bound(gt=0, le=86_400)] = 60.0
    max_builds_per_host: Annotated[int, Bound(ge=1, le=10_000)] = 10
    max_builds: Annotated[int, Bound(ge=1, le=100_000)] = 5_000
    max_accepted: Annotated[int, Bound(ge=1, le=1_000_000)] = 20_000
    max_build_s: Seconds = 3_600.0
    name_wait_s: Annotated[float, Bound(gt=0, le=3_600)] = 60.0
    destroy_attempts: Annotated[int, Bound(ge=1, le=100)] = 8

    def __post_init__(self) -> None:
        if self.counts and len(self.counts) != len(self.sizes):
            raise ValueError(f"{len(self.counts)} counts for {len(self.sizes)} sizes: one of each, or none")
