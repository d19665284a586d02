"""A request that fits nowhere, explained: the funnel, a sentence for a person, and the claims that got nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from bus.contracts.build import FunnelStep
from bus.contracts.placement import ConflictingConsumer
from placement_worker.replica.request import RejectedRoots, total_resources
from scheduler_worker.selection.request_spec import RequestSpec


class FailedClaim(Struct, frozen=True):
    """A claim that got nothing."""

    what: str  # "host: outcome"
    # they hold what it was to take, where placement names them
    conflicting_consumers: tuple[ConflictingConsumer, ...] = ()


NEAREST = 3  # misses that an explanation names
# The meaning of the funnel's stable codes, in words. A code that is not here is shown as it is.
PHRASES = {
    "host.disabled": "are disabled",
    "host.maintenance": "are in maintenance",
    "host.fenced": "are fenced",
    "service.down": "have a compute service that is down",
    "tenant.not_allowed": "are reserved for other projects",
    "host.other_cell": "are in another cell",
    "cell.disabled": "are in a cell that is disabled",
    "host.not_reported": "are reported by no compute service",
    "host.ignored": "were ignored as requested",
    "host.not_forced": "cannot be forced by this request",
    "flavor.not_listed": "are reserved for other flavors",
    "image.isolated": "are kept for other images, or the image is kept for other hosts",
    "host.io_ops": "have as many instances that are built or moved as they may",
    "host.num_instances": "have as many instances as they may",
    "host.options_unsuited": "have what is requested only on providers that do not suit",
    "host.load_unknown": "have a number of instances that is not known",
    "image.not_supported": "do not support the image's properties",
    "group.no_capacity": "have as many of the server group as they may",
    "group.elsewhere": "are not where the server group is",
    "hint.different_host": "have an instance that it is to keep away from",
    "hint.same_host": "have none of the instances that it is to be with",
    "numa.cpu_ratio": "have NUMA nodes whose shared CPUs would be overcommitted beyond the ratio",
    "numa.hyperthreads": "have hyperthreads, and the instance is to have none",
    "numa.inconsistent": "have NUMA nodes on which Nova's own fit would fail",
    "numa.in_flight": "have NUMA nodes that instances on their way there may use",
    "numa.memory": "have too little memory on each NUMA node",
    "numa.networks": "have the instance's networks beside other NUMA nodes",
    "numa.no_topology": "report no NUMA nodes",
    "numa.pages": "have too few free memory pages of the requested size",
    "numa.pci": "have the requested PCI devices only beside other NUMA nodes than those with room",
    "numa.pcpus": "have too few free CPUs for dedicated use on each NUMA node",
    "numa.ram_ratio": "have NUMA nodes whose memory would be overcommitted beyond the ratio",
    "numa.threads": "have not the free cores that the CPU thread policy requires",
    "numa.too_few_cells": "have fewer NUMA nodes than the instance",
    "numa.too_many_arrangements": "have too many NUMA nodes to try all arrangements",
    "numa.unknown": "have NUMA nodes of which nothing is known",
    "numa.vcpus": "have too few shared CPUs on each NUMA node",
    "pci.in_flight": "have PCI devices that instances on their way there may use",
    "pci.no_match": "have too few free PCI devices of the requested kind",
    "pci.numa_affinity": "have the requested PCI devices only beside other NUMA nodes",
    "pci.other_provider": "have not free what Placement has allocated of their PCI devices",
    "pci.physical_function": "have only physical functions free, which were not requested",
    "pci.remote_managed": "have only remote-managed devices free, which were not requested",
    "pci.split_provider": "have the PCI devices of one resource provider in several pools",
    "pci.unknown": "have PCI devices of which nothing is known",
    "pci.vdpa": "have only VDPA devices free, which were not requested",
    "claim.policy_violated": "were ruled out by the server group during the claim",
    "claim.no_capacity": "were taken during the claim",
    "claim.provider_removed": "left during the claim",
    "claim.conflict": "kept changing during the claim",
    "ignored": "were ignored as requested",
    "not among those requested": "are not among the hosts that were requested",
    "nothing is requested": "are all alike, because no resources are requested",
    "traits and resources not on the same providers": "have the required traits, but not where the resources are free",
    "too many combinations to try": "have too many combinations of providers to try them all",
}

# The search's phrases for an amount of a resource class.
AMOUNTS = {
    "none here": "have no {}",
    "capacity too small": "are too small in {}",
    "reserved": "have their {} held back (in use, in maintenance, or not ready)",
    "in use": "have too little {} free",
    "amount not allowed (min_unit, max_unit, step_size)": (
        "do not give {} in this amount (min_unit, max_unit, step_size)"
    ),
    "not in the requested tree": "have {} only outside the tree that was requested",
}

# ... and for a numbered group, which one provider of the host has to satisfy whole.
GROUPS = {
    "none here": "have no provider for {}",
    "capacity too small": "have only providers that are too small for {}",
    "in use": "have no provider with enough free for {}",
    "traits not met": "have no provider with the traits of {}",
    "aggregates not met": "have no provider in the aggregates of {}",
    "reserved": "have what {} needs held back (in use, in maintenance, or not ready)",
    "amount not allowed (min_unit, max_unit, step_size)": (
        "have only providers that do not give the amounts of {} (min_unit, max_unit, step_size)"
    ),
    "not in the requested tree": "are not in the tree that {} requests",
}

# ... and for what names a trait, an aggregate or a key: the step, how the reason begins, and its meaning.
CONDITIONS = (
    ("traits", "root lacks ", "lack {} on the host itself"),
    ("traits", "root has ", "have {} on the host itself, which is forbidden"),
    ("traits", "lacks ", "lack {}"),
    ("traits", "has ", "have {}, which is forbidden"),
    ("aggregates", "not in ", "are not in aggregate {}"),
    ("aggregates", "in ", "are in aggregate {}, which is forbidden"),
    ("ComputeCapabilitiesFilter", "capability.", "do not have the requested {}"),
    ("AggregateInstanceExtraSpecsFilter", "aggregate.", "are in no aggregate with the requested {}"),
    ("AggregateImagePropertiesIsolation", "image.", "are reserved for images with another {}"),
)


def message_of(spec: RequestSpec, funnel: Sequence[FunnelStep], nearest: int = NEAREST) -> str:
    """Why no host can take the request, in one line: the last steps first, most frequent reasons first, with counts."""
    amounts = ", ".join(f"{amount} {name}" for name, amount in total_resources(spec.query).items())
    requested = f"{spec.flavor} ({amounts})"
    hosts = funnel[0].remaining + sum(funnel[0].rejected.values()) if funnel else 0
    if hosts == 0:
        return f"No host can take {requested}: placement has no hosts at all."
    reasons = nearest_reasons(funnel, nearest)
    if not reasons:
        return f"None of {hosts} hosts can take {requested}."
    return f"None of {hosts} hosts can take {requested}: " + "; ".join(reasons) + "."


def nearest_reasons(funnel: Sequence[FunnelStep], limit: int) -> list[str]:
    """The nearest misses first: a host that the last step rejected was closest to being taken."""
    reasons: list[str] = []
    for step in reversed(funnel):
        for reason, count in sorted(step.rejected.items(), key=lambda item: (-item[1], item[0])):
            reasons.append(f"{count} {reason_text(step.step, reason)}")
            if len(reasons) == limit:
                return reasons
    return reasons


def reason_text(step: str, reason: str) -> str:
    """One reason in words. `step` is a resource class where the reason is one of AMOUNTS."""
    if reason in PHRASES:
        return PHRASES[reason]
    if reason == "groups do not fit together" and step.startswith("groups "):
        return f"have room for each of {step}, but not for all of them together"
    if step.startswith("group ") and reason in GROUPS:
        return GROUPS[reason].format(step)
    for where, beginning, meaning in CONDITIONS:
        if step == where and reason.startswith(beginning):
            return meaning.format(reason.removeprefix(beginning))
    if reason in AMOUNTS:
        return AMOUNTS[reason].format(step)
    return f"were rejected by {step}" if reason == step else f"were rejected by {step} ({reason})"


def funnel_step(name: str, before: int, rejected: Mapping[str, int]) -> FunnelStep:
    """One step of a funnel; the hosts rejected and those left add up to those before."""
    left = before - sum(rejected.values())
    assert left >= 0, (name, before, rejected)
    return FunnelStep(
        step=name, remaining=left, rejected={reason: count for reason, count in rejected.items() if count}
    )


class NoValidHost(Struct, frozen=True):
    """No host can take the request now."""

    funnel: tuple[FunnelStep, ...]
    not_reported: int = 0  # hosts that only lacked a compute service's report
    claims: int = 0  # how many claims were submitted before that was known
    lost: tuple[FailedClaim, ...] = ()  # those of them that got nothing, in order
    excluded: tuple[RejectedRoots, ...] = ()  # the hosts of the funnel, by their rows as they were then

    @property
    def remaining(self) -> int:
        """Hosts that no step rejected: they came after the search that found none."""
        return self.funnel[-1].remaining if self.funnel else 0

    @property
    def may_be_out_of_order(self) -> bool:
        """Whether reports may just be late: hosts not reported yet, or no host in the replica at all."""
        hosts = self.funnel[0].remaining + sum(self.funnel[0].rejected.values()) if self.funnel else 1
        return self.not_reported > 0 or hosts == 0
