"""One pass of host choices for a batch of requests, in parts that yield the event loop. Parts are bounded by what is
done in them, not by time, so a simulated run repeats exactly. Pure but for the replica.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from random import Random

import numpy as np
from msgspec.structs import replace

from bus.contracts.placement import GroupPolicy
from placement_worker.replica.request import QueryTooWide
from scheduler_worker.build.claim_answer import refusal_step, search_again_or_end
from scheduler_worker.build.gang import by_gang, largest_first, share_gang_results
from scheduler_worker.build.host_search import HostSearch
from scheduler_worker.hosts.host_table import Rows
from scheduler_worker.selection.choice import MAX_OPTIONS, NONE_FULL, CellBatching, Choice
from scheduler_worker.selection.ranking import GroupExclusions, Ranking
from scheduler_worker.selection.request_spec import RequestSpec, member_capacity
from scheduler_worker.selection.selector import Selector

# The most hosts that are tried, one after another, for a gang all of whose members must be on one.
MAX_SHARED_HOSTS = 64
# The most that is done in one part of a pass, counted in choices: about 4 ms, 8 where 40,000 hosts are nested.
PART_COST = 32
# A ranking or an explanation counts as this many choices, and one more for each HOSTS_PER_CHOICE hosts.
RANKING_COST = 2
HOSTS_PER_CHOICE = 1500


class DecisionRound:
    """One pass: an assumed choice counts as used for every later one. subset: how many of the best hosts a choice is
    drawn from. batching: of the scheduler; equal hosts are chosen from one cell at a time.
    """

    # Between two parts placement and the host table may change. Rankings are kept as long as only usage does: whether a
    # host still fits is looked at for each choice. After any other change each is made anew.

    def __init__(self, selector: Selector, rng: Random, *, subset: int, batching: CellBatching | None = None) -> None:
        self._selector = selector
        self._replica = selector.replica
        self._rng = rng
        self._subset = subset
        self._batches = batching
        if batching is not None:
            batching.begin_round()
        self.rankings: dict[tuple[str, ...], Ranking] = {}
        self._placed: dict[tuple[str, str], dict[str, int]] = {}  # by project and group: members by host
        self._exclusions: dict[tuple[str, str, int], GroupExclusions] = {}  # and by how many may share a host
        self._cost = 0  # of the present part
        self._candidates: list[int] = []  # of the rankings that were dropped between parts

    @property
    def candidates(self) -> list[int]:
        """The number of hosts in each ranking that was made."""
        return [*self._candidates, *map(len, self.rankings.values())]

    def in_parts(self, states: Sequence[HostSearch], decided: list[HostSearch]) -> Iterator[None]:
        """Decide all of the states into `decided`, in their order. At each yield the caller lets others run.

        The choices made until then are assumed; a caller that does not go on takes them back.
        """
        for members in by_gang(states):
            if members[0].gang is None:
                yield from self._pause()
                decided += map(self.decide, members)
            else:
                decided += yield from self.decide_gang(members)

    def _pause(self, cost: int = 1) -> Iterator[None]:
        """End the part, unless something of this cost still belongs to it."""
        if self._cost + cost <= PART_COST:
            return
        before = self._selector.version
        yield
        self._cost = 0
        if self._selector.version != before:
            self._candidates = self.candidates
            self.rankings.clear()

    def decide(self, state: HostSearch) -> HostSearch:
        """The state with a choice to claim, or with the result when nothing fits."""
        try:
            state = self.choose(state)
            return state if state.choice is not None else self._nothing_fits(state)
        except QueryTooWide as error:  # the traits of a flavor combine in too many ways to search them all
            return refusal_step(state, error.code, str(error))

    def decide_gang(self, states: Sequence[HostSearch]) -> Generator[None, None, list[HostSearch]]:
        """`decide` for the members of one gang, in parts: each sees where the earlier members are. In their order."""
        members = largest_first(share_gang_results(states))
        try:
            together = members[0].spec.has_policy(GroupPolicy.AFFINITY)
            chosen = yield from (self._choose_one_host(members) if together else self._choose_each(members))
        except QueryTooWide as error:
            return [refusal_step(one, error.code, str(error)) for one in states]
        found, after = {one.request.instance_uuid: one for one in chosen}, []
        for state in states:
            yield from self._pause()
            one = found[state.request.instance_uuid]
            after.append(one if one.choice is not None else self._nothing_fits(one))
        return after

    def _choose_each(self, members: Sequence[HostSearch]) -> Generator[None, None, list[HostSearch]]:
        chosen = []
        for one in members:
            yield from self._pause()
            chosen.append(self.choose(one))
        return chosen

    def _choose_one_host(self, members: list[HostSearch]) -> Generator[None, None, list[HostSearch]]:
        """Choices on one host: the first host that takes all of the members, or else the tried host that takes most."""
        # Hosts with room for most members are tried first, and none with room for no more than a tried one took. A part
        # may end between two hosts: then no member has a host.
        best = [replace(one, choice=None) for one in members]  # what they chose before is lost, or tried again below
        passed_over: dict[str, str] = {}
        while len(passed_over) < MAX_SHARED_HOSTS:
            yield from self._pause(len(members))
            chosen = self._try_one_host(members, passed_over, least=_placed_count(best) + 1)
            head = chosen[0].choice if chosen else None
            if head is None:
                break
            if _placed_count(chosen) == len(members):
                return chosen
            self._take_back(chosen)
            best = max(best, chosen, key=_placed_count)
            passed_over[head.selected.uuid] = "gang.too_small"
            members = [replace(one, same_host=False) for one in members]
        if not _placed_count(best):
            # No host takes the largest; smaller members may start without it.
            largest = _key_excluding(members[0])
            others = [one for one in members if _key_excluding(one) != largest]
            chosen = (yield from self._choose_one_host(others)) if others else []
            return [*best, *chosen]  # the later ones count
        for one in best:
            if one.choice is not None:
                self._assume(one, one.choice)
        return best

    def _try_one_host(
        self, members: Sequence[HostSearch], passed_over: Mapping[str, str], *, least: int
    ) -> list[HostSearch]:
        """The members with their choices on the host that may take the most; nothing if none may take so many."""
        first, *others = members
        ranking = self._most_free(members, passed_over, least)
        if ranking is None:
            return []
        self.rankings[first.spec.key] = ranking
        head = self.choose(replace(first, rejected={**first.rejected, **passed_over}))
        rejected = {host: reason for host, reason in head.rejected.items() if host not in passed_over}
        chosen = [replace(head, rejected=rejected), *map(self.choose, others)]
        for one in members:
            self.rankings.pop(_key_excluding(one), None)  # it was made of the first member's host
        return chosen

    def _most_free(self, members: Sequence[HostSearch], passed_over: Mapping[str, str], least: int) -> Ranking | None:
        """The hosts that may take the most of the members; None: no host may take so many."""
        first = members[0]
        self._charge_search()
        view = self._selector.passing(first.spec)
        out = self._selector.rows_of({**first.rejected, **passed_over})
        view = view.subset(~np.isin(view.rows, list(out)))
        rooms = [member_capacity(some, view) for some in zip(*(one.spec.queries for one in members), strict=True)]
        room = np.minimum(sum(rooms), len(members))
        most = int(room.max(initial=0))
        return None if most < least else self._rank(first.spec, among=view.rows[room == most])

    def _take_back(self, members: Sequence[HostSearch]) -> None:
        """Undo these choices."""
        for one in members:
            self._selector.drop_assumed(one.request.instance_uuid)
            self._placed_of(one).clear()
        self._exclusions.clear()  # hosts that were full are not

    def choose(self, state: HostSearch) -> HostSearch:
        """The state with its choice, assumed; without one when no host fits. Raises QueryTooWide."""
        self._cost += 1
        state, choice = self._same_host(state)
        if choice is not None:
            self._assume(state, choice)
            return replace(state, choice=choice)
        exclusions = self._group_exclusions(state)
        spec = self._seen_by(state) if exclusions is None else state.spec.without_related()
        ranking = self.rankings.get(spec.key)
        if ranking is None:
            ranking = self.rankings[spec.key] = self._rank(spec)
        rejected = self._selector.rows_of(state.rejected)
        choice = ranking.pick(
            rejected,
            subset=self._subset,
            alternates=state.max_alternates,
            full_hosts=NONE_FULL if exclusions is None else exclusions,
        )
        if choice is not None:
            self._assume(state, choice)
            ranking.consumed(choice.selected)
            if exclusions is not None:
                choice = replace(choice, passing_hosts=max(1, choice.passing_hosts - exclusions.full_hosts))
        return replace(state, choice=choice)

    def _rank(self, spec: RequestSpec, among: Rows | None = None) -> Ranking:
        self._charge_search()
        return self._selector.rank(spec, self._rng, self._batches, among=among)

    def _nothing_fits(self, state: HostSearch) -> HostSearch:
        after = search_again_or_end(state, self._selector)
        if after.result is not None:
            self._charge_search()
        return after

    def _charge_search(self) -> None:
        self._cost += RANKING_COST + len(self._replica.rows_of_roots()) // HOSTS_PER_CHOICE

    def _group_exclusions(self, state: HostSearch) -> GroupExclusions | None:
        """The hosts that a member of an anti-affinity group may not use; None: its peers matter for its ranking too.

        With them it shares the ranking of all requests like it, so a member costs the same as any other request.
        """
        if not self._selector.config.may_share_ranking(state.spec):
            return None
        related = state.spec.related
        assert related is not None
        group = related.server_group
        assert group is not None
        key = (state.request.project_id, group.uuid, group.max_per_host)
        exclusions = self._exclusions.get(key)
        if exclusions is None:
            exclusions = self._exclusions[key] = GroupExclusions(
                self._replica, self._placed_of(state), group.max_per_host
            )
        exclusions.learn(related.members)
        return exclusions

    def _seen_by(self, state: HostSearch) -> RequestSpec:
        """The spec of a gang's member: its server group also counts the members that this round has
        placed before it.
        """
        spec, group = state.spec, state.request.server_group
        placed = {} if state.gang is None or group is None else self._placed_of(state)
        if not placed:
            return spec
        assert spec.related is not None
        known = spec.related.members
        spec = spec.with_members({host: known.get(host, 0) + count for host, count in placed.items()})
        if spec.has_policy(GroupPolicy.AFFINITY):
            return replace(spec.only_on(tuple(placed)), key=_key_excluding(state))
        return spec

    def _placed_of(self, state: HostSearch) -> dict[str, int]:
        group = state.request.server_group
        assert group is not None
        return self._placed.setdefault((state.request.project_id, group.uuid), {})

    def _same_host(self, state: HostSearch) -> tuple[HostSearch, Choice | None]:
        """The host whose tree had changed, if it still fits as it is now; otherwise the host is rejected."""
        if not state.same_host:
            return state, None
        state, chosen = replace(state, same_host=False), state.choice
        assert chosen is not None
        host = chosen.selected
        row = self._replica.row_of(host.uuid)
        if row is not None and (found := self._selector.options_on(state.spec, row, limit=MAX_OPTIONS)):
            return state, replace(chosen, selected=replace(host, row=row, options=found))
        return replace(state, rejected={**state.rejected, host.uuid: "claim.conflict"}), None

    def _assume(self, state: HostSearch, choice: Choice) -> None:
        self._selector.assume(state.request.instance_uuid, state.spec, choice.selected)
        if state.request.server_group is not None:
            placed = self._placed_of(state)
            placed[choice.selected.uuid] = placed.get(choice.selected.uuid, 0) + 1


def _key_excluding(state: HostSearch) -> tuple[str, ...]:
    """The key of alike members of a gang that have to be where its first member is: they share a ranking."""
    assert state.gang is not None
    return (state.spec.flavor, "beside", state.gang.uuid)


def _placed_count(members: Sequence[HostSearch]) -> int:
    """How many members have a host."""
    return sum(one.choice is not None for one in members)
