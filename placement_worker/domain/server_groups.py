"""Server groups and quotas: the rules that a claim must satisfy besides capacity."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice

from msgspec import Struct

from bus.contracts.placement import INSTANCES, MAX_LOCATED_HOSTS, Claim, ClaimOption, ClaimOutcome, GroupPolicy
from placement_worker.domain.migration import MIGRATION_TYPE
from placement_worker.domain.values import ClaimedProvider, ConsumerState, GroupKey, Provider, ProviderAllocations

# The policies that placement enforces with each claim. The soft policies are left to the scheduler's weighers.
HARD = frozenset({GroupPolicy.AFFINITY, GroupPolicy.ANTI_AFFINITY})


class GroupMember(Struct, frozen=True, order=True):
    """One member of a server group of a project. The member's hosts are not stored; they follow from its
    allocations.
    """

    project: str
    group: str
    consumer: str


class GroupCount:
    """The number of members of one server group on each host. It is updated with each change instead of counted for
    each claim.
    """

    __slots__ = ("by_host", "hosts", "seen")

    def __init__(self, members: Mapping[str, Sequence[str]]) -> None:
        self.hosts: dict[str, Sequence[str]] = dict(members)  # of each member
        self.by_host: dict[str, int] = {}
        self.seen = 0  # the number of the ledger's changes that are counted
        for hosts in members.values():
            self._count(hosts, 1)

    def put(self, consumer: str, hosts: Sequence[str]) -> None:
        """Set the hosts of a member."""
        self._count(self.hosts.get(consumer, ()), -1)
        self.hosts[consumer] = hosts
        self._count(hosts, 1)

    def without(self, consumers: Iterable[str], hosts: Collection[str] | None = None) -> dict[str, int]:
        """Return the number of members by host, without these consumers. hosts: only on these; None: on all."""
        counted = dict(self.by_host) if hosts is None else {host: self.by_host.get(host, 0) for host in hosts}
        for consumer in consumers:
            for host in self.hosts.get(consumer, ()):
                if host in counted:
                    counted[host] -= 1
        return {host: count for host, count in counted.items() if count}

    def _count(self, hosts: Sequence[str], sign: int) -> None:
        for host in hosts:
            self.by_host[host] = self.by_host.get(host, 0) + sign


def group_key(claim: Claim) -> GroupKey | None:
    """The server group that a claim names. Groups of different projects are different, even under one name."""
    return None if claim.server_group is None else (claim.project_id, claim.server_group.uuid)


def hosts_of(providers: Iterable[Provider | ClaimedProvider]) -> tuple[str, ...]:
    """Return the hosts of a consumer that holds allocations of these providers: the roots of the providers.

    The root of a sharing provider counts only if the consumer holds nothing else. Members of server groups are counted
    by this rule.
    """
    held = list(providers)
    own = [provider for provider in held if not provider.shares] or held
    return tuple(sorted({provider.root for provider in own}))


def permitted(claim: Claim, option: ClaimOption, others: Mapping[str, int]) -> ClaimOutcome:
    """Return whether the hard policy of the server group allows the claim's consumer on the option's host.

    A member that moves is on two hosts. With affinity no host is then allowed for other members, because the move may
    end on either host. A group of a foreign control plane may be on several for good, after an evacuation or a forced
    move, and is joined on each host that has a member, as in Nova.
    """
    group = claim.server_group
    assert group is not None
    if option.host is None:
        return ClaimOutcome.INVALID
    if group.policy is GroupPolicy.ANTI_AFFINITY:
        allowed = others.get(option.host, 0) < group.max_per_host
    elif group.policy is GroupPolicy.AFFINITY and claim.external:
        allowed = not others or option.host in others
    else:
        allowed = group.policy is not GroupPolicy.AFFINITY or set(others) <= {option.host, *claim.fenced_hosts}
    return ClaimOutcome.CLAIMED if allowed else ClaimOutcome.POLICY_VIOLATED


def decisive_hosts(claim: Claim) -> Collection[str] | None:
    """The hosts whose members decide about the claim, and are shown where it is refused; None: all.

    With anti-affinity these are only the hosts that the claim names, because the group may be on very many others.
    """
    assert claim.server_group is not None
    if claim.server_group.policy is not GroupPolicy.ANTI_AFFINITY:
        return None
    return dict.fromkeys(option.host for option in claim.options if option.host is not None)


def visible_members(others: Mapping[str, int]) -> dict[str, int]:
    """The other members by host, for the answer to a claim that the rule has refused."""
    return dict(islice(others.items(), MAX_LOCATED_HOSTS))


def usage_by_class(allocations: ProviderAllocations) -> dict[str, int]:
    """Return the amounts of one consumer that count against a quota: the sum of each class over all its providers, and
    one instance.
    """
    held = {INSTANCES: 1} if allocations else {}
    for resources in allocations.values():
        for name, amount in resources.items():
            held[name] = held.get(name, 0) + amount
    return held


def counted_by_class(consumer: ConsumerState) -> dict[str, int]:
    """Return the amounts of a consumer that count against its project's quota: all that it holds, as Nova counts by the
    usages of Placement. A migration is not another instance; one whose instance holds nothing has another type.
    """
    held = usage_by_class(consumer.allocations)
    if consumer.consumer_type == MIGRATION_TYPE:
        held.pop(INSTANCES, None)
    return held


def usage_changes(
    before: Mapping[str, ConsumerState], after: Mapping[str, ConsumerState | None]
) -> dict[tuple[str, str], int]:
    """Return {(project, class): the change of the project's usage}, INSTANCES included, for the consumers that changed.

    before: the former states of those that existed. Amounts that do not change are left out.
    """
    more: dict[tuple[str, str], int] = {}
    for uuid, consumer in after.items():
        for one, sign in ((before.get(uuid), -1), (consumer, 1)):
            if one is not None:
                for name, amount in counted_by_class(one).items():
                    key = (one.project_id, name)
                    more[key] = more.get(key, 0) + sign * amount
    return {key: amount for key, amount in more.items() if amount}
