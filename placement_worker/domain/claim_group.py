"""A group of claims: the rows that it names, which are locked for it, and the reply to each item."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from itertools import count

from msgspec import Struct
from msgspec.structs import replace

from bus.contracts import placement as messages
from bus.contracts.base import ORDER_OUTDATED, Refusal
from bus.contracts.placement import MAX_LOCATED_HOSTS, GroupPolicy
from placement_worker.domain.claim_ledger import ClaimReply
from placement_worker.domain.claims import ClaimItem
from placement_worker.domain.migration import MIGRATION_TYPE, is_migration
from placement_worker.domain.server_groups import HARD
from placement_worker.domain.values import ABOVE_CELLS, ConsumerState, GroupKey, ProviderAllocations

Holders = Mapping[int, tuple[messages.ConflictingConsumer, ...]]

NOBODY: Holders = {}
MAX_PLAIN, MAX_PLAIN_PROVIDERS = 8, 32  # of a group that one statement may take; a larger one shares its round trips
MAX_GROUP_MEMBERS_READ = 100  # members of a group with affinity, beside the consumers that the transaction names


class MembersToLock(Struct, frozen=True):
    """The members of server groups that decide about a group of claims.

    hosts: (project, group, host): all members there, so that the size of the group does not matter. moved: (project,
    group, consumer): members that the same transaction may move. together: groups with affinity, of which `most`
    members are wanted: enough that at least one of them does not move.
    """

    hosts: list[tuple[str, str, str]]
    moved: list[tuple[str, str, str]]
    together: list[GroupKey]
    most: int


def refuse_stale(highest: int) -> Refusal:
    """The refusal of what a lower incarnation of the cell's database has decided."""
    return Refusal(code=ORDER_OUTDATED, reason=f"the cell has requested by incarnation {highest} of its database")


class ClaimGroup:
    """Items that are decided in order in one transaction, and the rows that they name, found in one pass.

    consumers: the row that each named consumer gets if it is new and its first write succeeds. providers, classes: all
    that the items name. limits: {(project, class): the lowest limit that the claims state}. enrolled: members of server
    groups that others have claimed. incarnations: of the cell's database, by which each was decided.
    """

    def __init__(self, items: Sequence[ClaimItem], incarnations: Sequence[int] = ()) -> None:
        self.items = items
        self.highest = 0  # on record, once it was read
        self._incarnations = incarnations or [0] * len(items)
        self.consumers: dict[str, ConsumerState] = {}
        self.providers: set[str] = set()
        self.classes: set[str] = set()
        self.limits: dict[tuple[str, str], int] = {}
        self.enrolled: dict[GroupKey, set[str]] = {}
        self._keys: set[GroupKey] = set()
        self._hosts: set[tuple[str, str, str]] = set()
        self._together: set[GroupKey] = set()
        self._leaves_fenced_hosts = False
        self._grouped: set[tuple[str, str, str]] = set()
        self._ungrouped: list[str] = []  # consumers that are claimed without a group, or moved
        for item in items:
            for one in item.claims if isinstance(item, messages.ClaimAll) else (item,):
                self._add(one)

    @property
    def keys(self) -> list[GroupKey]:
        """The server groups that the items name, in the order of their locks."""
        return sorted(self._keys)

    @property
    def projects(self) -> list[str]:
        """The projects whose claims have limits, in the order of their locks."""
        return sorted({project for project, _ in self.limits})

    @property
    def plain(self) -> dict[str, messages.ClaimOption]:
        """The first option of each consumer, if this is a small group of plain claims for new consumers that name
        different providers; otherwise nothing.
        """
        if len(self.items) > MAX_PLAIN or self._keys or len(self.consumers) != len(self.items):
            return {}
        taken: dict[str, messages.ClaimOption] = {}
        named: list[str] = []
        for item in self.items:
            if not isinstance(item, messages.Claim) or not item.options or item.consumer_generation is not None:
                return {}
            allocations = item.options[0].allocations
            moves = item.release_first or item.external or item.migration is not None
            if moves or not (allocations and all(allocations.values())):
                return {}
            taken[item.consumer] = item.options[0]
            named += allocations
        is_counted = not any(map(is_migration, self.consumers.values()))
        return taken if is_counted and len(set(named)) == len(named) <= MAX_PLAIN_PROVIDERS else {}

    def items_of_incarnation(self, highest: int) -> list[ClaimItem]:
        """The items that were decided by the highest incarnation of their cell's database, or by none."""
        self.highest = highest
        return [item for item, number in zip(self.items, self._incarnations, strict=True) if number >= highest]

    def with_stale(self, replies: Sequence[ClaimReply]) -> list[ClaimReply | Refusal]:
        """The replies to those, and refusals of the others, in order."""
        decided = iter(replies)
        return [
            next(decided) if number >= self.highest else refuse_stale(self.highest) for number in self._incarnations
        ]

    def members(self, known: Container[str] | None = None) -> MembersToLock:
        """Return the members that decide about the items. known: the named consumers that are on record, if they were
        read; one that holds nothing is a member again where the items give it something.

        A revert and a swap name no group, so a consumer that they move may be a member of any; a release only takes
        away. No claim's consumer is paired with the other claims' groups: a batch may name as many groups as consumers.
        """
        moved = self._grouped.union((*key, one) for one in self._ungrouped for key in self._keys)
        if known is not None:
            moved = {one for one in moved if one[2] in known}
        most = MAX_GROUP_MEMBERS_READ + len(self.consumers)
        if self._leaves_fenced_hosts:  # the few that have left them decide
            most += MAX_LOCATED_HOSTS
        return MembersToLock(sorted(self._hosts), sorted(moved), sorted(self._together), most)

    def _add(
        self, item: messages.Claim | messages.Release | messages.Restate | messages.Revert | messages.Swap
    ) -> None:
        if isinstance(item, messages.Claim):
            self._add_claim(item)
        elif isinstance(item, messages.Release):
            self.consumers.setdefault(item.consumer, ConsumerState(0, item.attempt or 0, "", "", ""))
        elif isinstance(item, messages.Restate):
            new = ConsumerState(1, item.attempt, item.project_id, item.user_id, "INSTANCE")
            self.consumers.setdefault(item.consumer, new)
            for uuid in (item.consumer, *item.migrations):
                self.consumers.setdefault(uuid, ConsumerState(0, item.attempt, "", "", ""))
                self._ungrouped.append(uuid)
            self._name(item.allocations or {})
        elif isinstance(item, messages.Revert):
            for uuid in (item.consumer, item.migration.uuid):
                self.consumers.setdefault(uuid, ConsumerState(0, item.attempt, "", "", ""))
                self._ungrouped.append(uuid)
            self._name(item.migration.source)
        else:
            for entry in item.consumers:
                new = ConsumerState(1, 0, entry.project_id, entry.user_id, entry.consumer_type)
                self.consumers.setdefault(entry.consumer, new)
                self._ungrouped.append(entry.consumer)
                self._name(entry.allocations)

    def _add_claim(self, claim: messages.Claim) -> None:
        named = [claim.consumer]
        attempt = 0 if claim.external else claim.attempt
        new = ConsumerState(
            1, attempt, claim.project_id, claim.user_id, claim.consumer_type, claim_owner=claim.owner or ""
        )
        self.consumers.setdefault(claim.consumer, new)
        if claim.migration is not None:
            named.append(claim.migration.uuid)
            migration = ConsumerState(1, claim.attempt, claim.project_id, claim.user_id, MIGRATION_TYPE)
            self.consumers.setdefault(claim.migration.uuid, migration)
            self._name(claim.migration.source)
        for option in claim.options:
            self._name(option.allocations)
        for name, limit in claim.limits.items():
            of_class = (claim.project_id, name)
            self.limits[of_class] = min(self.limits.get(of_class, limit), limit)
        group = claim.server_group
        if group is None:
            self._ungrouped += named
            return
        key = (claim.project_id, group.uuid)
        self._keys.add(key)
        if claim.external:  # of its own members placement knows more than anyone who claims
            self.enrolled.setdefault(key, set()).update(claim.group_members)
        self._grouped.update((*key, one) for one in named)
        if group.policy in HARD:
            self._hosts.update((*key, option.host) for option in claim.options if option.host is not None)
        if group.policy is GroupPolicy.AFFINITY:
            self._together.add(key)
            self._leaves_fenced_hosts |= bool(claim.fenced_hosts)

    def _name(self, allocations: ProviderAllocations) -> None:
        self.providers.update(allocations)
        self.classes.update(*allocations.values())


def numbered(decided: Sequence[ClaimReply], sequence: int, bus: str, holders: Holders = NOBODY) -> list[ClaimReply]:
    """Return the replies with the number in the feed of what they have changed. holders: of what lost claims lacked, by
    the places of `Decision.lost`.
    """
    places = count()

    def claimed(result: messages.ClaimResult) -> messages.ClaimResult:
        members = result.members if bus == ABOVE_CELLS else {}  # a cell learns nothing of other cells' hosts
        named = holders.get(next(places), ())
        return replace(result, sequence=result.sequence and sequence, members=members, conflicting_consumers=named)

    def reply(one: ClaimReply) -> ClaimReply:
        if isinstance(one, messages.ClaimResult):
            return claimed(one)
        if isinstance(one, messages.ClaimAllResult):
            return messages.ClaimAllResult(results=tuple(map(claimed, one.results)))
        return replace(one, sequence=one.sequence and sequence)

    return list(map(reply, decided))
