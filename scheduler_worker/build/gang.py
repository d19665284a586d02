"""Gangs: requests for several machines that start together or not at all, and what one member's result means for the
others. Members choose one after another, each seeing the earlier choices, and are claimed in one `placement.claim.all`.
A member that finds no host leaves the gang, which goes on while it has `min_count`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate

from msgspec.structs import replace

from bus.consuming.outcome import Done, Outcome
from bus.contracts.build import DELETE_REQUESTED, BuildAccepted
from bus.contracts.placement import MAX_GANG_PROVIDERS, MAX_MEMBERS, Claim, GroupPolicy
from placement_worker.replica.request import total_resources
from scheduler_worker.build.host_search import (
    GangIncomplete,
    HostClaimed,
    HostSearch,
    HostSearchRefused,
    HostSearchResult,
)
from scheduler_worker.build.pending_build import Admission, Answered, PendingBuild
from scheduler_worker.placement_client import PlacementUnavailable
from scheduler_worker.records.build_record import Gang

EXCLUDED = "gang.left_out"


def by_gang(states: Iterable[HostSearch]) -> list[list[HostSearch]]:
    """Host searches in their order, those of one gang (which stand side by side) as one list, any other alone."""
    grouped: list[list[HostSearch]] = []
    before: str | None = None
    for one in states:
        gang = None if one.gang is None else one.gang.uuid
        if gang is not None and gang == before:
            grouped[-1].append(one)
        else:
            grouped.append([one])
        before = gang
    return grouped


def largest_first(states: Sequence[HostSearch]) -> list[HostSearch]:
    """In the order in which members choose: large members first, because the fewest hosts fit them.

    Sizes: the sum of all amounts.
    """
    return sorted(states, key=lambda one: -sum(total_resources(one.spec.query).values()))


def within_bounds(claims: Sequence[Claim]) -> tuple[Claim, ...]:
    """A gang's claims, each with the first of its options, as many as one message may name providers. Other members of
    its server group are named once.
    """
    # Beyond the members of a request of berth's own, each takes the place of four providers in the message.
    room = MAX_GANG_PROVIDERS - 4 * max(len(claims) - MAX_MEMBERS, 0)
    first, *others = (_with_first_options(claim, room // len(claims)) for claim in claims)
    return (first, *(replace(one, group_members=()) if one.group_members else one for one in others))


def _with_first_options(claim: Claim, room: int) -> Claim:
    totals = accumulate(len(option.allocations) for option in claim.options)
    fitting = sum(total <= room for total in totals)
    return replace(claim, options=claim.options[: max(fitting, 1)])


def share_gang_results(states: Sequence[HostSearch]) -> list[HostSearch]:
    """The members of an affinity gang, each with the rejected hosts and group members that any of them has found."""
    if not states[0].spec.has_policy(GroupPolicy.AFFINITY):
        return list(states)
    rejected = {host: reason for one in states for host, reason in one.rejected.items()}
    members = {
        host: count
        for one in states
        if one.spec.related is not None
        for host, count in one.spec.related.members.items()
    }
    return [replace(one, rejected=rejected, spec=one.spec.with_members(members)) for one in states]


def apply_gang_results(states: Sequence[HostSearch]) -> list[HostSearch]:
    """The states, in their order, with what one member's result means for its gang. Without placement's answer for one
    the whole gang is tried again. Members with claims of an earlier claim owner: that one has decided which start. Too
    few left: none starts.
    """
    after: list[HostSearch] = []
    for members in by_gang(states):
        gang = members[0].gang
        after += members if gang is None else _with_results_of_gang(gang, members)
    return after


def _with_results_of_gang(gang: Gang, members: list[HostSearch]) -> list[HostSearch]:
    open_ = [one for one in members if one.result is None]
    unanswered = next((one.result for one in members if isinstance(one.result, PlacementUnavailable)), None)
    if unanswered is not None:
        return [replace(one, result=unanswered) if one.result is None else one for one in members]
    if any(isinstance(one.result, HostClaimed) for one in members):
        left = HostSearchRefused(EXCLUDED, f"an earlier claim owner of the request started gang {gang.uuid} without it")
        return [replace(one, result=left) if one.result is None else one for one in members]
    if len(open_) >= needed(gang, [one.result for one in members]):
        return members
    return [
        one if one.result is not None else replace(one, result=GangIncomplete(gang, len(open_), one.claims))
        for one in members
    ]


def needed(gang: Gang, results: Sequence[HostSearchResult | None]) -> int:
    """How many members must start together: of those that a delete has taken out meanwhile none."""
    withdrawn = sum(isinstance(one, HostSearchRefused) and one.was_deleted for one in results)
    return min(gang.min_count, max(gang.size - withdrawn, 1))


def claimable(states: Iterable[HostSearch]) -> list[list[HostSearch]]:
    """The gangs among the searches without a result that are claimed in this round: each member has chosen."""
    gangs = [members for members in by_gang(states) if members[0].gang is not None]
    return [members for members in gangs if all(one.choice is not None for one in members)]


def remaining_gangs(
    builds: Sequence[PendingBuild], admissions: Sequence[Admission], deleted: Collection[str]
) -> dict[str, Gang | None]:
    """{gang: what is left of it to start}, of each that a delete has taken members out of, or of which some were
    dispatched before. None: enough of it have started, so each of the others is a build for itself.
    """
    left: dict[str, Gang] = {}
    both = zip(reversed(builds), reversed(admissions), strict=True)
    # The first copy of each member: of a request that came twice it is withdrawn once.
    members = {one.instance_uuid: (one.gang, admission) for one, admission in both if one.gang is not None}
    for uuid, (whole, admission) in members.items():
        gang = left.get(whole.uuid, whole)
        build = admission.build if isinstance(admission, Answered) else None
        if uuid in deleted or (build is not None and build.state in DELETE_REQUESTED):
            left[gang.uuid] = replace(gang, size=gang.size - 1, min_count=min(gang.min_count, gang.size - 1))
        elif build is not None and build.cell is not None:
            left[gang.uuid] = replace(gang, size=gang.size - 1, min_count=max(gang.min_count - 1, 0))
    return {uuid: gang if gang.min_count else None for uuid, gang in left.items()}


def merged(states: Sequence[HostSearch], newer: Iterable[HostSearch]) -> list[HostSearch]:
    """The states in their order, as they are by now."""
    after = {one.request.instance_uuid: one for one in newer}
    return [after.get(one.request.instance_uuid, one) for one in states]


def outcome_of_gang(members: Sequence[PendingBuild], outcomes: Mapping[int, Outcome]) -> Outcome:
    """The outcome of a request with these members: a retry if one of them is retried, otherwise that of the first."""
    first = outcomes[members[0].batch_index]
    for pending in members:
        outcome = outcomes[pending.batch_index]
        if not isinstance(outcome, Done):
            return outcome
    if isinstance(first, Done) and isinstance(first.reply, BuildAccepted):
        reply = BuildAccepted(
            instance_uuid=first.reply.instance_uuid, members=tuple(one.instance_uuid for one in members)
        )
        return Done(reply=reply)
    return first
