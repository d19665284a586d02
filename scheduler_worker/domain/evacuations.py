"""Which instances of fenced hosts are evacuated by their policy, and under which request ids. Pure.

The id of a request follows from the fence, the instance and the number of the try, so schedulers that decide the same
make one request of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from uuid import UUID, uuid5

from msgspec import Struct

from bus.contracts.build import BuildState
from bus.contracts.fences import EvacuationPolicy
from bus.contracts.moves import Condition, MoveKind, MoveRequest
from bus.contracts.objects import FenceRecord
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.domain.builds import RecordedBuild
from scheduler_worker.domain.evacuation_policy import policy_of
from scheduler_worker.domain.recorded_moves import MoveContext, flavor_of

USER = "evacuation"  # the user_id of these requests
MAX_TRIES = 24  # tries of one instance under one fence; after that it waits for an operator
FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 600.0  # between a try that has failed and the next; doubled with each
_NAMESPACE = UUID("6b0f4c9e-3f0e-5d0a-9c55-2f6c8e1d7a41")
# The states of an instance that has a machine, or the claim of one, on its host. A move that has not been confirmed is
# ended by its cell.
_ON_HOST = frozenset({Condition.ACTIVE, Condition.STOPPED, Condition.SHELVED, Condition.RESCUED})


class FencedHost(Struct, frozen=True):
    """A host that its cell has on record as fenced. version: of the decision."""

    uuid: str
    name: str
    version: int

    def request_id(self, instance_uuid: str, tried: int) -> str:
        """The id of the request for one instance after this many failures."""
        return str(uuid5(_NAMESPACE, f"{self.uuid} {self.version} {instance_uuid} {tried}"))


def fenced_hosts(fences: Mapping[str, FenceRecord]) -> frozenset[FencedHost]:
    """The hosts whose instances may be evacuated: their cells have acknowledged their fences, and they are not to be
    used again.
    """
    return frozenset(
        FencedHost(uuid, fence.host, fence.version)
        for uuid, fence in fences.items()
        if fence.acknowledged >= fence.version and not fence.lifting
    )


def is_restarted(known: MoveContext, config: SchedulerConfig) -> bool:
    """Whether this instance is on record on its host, and is to be rebuilt elsewhere when that host is fenced."""
    if known.build is None or known.build_request is None or known.build.state is not BuildState.ACTIVE:
        return False
    if known.now.condition not in _ON_HOST:
        return False
    flavor = config.flavors.get(flavor_of(known))
    return policy_of(known.build_request.on_host_failure, flavor, config.on_host_failure) is EvacuationPolicy.RESTART


def evacuation(request_id: str, build: RecordedBuild) -> MoveRequest:
    """The request, the same from every scheduler. It states no fence: its cell's own record of one is the proof.

    Its cell offloads a shelved instance, which has nothing to be started elsewhere.
    """
    return MoveRequest(
        request_id=request_id,
        instance_uuid=build.instance_uuid,
        project_id=build.project_id,
        user_id=USER,
        kind=MoveKind.EVACUATE,
    )


def pause_s(tried: int) -> float:
    """How long the next try waits after this many failures."""
    return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(tried, 32))
