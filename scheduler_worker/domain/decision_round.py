"""One pass of decisions over the replica: like requests share a ranking, and each choice is assumed."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

from msgspec.structs import replace

from bus.contracts.groups import GroupPolicy
from placement_worker.replica.book import Book
from placement_worker.replica.request import QueryTooWide
from placement_worker.replica.search import options
from scheduler_worker.domain.attempt import Attempt
from scheduler_worker.domain.gangs import largest_first, pooled
from scheduler_worker.domain.ranking import Choice, RandomSource, Ranking
from scheduler_worker.domain.request_spec import RequestSpec
from scheduler_worker.domain.selector import Selector
from scheduler_worker.domain.step import nothing_fits, refused

# Hosts that are tried, one after another, for a gang all of whose members must be on one.
MAX_SHARED_HOSTS = 64


class GroupRoom:
    """The rows of hosts that a member of an anti-affinity group may not use: rejected, or full with other members.

    placed: members that this round has put on hosts, by host; the claims of all of them leave together.
    """

    __slots__ = ("_book", "_members", "_most", "_placed", "_rejected")

    def __init__(
        self, book: Book, rejected: Container[int], members: Mapping[str, int], placed: Mapping[str, int], most: int
    ) -> None:
        self._book = book
        self._rejected = rejected
        self._members = members
        self._placed = placed
        self._most = most

    def __contains__(self, row: object) -> bool:
        assert isinstance(row, int)
        if row in self._rejected:
            return True
        uuid = self._book.uuid_of(row)
        return self._members.get(uuid, 0) + self._placed.get(uuid, 0) >= self._most

    @property
    def full(self) -> int:
        """How many hosts are full with members."""
        return sum(count >= self._most for count in self._members.values())


class DecisionRound:
    """A synchronous pass at one moment: an assumed choice counts as used for every later one.

    subset: how many of the best hosts a choice is drawn from. rankings: those that were made, by the key of
    their requests.
    """

    def __init__(self, selector: Selector, rng: RandomSource, *, subset: int) -> None:
        self._selector = selector
        self._book = selector.book
        self._rng = rng
        self._subset = subset
        self.rankings: dict[tuple[str, ...], Ranking] = {}
        self._placed: dict[tuple[str, str], dict[str, int]] = {}  # by project and group: members by host

    def decide(self, attempt: Attempt) -> Attempt:
        """The attempt with a choice to claim, with a probe to claim, or with what follows when nothing fits."""
        if attempt.chosen_ahead:
            return replace(attempt, chosen_ahead=False)
        try:
            attempt = self.choose(attempt)
            return attempt if attempt.choice is not None else nothing_fits(attempt, self._selector)
        except QueryTooWide as error:  # the traits of a flavor combine in too many ways to search them all
            return refused(attempt, error.code, str(error))

    def decide_gang(self, attempts: Sequence[Attempt]) -> list[Attempt]:
        """What `decide` is for one, for members of one gang: each sees where the ones before it are. In their order."""
        members = largest_first(pooled(attempts))
        try:
            together = members[0].spec.has_policy(GroupPolicy.AFFINITY)
            chosen = self._choose_one_host(members) if together else [self.choose(one) for one in members]
        except QueryTooWide as error:
            return [refused(one, error.code, str(error)) for one in attempts]
        after = {
            one.request.instance_uuid: one if one.choice is not None else nothing_fits(one, self._selector)
            for one in chosen
        }
        return [after[one.request.instance_uuid] for one in attempts]

    def _choose_one_host(self, members: Sequence[Attempt]) -> list[Attempt]:
        """Choices on one host: the first that takes all of the members, else of those tried the one that takes most."""
        first, *others = members
        best: list[Attempt] = []
        passed_over: dict[str, str] = {}
        for _ in range(MAX_SHARED_HOSTS):
            head = self.choose(replace(first, rejected={**first.rejected, **passed_over}))
            rejected = {host: why for host, why in head.rejected.items() if host not in passed_over}
            chosen = [replace(head, rejected=rejected), *map(self.choose, others)]
            self._take_back(chosen)
            best = max(best, chosen, key=_placed_count)
            if head.choice is None or _placed_count(chosen) == len(members):
                break
            passed_over[head.choice.selected.uuid] = "gang.too_small"
        for one in best:
            if one.choice is not None:
                self._assume(one, one.choice)
        return best

    def _take_back(self, members: Sequence[Attempt]) -> None:
        """Undo these choices."""
        for one in members:
            self._book.forget(one.request.instance_uuid)
            self._placed_of(one).clear()
        for one in members[1:]:
            self.rankings.pop(one.spec.key, None)  # it was made of the host of the first

    def choose(self, attempt: Attempt) -> Attempt:
        """The attempt with its choice, assumed; without one when no host fits. Raises QueryTooWide."""
        attempt, choice = self._same_host(attempt)
        if choice is not None:
            self._assume(attempt, choice)
            return replace(attempt, choice=choice)
        room = self._room_of(attempt)
        spec = self._seen_by(attempt) if room is None else attempt.spec.without_peers()
        ranking = self.rankings.get(spec.key)
        if ranking is None:
            ranking = self._selector.rank(spec, self._rng)
            self.rankings[spec.key] = ranking
        excluded = self._selector.rows_of(attempt.rejected) if room is None else room
        choice = ranking.pick(excluded, subset=self._subset, alternates=attempt.max_alternates)
        if choice is not None:
            self._assume(attempt, choice)
            ranking.consumed(choice.selected)
            if room is not None:
                choice = replace(choice, passed=max(1, choice.passed - room.full))
        return replace(attempt, choice=choice)

    def _room_of(self, attempt: Attempt) -> GroupRoom | None:
        """Of a member of a group that stays apart: the hosts it may not use, where nothing else depends on its peers.

        So its ranking is the one of all requests like it, and a member costs what any request does.
        """
        peers = attempt.spec.peers
        if peers is None or not self._selector.may_share_ranking(attempt.spec):
            return None
        assert peers.server_group is not None
        return GroupRoom(
            self._book,
            self._selector.rows_of(attempt.rejected),
            peers.members,
            self._placed_of(attempt),
            peers.server_group.max_per_host,
        )

    def _seen_by(self, attempt: Attempt) -> RequestSpec:
        """The spec of a gang's member: its server group is also where this round has put the members before it."""
        spec, group = attempt.spec, attempt.request.server_group
        placed = {} if attempt.gang is None or group is None else self._placed_of(attempt)
        if not placed or spec.peers is None:
            return spec
        known = spec.peers.members
        spec = spec.with_members({host: known.get(host, 0) + count for host, count in placed.items()})
        if spec.has_policy(GroupPolicy.AFFINITY):
            return replace(spec, query=replace(spec.query, only_roots=tuple(placed)))
        return spec

    def _placed_of(self, attempt: Attempt) -> dict[str, int]:
        group = attempt.request.server_group
        assert group is not None
        return self._placed.setdefault((attempt.request.project_id, group.uuid), {})

    def _same_host(self, attempt: Attempt) -> tuple[Attempt, Choice | None]:
        """The host whose shape had changed, if it still fits as it is now; else it is rejected."""
        host, chosen = attempt.same_host, attempt.choice
        if host is None or chosen is None:
            return replace(attempt, same_host=None) if host is not None else attempt, None
        attempt = replace(attempt, same_host=None)
        row = self._book.row_of(host.uuid)
        limit = self._selector.config.max_options
        found = [] if row is None else options(self._book, attempt.spec.query, row, limit=limit)
        if row is None or not found:
            return replace(attempt, rejected={**attempt.rejected, host.uuid: "claim.raced"}), None
        return attempt, replace(chosen, selected=replace(host, row=row, options=found))

    def _assume(self, attempt: Attempt, choice: Choice) -> None:
        self._book.assume(attempt.request.instance_uuid, choice.selected.options[0].allocations)
        of_gang = attempt.gang is not None and attempt.request.server_group is not None
        if of_gang or attempt.spec.has_policy(GroupPolicy.ANTI_AFFINITY):
            placed = self._placed_of(attempt)
            placed[choice.selected.uuid] = placed.get(choice.selected.uuid, 0) + 1


def _placed_count(members: Sequence[Attempt]) -> int:
    """How many have a host; of no members fewer than of members without one."""
    return sum(one.choice is not None for one in members) if members else -1
