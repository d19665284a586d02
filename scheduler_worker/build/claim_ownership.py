"""What instances hold at placement already, and whether a build's own request has claimed it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

from msgspec.structs import replace

from bus.contracts.placement import Claim, ClaimOption, ClaimOutcome
from bus.contracts.placement_queries import ConsumerRecord
from bus.faults import Fault, RequestRefused
from scheduler_worker.placement_client import ClaimPort, PlacementUnavailable, answer_or_raise
from scheduler_worker.records.build_record import FIRST_ATTEMPT, ProjectsBuild


class ClaimOwnership:
    """What instances hold already: the one proof that a build may end without its cell. One per scheduler process. The
    record alone does not prove it: in a database restored to before the dispatch the build is not dispatched.
    """

    def __init__(
        self,
        claims: ClaimPort,
        cell_of_host: Callable[[str], str | None],
        recorded_owners: Callable[[Sequence[str]], Awaitable[Mapping[str, str]]],
    ) -> None:
        """`cell_of_host(uuid)`: the cell that last reported a host. `recorded_owners(instances)`: {instance:
        owner}.
        """
        self._claims = claims
        self._cell_of_host = cell_of_host
        self._recorded_owners = recorded_owners

    async def allocations_of(self, instances: Collection[str]) -> dict[str, ConsumerRecord]:
        """What instances hold, whosoever they are, and in which cell, if that is known. Raises PlacementUnavailable
        when placement does not answer, RequestRefused when it refuses to.
        """
        consumers: dict[str, ConsumerRecord] = {}
        for answer in await self._claims.allocations(sorted(instances)) if instances else ():
            if (one := answer_or_raise(answer)) is not None:
                reported = (cell for host in one.hosts if (cell := self._cell_of_host(host)) is not None)
                consumers[one.consumer] = replace(one, cell=one.cell or next(reported, None))
        return consumers

    async def allocations_of_builds(self, builds: Collection[ProjectsBuild]) -> dict[ProjectsBuild, ConsumerRecord]:
        """The same, of what was claimed for these builds. Raises as `allocations_of`."""
        consumers = await self.allocations_of({uuid: None for uuid, _ in builds})
        return {
            build: one
            for build in builds
            if (one := consumers.get(build[0])) is not None and belongs_to_build(build, one)
        }

    async def reassign_to(self, owners: Mapping[ProjectsBuild, str]) -> dict[str, ConsumerRecord | Fault]:
        """What the instances of builds that are not placed hold; what was claimed for these builds their owners have
        from now on. Or why that is not known, of each.
        """
        by_instance = {uuid: owner for (uuid, _), owner in owners.items()}
        try:
            consumers = await self.allocations_of(by_instance)
        except (PlacementUnavailable, RequestRefused) as fault:
            return dict.fromkeys(by_instance, fault)
        claimed = [
            one for build in owners if (one := consumers.get(build[0])) is not None and belongs_to_build(build, one)
        ]
        return {**consumers, **await self.transfer_claims(claimed, by_instance)}

    async def transfer_claims(self, consumers: Sequence[ConsumerRecord], owners: Mapping[str, str]) -> dict[str, Fault]:
        """Give these owners ({instance: owner}) what another owner has claimed, before a cell gets the build: a Release
        of the other, whose record is lost, may still be on its way. What a cell has claimed no owner releases. Returns
        why not, of each instance of which it is not known to have happened.
        """
        # Only the owner on record takes over. The record is read after what is held: one made anew since was there
        # before its owner claimed anything, so no earlier owner takes a claim back from it.
        others = [
            one
            for one in consumers
            if one.claim_owner not in ("", owners[one.consumer]) and one.attempt == FIRST_ATTEMPT
        ]
        if not others:
            return {}
        on_record = await self._recorded_owners([one.consumer for one in others])
        lost = PlacementUnavailable("its record was lost while it was placed, and may have been made anew")
        changed = PlacementUnavailable("what the instance holds has changed meanwhile")
        missed: dict[str, Fault] = {
            one.consumer: lost for one in others if on_record.get(one.consumer) != owners[one.consumer]
        }
        claims = [
            Claim(
                consumer=one.consumer,
                attempt=one.attempt,
                owner=owners[one.consumer],
                transfers_from=one.claim_owner,
                consumer_generation=one.consumer_generation,
                options=(ClaimOption(allocations=one.allocations, host=next(iter(one.hosts), None)),),
                project_id=one.project_id,
            )
            for one in others
            if one.consumer not in missed
        ]
        for claim, answer in zip(claims, await self._claims.submit(claims) if claims else (), strict=True):
            if isinstance(answer, Fault) or answer.outcome is not ClaimOutcome.CLAIMED:
                missed[claim.consumer] = answer if isinstance(answer, Fault) else changed
        return missed


def belongs_to_build(build: ProjectsBuild, consumer: ConsumerRecord) -> bool:
    """Whether it was claimed for a build of this project: two may name one instance."""
    return bool(consumer.attempt) and consumer.project_id == build[1]
